"""`$!`: in which shell it is expanded, and whose process id it is."""

from collections.abc import Iterator

from diagnostics.launch.layers import Chain, Launch, Layer, Shell
from diagnostics.launch.rules.rule import Edit, Hit, Rule, Severity, before
from diagnostics.launch.shell import Command, Expansion, Pipeline, Span
from diagnostics.launch.wrappers import SHELLS

OF_THE_MOMENT = {"!": "the last background process", "?": "the last status", "$": "the process id"}
# These become the program they are given, under the same process id.
BECOMES = {"nohup", "setsid", "nice", "ionice", "env", "stdbuf", "exec", "taskset", "numactl"}
STAYS = {
    "timeout": "timeout",
    "sudo": "sudo",
    "flock": "flock",
    "script": "script",
    "srun": "srun",
    "conda run": "conda",
    "uv run": "uv",
}


def _wrong_side(launch: Launch) -> Iterator[Hit]:
    for layer in _openers(launch):
        for expansion in _expanded_too_early(layer):
            if expansion.name == "!" and _background_before(layer):
                continue  # a background process of this very shell is meant
            meaning = OF_THE_MOMENT[expansion.name]
            yield Hit(
                expansion.span,
                f"{expansion.span.text} is {meaning} of {_of(layer.shell)}, not of {layer.name}",
                edits=(Edit(before(expansion.span), "\\"),),
                reveals="DL016",
            )


def _openers(launch: Launch) -> Iterator[Layer]:
    """The commands, as they stand in a shell text, that hand text to another shell; each once."""
    seen = set[Span]()
    for shell in launch.shells:
        own = next((layer for layer in reversed(shell.opened_by) if layer.own), None)
        if own is not None and own.command.span not in seen and not _in_place(shell):
            seen.add(own.command.span)
            yield own


def _in_place(shell: Shell) -> bool:
    """Whether the words that it is given are meant for this shell's own text."""
    return shell.kind in {"file", "function"}


def _expanded_too_early(layer: Layer) -> Iterator[Expansion]:
    bodies = [r.target for r in layer.command.redirects if r.body is not None and r.target]
    for word in (*layer.command.words, *bodies):
        if len(word.value) > 2 and (word.quoted or bodies):
            yield from (e for e in word.expansions if e.name in OF_THE_MOMENT)


def _background_before(layer: Layer) -> bool:
    return any(p.background for p in layer.shell.script.before(layer.pipeline))


def _of(shell: Shell) -> str:
    if shell.process.opened_by:
        return f"the shell that {shell.process.kind} starts"
    return "the script's shell" if shell.process.kind == "file" else "the shell you type in"


def _wrapper(launch: Launch) -> Iterator[Hit]:
    for shell in launch.shells:
        for pipeline in shell.script.pipelines:
            for use in _uses(pipeline):
                started = _last_background(shell, pipeline)
                chain = _chain_of(launch, started) if started else None
                if started and chain and not _expanded_outside(launch, use, shell):
                    yield from _named(use, started, chain, shell)


def _uses(pipeline: Pipeline) -> Iterator[Span]:
    """Where a pipeline reads `$!`, unless it only waits for it."""
    for command in pipeline.commands:
        if command.argv[:1] != ["wait"]:
            values = [word for _, word in command.assignments]
            files = [r.target for r in command.redirects if r.target]
            for word in (*command.words, *values, *files):
                yield from (e.span for e in word.expansions if e.name == "!")


def _last_background(shell: Shell, pipeline: Pipeline) -> Pipeline | None:
    earlier = [p for p in shell.script.before(pipeline) if p.background]
    return earlier[-1] if earlier else None


def _expanded_outside(launch: Launch, use: Span, shell: Shell) -> bool:
    """A shell around this one has put a value in already: DL015's business."""
    outer = [layer for layer in shell.opened_by if layer.own]
    return any(e.span == use for layer in outer for w in layer.command.words for e in w.expansions)


def _chain_of(launch: Launch, pipeline: Pipeline) -> Chain | None:
    first = pipeline.commands[0]
    passing = [c for c in launch.chains if any(x.command is first for x in c.layers)]
    trainers = [c for c in passing if c in launch.trainers]
    return trainers[-1] if trainers else None


def _named(use: Span, started: Pipeline, chain: Chain, shell: Shell) -> Iterator[Hit]:
    last = started.commands[-1]
    if len(started.commands) > 1:
        who = last.argv[0] if last.argv else "the pipe's last command"
        yield Hit(use, f"it is the process id of {who}, the last command of the pipe")
        return
    who = _who(chain, started.commands[0])
    if who:
        yield Hit(use, f"it is the process id of {who}{_inside(shell.place.hops)}")


def _inside(hops: tuple[str, ...]) -> str:
    """A container counts its processes from 1."""
    if not hops or hops[-1].startswith(("ssh", "srun", "sbatch")):
        return ""
    return f", in the process ids of {hops[-1]} (ps on the host shows another)"


def _who(chain: Chain, first: Command) -> str:
    """The wrapper that keeps the process id which the shell saw; empty if the trainer has it."""
    start = next(i for i, layer in enumerate(chain.layers) if layer.command is first)
    for layer in chain.layers[start:]:
        handed = layer.handed
        if layer.name in BECOMES:
            continue
        if layer.name in STAYS:
            return f"{STAYS[layer.name]}, which waits for the trainer"
        if handed and handed.hop:
            return f"the client {layer.command.argv[0]}"
        if layer.name in SHELLS or (handed and handed.how in {"script", "function"}):
            return _of_shell(chain, layer)
        return ""
    return ""


def _of_shell(chain: Chain, layer: Layer) -> str:
    inner = chain.layers[chain.layers.index(layer) + 1 :]
    shown = " ".join(layer.command.argv[:2])
    if not inner:
        return f"`{shown}`: the wrapper's, unless the script ends in exec"
    first = next((each for each in inner if each.own), inner[0])
    alone = len(first.shell.script.pipelines) == 1 and first.shell.kind in SHELLS
    return "" if first.name == "exec" or alone else f"the wrapper `{shown}`"


RULES = (
    Rule(
        "DL015",
        "`$!` is expanded on the wrong side",
        Severity.MISLEADS,
        "Inside double quotes the shell that you type in puts the value in before the other shell"
        " starts: you see a process id of your own machine, or none.",
        'ssh host "nohup python -u train.py >> /tmp/train.log 2>&1 & echo $!"',
        'ssh host "nohup python -u train.py >> /tmp/train.log 2>&1 & echo \\$!"',
        "the outer shell's value is meant.",
        _wrong_side,
    ),
    Rule(
        "DL016",
        "`$!` is not the trainer's process id",
        Severity.MISLEADS,
        "`$!` is what the shell itself started: a wrapper or tee. SIGTERM to it leaves the"
        " trainer running, and ps says that it lives when the trainer is long dead.",
        "python -u train.py 2>&1 | tee -a train.log & echo $!",
        "nohup python -u train.py >> train.log 2>&1 & echo $!",
        "the number is only waited for, or the script replaces itself with exec.",
        _wrapper,
    ),
)

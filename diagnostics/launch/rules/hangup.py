"""What happens to the trainer when the terminal or the connection goes away."""

import re
from collections.abc import Iterator

from diagnostics.launch.layers import Chain, Launch, Layer
from diagnostics.launch.rules.rule import Edit, Hit, Rule, Severity, before
from diagnostics.launch.shell import Command, Span
from diagnostics.launch.streams import tee_logs
from diagnostics.launch.wrappers import basename, name_of

LASTING = {"wait", "bash", "sh", "zsh", "exec", "tail", "sleep", "read", "fg", "watch", "cat"}
SHIELDS = {"nohup", "setsid"}
ONE_PIPE = re.compile(r"\s*(2>&1\s*)?\|&?\s*")
LOSES_ITS_READER = (
    "The program outlives the hang-up and what reads its output does not: the next line that it"
    " writes finds no reader (EPIPE), and ends it."
)
TORCH_LAUNCHERS = {"torchrun", "accelerate"}
TORCH_MODULES = {"torch.distributed.run", "torch.distributed.launch", "accelerate.commands.launch"}


def _background(launch: Launch) -> Iterator[tuple[Chain, Layer, int]]:
    """Training programs started with `&`: the chain, the layer of the statement, its index."""
    seen = set[Span]()
    for chain in launch.trainers:
        for index, layer in enumerate(chain.layers):
            if layer.own and layer.pipeline.background and layer.pipeline.span not in seen:
                seen.add(layer.pipeline.span)
                yield chain, layer, index


def _shield(chain: Chain, index: int) -> str:
    """The wrapper that keeps a hang-up from the program, and from all that reads its output.

    The first from the `&` inwards; empty if there is none.
    """
    for layer in chain.layers[index:]:
        if layer.own and not all(name_of(reader) in SHIELDS for reader in _readers(layer)):
            return ""
        if layer.name in SHIELDS:
            return layer.name
    return ""


def _readers(layer: Layer) -> tuple[Command, ...]:
    """What stands behind the layer's command in its pipeline."""
    commands = layer.pipeline.commands
    return commands[commands.index(layer.command) + 1 :]


def _ends_at_once(layer: Layer) -> bool:
    """Whether nothing behind it keeps the shell alive."""
    rest = layer.shell.rest(layer.pipeline)
    later = [p.commands[0].argv[0] for p in rest if p.commands[0].argv]
    return not LASTING & {basename(name) for name in later}


def _ignores_hangup(layer: Layer) -> bool:
    return any(
        command.argv[:2] == ["trap", ""] and "HUP" in " ".join(command.argv)
        for command in layer.shell.front(layer.pipeline)
    )


def _race(launch: Launch) -> Iterator[Hit]:
    for chain, layer, index in _background(launch):
        shell = layer.shell.process
        if not (shell.opened_by and shell.tty) or shell.keys:
            continue
        if _shield(chain, index) != "nohup" or _ignores_hangup(layer):
            continue
        if _ends_at_once(layer):
            yield _hit(layer, "the terminal goes away as soon as the shell ends, perhaps too early")


def _hit(layer: Layer, what: str) -> Hit:
    first = layer.shell.process.script.start
    around = first.source.text[: first.start][-1:]
    nothing = '""' if around == "'" else "''"  # it may stand in the other quotes
    return Hit(
        layer.pipeline.span,
        what,
        edits=(Edit(first, f"trap {nothing} HUP; "),),
    )


def _unprotected(launch: Launch) -> Iterator[Hit]:
    for chain, layer, index in _background(launch):
        safe = _shield(chain, index) or _ignores_hangup(layer)
        detached = any(each.handed and each.handed.detached for each in chain.layers[index:])
        shell = layer.shell.process
        if safe or detached or not shell.tty or shell.kind == "file":
            continue
        if shell.opened_by and _ends_at_once(layer) and not shell.keys:
            yield _hit(layer, f"{shell.kind} takes its terminal away when the shell ends")
        elif not shell.opened_by and not (_waits(layer) or _disowned(layer)):
            yield _typed(chain, index)


def _typed(chain: Chain, index: int) -> Hit:
    """Typed by the user, in the shell of the terminal."""
    layer = chain.layers[index]
    span = layer.pipeline.span
    shielded = SHIELDS & {each.name for each in chain.layers[index:]}
    edits = () if shielded else (Edit(before(span), "nohup "),)
    if not _readers(layer):
        return Hit(span, "it belongs to this terminal, and is hung up on with it", edits=edits)
    reader = " ".join(_readers(layer)[-1].argv[:1])
    return Hit(
        span,
        f"{reader} is hung up on with the terminal" if shielded else "all of it is hung up on",
        why=LOSES_ITS_READER if shielded else "",
        edits=(*edits, *_without_tee(layer)),
        instead="nohup bash -c 'PROGRAM 2>&1 | tee -a LOG' &",
    )


def _without_tee(layer: Layer) -> tuple[Edit, ...]:
    """The log as a redirect, where a `tee` of one file is all that reads."""
    first, last = layer.command.words[-1].span, _readers(layer)[-1]
    found = [*tee_logs(last, layer)]
    between = last.span.source.text[first.end : last.span.start]
    if len(found) != 1 or not ONE_PIPE.fullmatch(between) or not (word := found[0].word):
        return ()
    operator = ">>" if found[0].appends else ">"
    errors = " 2>&1" if "&" in between else ""
    replaced = Span(first.source, first.end, last.span.end)
    return (Edit(replaced, f" {operator} {word.span.text}{errors}"),)


def _waits(layer: Layer) -> bool:
    later = layer.shell.rest(layer.pipeline)
    return any(p.commands[0].argv[:1] == ["wait"] for p in later)


def _disowned(layer: Layer) -> bool:
    """Whether the shell is told not to hang up on it; without a job, the last one is meant."""
    others = False
    for pipeline in layer.shell.rest(layer.pipeline):
        if pipeline.commands[0].argv[:1] == ["disown"]:
            return not others or len(pipeline.commands[0].argv) > 1
        others = others or pipeline.background
    return False


def _torchrun(launch: Launch) -> Iterator[Hit]:
    for chain in launch.trainers:
        names = chain.names()
        argv = chain.program.command.argv
        named = [word for word in argv[:4] if basename(word) in TORCH_LAUNCHERS | TORCH_MODULES]
        if named and "nohup" in names and "setsid" not in names and chain.program.tty:
            nohup = next(layer for layer in chain.layers if layer.name == "nohup")
            word = nohup.command.words[0]
            yield Hit(
                word.span,
                f"{basename(named[0])} handles SIGHUP itself and stops its workers",
                edits=(Edit(word.span, "setsid"),),
            )


RULES = (
    Rule(
        "DL017",
        "nohup may come too late",
        Severity.RUN,
        "When the shell ends, its terminal hangs up, and SIGHUP can arrive before nohup has made"
        " the program ignore it: measured, 61 of 100 runs of `nohup ... & echo $!` never started.",
        "ssh -t host 'nohup python -u train.py >> /tmp/train.log 2>&1 & echo $!'",
        "ssh -t host \"trap '' HUP; nohup python -u train.py >> /tmp/train.log 2>&1 & echo \\$!\"",
        "the shell goes on for some seconds.",
        _race,
    ),
    Rule(
        "DL018",
        "`&` on a terminal that goes away",
        Severity.RUN,
        "The program belongs to the terminal's session: when the connection, the window or the"
        " shell ends, it gets SIGHUP and dies. disown saves it at a prompt, and comes too late"
        " where the shell ends with its command.",
        "ssh -t host 'python -u train.py >> /tmp/train.log 2>&1 &'",
        "ssh -t host \"trap '' HUP; nohup python -u train.py >> /tmp/train.log 2>&1 &\"",
        "you stay until it has ended.",
        _unprotected,
    ),
    Rule(
        "DL019",
        "nohup does not protect torchrun",
        Severity.RUN,
        "torchrun installs a handler of its own for SIGHUP, which undoes nohup: when the terminal"
        " goes away, it ends all workers.",
        "nohup torchrun --nproc-per-node 8 train.py >> train.log 2>&1 &",
        "setsid torchrun --nproc-per-node 8 train.py >> train.log 2>&1 &",
        "no terminal is there that could hang up.",
        _torchrun,
    ),
)

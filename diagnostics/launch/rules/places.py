"""Which side of a container, connection or quote something happens on."""

import filecmp
from collections.abc import Iterator
from pathlib import Path

from diagnostics.launch.layers import Chain, Launch, Layer, is_python, is_training
from diagnostics.launch.parse import parse
from diagnostics.launch.rules.rule import Edit, Hit, Rule, Severity, before
from diagnostics.launch.shell import Pipeline, Span, Word
from diagnostics.launch.streams import logs, streams
from diagnostics.launch.whereabouts import path_in, said_path, value_of
from diagnostics.launch.wrappers import SHELLS, basename, split_options

ENTERS = {"cd", "source", ".", "export", "conda", "mamba", "module", "set", "ulimit", "umask"}


def _host_side(launch: Launch) -> Iterator[Hit]:
    seen = set[Span]()
    for chain in launch.trainers:
        for log in logs(chain):
            outside, inside = log.layer.shell.place.hops, chain.program.place.other_roots
            if log.span not in seen and len(outside) < len(inside):
                seen.add(log.span)
                who = f"the shell on {log.layer.shell.place}"
                yield Hit(log.span, f"{who} opens it, the program runs in {inside[-1]}")
        for layer in chain.layers:
            yield from _clients(layer, seen)


def _clients(layer: Layer, seen: set[Span]) -> Iterator[Hit]:
    """What is bound to a client that returns at once: tmux, docker run -d."""
    if not (layer.own and layer.handed and layer.handed.detached):
        return
    files = [r for r in layer.command.redirects if r.writes]
    after = layer.pipeline.commands[layer.pipeline.commands.index(layer.command) + 1 :]
    spans = [r.span for r in files if r.target and r.target.value != "/dev/null"]
    spans += [c.span for c in after if c.argv[:1] == ["tee"]]
    for span in spans:
        if span not in seen:
            seen.add(span)
            yield Hit(
                span, f"it belongs to the {layer.name} that returns at once, not to the program"
            )


def _no_log(launch: Launch) -> Iterator[Hit]:
    for chain in launch.trainers:
        out = streams(chain)[-1].out
        detached = any(layer.handed and layer.handed.detached for layer in chain.layers)
        background = any(layer.own and layer.pipeline.background for layer in chain.layers)
        discarded = out.kind == "discarded"
        if logs(chain) or not (detached or background or discarded):
            continue
        if _own_log(chain) or ("sbatch" in chain.names() and not discarded):
            continue
        word = chain.program.command.words[0]
        gone = {
            "discarded": "to /dev/null",
            "elsewhere": "to the container's own log",
            "pipe": "to the connection only",
        }
        yield Hit(word.span, f"its output goes {gone.get(out.kind, 'to a terminal only')}")


def _own_log(chain: Chain) -> bool:
    """tmux pipe-pane and screen -L write one."""
    return any("pipe-pane" in x.command.argv or "-L" in _options(x) for x in chain.layers)


def _options(layer: Layer) -> set[str]:
    return {*layer.handed.options} if layer.handed and layer.name == "screen" else set()


def _lost_in_quotes(launch: Launch) -> Iterator[Hit]:
    seen = set[Span]()
    for layer in (layer for chain in launch.chains for layer in chain.layers):
        hit = _cut_short(layer) or _one_word(layer)
        if layer.own and not hit:
            hit = _left_outside(layer, launch)
        if hit and hit.span not in seen:
            seen.add(hit.span)
            yield hit
    for shell in launch.shells:
        if shell.script.broken is not None and shell.kind != "function":
            yield Hit(
                shell.script.broken,
                f"this part of what {shell.kind} gets is no bash that can be read here",
                instead="look at the quotes around it",
                unknown=True,
            )


def _cut_short(layer: Layer) -> Hit | None:
    """`bash -c cd /x && python …`: only the first word is the command."""
    if layer.name not in SHELLS:
        return None
    options, rest = split_options(layer.command.words[1:], {"-o", "-O", "+o"}.__contains__)
    if "-c" not in options or not rest:
        return None
    command = rest[0]
    bare = len(command.value.split()) == 1 and "$" not in command.value
    if not bare or (len(rest) == 1 and not _does_nothing_alone(command)):
        return None
    lost = " ".join(word.value for word in rest[1:]) or "its argument"
    return Hit(command.span, f"{layer.name} -c runs `{command.value}` alone: {lost} is not in it")


def _one_word(layer: Layer) -> Hit | None:
    """`lxc exec c -- 'cd /x && python …'`: no shell is there to take the word apart."""
    word = layer.command.words[0] if layer.command.words else None
    if word is None or word.expansions or len(word.value.split()) < 2:
        return None
    first = parse(word.text).pipelines[:1]
    argv = first[0].commands[0].argv if first else []
    if not argv or not (is_training(argv) or basename(argv[0]) in ENTERS | SHELLS):
        return None
    return Hit(
        word.span,
        "all of it is taken for the name of one program: no shell reads it",
        edits=(Edit(before(word.span), "bash -c "),),
    )


def _does_nothing_alone(command: Word) -> bool:
    return command.value in {"cd", "source", "nohup", "exec"}


def _left_outside(layer: Layer, launch: Launch) -> Hit | None:
    """`docker exec c cd /app && python …`: the second half runs outside."""
    handed, following = layer.handed, _next(layer)
    if not (handed and handed.hop and handed.words and following):
        return None
    inner = [c for c in launch.chains if any(x.command is layer.command for x in c.layers)]
    firsts = [word for c in inner for word in c.program.command.argv[:1]]
    only_enters = bool(firsts) and {*firsts} <= ENTERS
    trains = any(x.own and x.pipeline is following for x in launch.training_layers)
    if layer.pipeline.ends_with not in {"&&", ";"} or not (only_enters and trains):
        return None
    return Hit(
        following.span,
        f"it runs on {layer.shell.place}: only what is in front goes to {handed.hop}",
        edits=_quoted(handed.words[0].span, following, "" if handed.text else "bash -c "),
    )


def _quoted(first: Span, last: Pipeline, shell: str) -> tuple[Edit, ...]:
    """Single quotes around all of it, where none are in it."""
    ends = [r.span.end for command in last.commands for r in command.redirects]
    end = max(last.span.end, *ends) if ends else last.span.end
    inside = first.source.text[first.start : end]
    if "'" in inside or not first.start < end:
        return ()
    behind_all = Span(first.source, end, end)
    return Edit(before(first), f"{shell}'"), Edit(behind_all, "'")


def _next(layer: Layer) -> Pipeline | None:
    return next(iter(layer.shell.script.after(layer.pipeline)), None)


def programs(launch: Launch) -> Iterator[tuple[Word, Layer]]:
    """The files that are run: scripts given to a shell, programs given to Python."""
    for chain in launch.chains:
        for layer in chain.layers:
            handed = layer.handed
            if handed and handed.how == "script" and not handed.stdin:
                yield handed.words[0], layer
        yield from _python_file(chain)


def _python_file(chain: Chain) -> Iterator[tuple[Word, Layer]]:
    layer = chain.program
    if layer.command.argv and is_python(layer.command.argv[0]):
        valued = {"-c", "-m", "-W", "-X"}
        options, rest = split_options(layer.command.words[1:], valued.__contains__)
        if rest and rest[0].value != "-" and not {"-c", "-m"} & options.keys():
            yield rest[0], layer


def _other_copy(launch: Launch) -> Iterator[Hit]:
    seen = set[Span]()
    for word, layer in programs(launch):
        value = value_of(word, layer.values())
        if layer.place.here or word.span in seen:
            continue
        seen.add(word.span)
        theirs = path_in(word, layer)
        mine = Path(value) if value and value.startswith("/") else Path()
        if theirs is not None and mine.is_file() and theirs.is_file():
            if not filecmp.cmp(mine, theirs, shallow=False):
                yield Hit(word.span, f"{mine} differs from {theirs}, and the second one runs")
        elif theirs is None:
            yield _unseen(word, layer, mine.is_file())


def _unseen(word: Word, layer: Layer, exists: bool) -> Hit:
    also = "; a file of that name is on this machine too, and is not what runs" if exists else ""
    what = f"what {word.value} on {layer.place} says cannot be seen from here{also}"
    said = said_path(word, layer)
    ask = f"type there, and where you edit it: sha256sum {said}"
    if layer.handed is not None:
        ask += f"; and there: dflash-diag launch-check {said}"
    return Hit(word.span, what, instead=ask, unknown=True)


RULES = (
    Rule(
        "DL027",
        "the log is opened on the wrong side",
        Severity.MISLEADS,
        "A redirect belongs to the shell that reads it. Outside the quotes that is the outer one:"
        " the log lies on the host and ends with the connection, or holds what a client said that"
        " returned at once.",
        "docker exec trainer python -u train.py >> /workspace/train.log 2>&1",
        "docker exec trainer bash -c 'exec python -u train.py >> /workspace/train.log 2>&1'",
        "the log is meant to lie outside, and the connection outlives the run.",
        _host_side,
    ),
    Rule(
        "DL028",
        "a part of the command is lost between the quotes",
        Severity.RUN,
        "`bash -c` takes one word, ssh joins its words and drops their quotes, `docker exec` has"
        " no shell that takes a word apart, and `&&` outside quotes belongs to the outer shell: a"
        " part of the command runs nowhere, or elsewhere.",
        "ssh host bash -c 'cd /workspace && exec python -u train.py >> /workspace/train.log 2>&1'",
        "ssh host 'cd /workspace && exec python -u train.py >> /workspace/train.log 2>&1'",
        "the words behind are meant as $0, $1, ...",
        _lost_in_quotes,
    ),
    Rule(
        "DL029",
        "the file that runs is another copy",
        Severity.MISLEADS,
        "The path exists on both sides of the container, with different contents: what you edited"
        " is not what runs.",
        "chroot other-root bash -c"
        " 'exec python -u /workspace/train.py >> /workspace/train.log 2>&1'",
        "bash -c 'exec python -u /workspace/train.py >> /workspace/train.log 2>&1'",
        "the two are meant to differ.",
        _other_copy,
        given="other-root/ holds a train.py under the same path, with other contents",
    ),
    Rule(
        "DL030",
        "nothing keeps the output",
        Severity.LOG,
        "The program runs out of sight and its output goes to a terminal, to nothing, or to a log"
        " that is deleted with the container: after a crash there is nothing to read.",
        "tmux new-session -d -s train 'exec python -u train.py' \\; set-option remain-on-exit on",
        "tmux new-session -d -s train 'exec python -u train.py >> /tmp/train.log 2>&1' \\;"
        " set-option remain-on-exit on",
        "the program writes its own log file, tracebacks included.",
        _no_log,
    ),
)

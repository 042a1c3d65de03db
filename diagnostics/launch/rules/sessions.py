"""tmux: a name that is taken, a session that vanishes, options that end it."""

import re
from collections.abc import Iterator
from pathlib import Path

from diagnostics.launch.layers import Chain, Launch, Layer
from diagnostics.launch.rules import tmux_state
from diagnostics.launch.rules.rule import Edit, Hit, Rule, Severity, behind
from diagnostics.launch.shell import Span
from diagnostics.launch.wrappers import TMUX_STARTS, basename, split_options, tmux_commands

NEW = {"new", "new-session"}
GLOBAL_VALUED = {"-L", "-S", "-f", "-c", "-T"}
AT_ONCE = {"cd", "source", ".", "export", "conda", "module", "echo", "mkdir", "set"}
STAYING = {"bash", "sh", "zsh", "read", "sleep", "tail", "cat"}


def _starts(launch: Launch) -> Iterator[tuple[Chain, Layer]]:
    """The tmux commands that start a training program, each once."""
    seen = set[Span]()
    for chain in launch.chains:
        for layer in chain.layers:
            if layer.command.argv[:1] == ["tmux"] and layer.command.span not in seen:
                verbs = {part.argv[0] for part in tmux_commands(layer.command)}
                if verbs & TMUX_STARTS.keys():
                    seen.add(layer.command.span)
                    yield chain, layer


def _own_options(layer: Layer) -> dict[str, Path | None]:
    """tmux's own options, in front of its verb."""
    options, _ = split_options(layer.command.words[1:], GLOBAL_VALUED.__contains__)
    return {name: Path(word.value) if word else None for name, word in options.items()}


def _taken(launch: Launch) -> Iterator[Hit]:
    for _, layer in _starts(launch):
        for part in tmux_commands(layer.command):
            options, _ = split_options(
                part.words[1:], ["-c", "-e", "-F", "-f", "-n", "-s", "-t", "-x", "-y"].__contains__
            )
            name = options.get("-s") if part.argv[0] in NEW else None
            if name is None or "-A" in options or {"-L", "-S"} & _own_options(layer).keys():
                continue
            if _cleared(launch, name.value):
                continue
            if not layer.place.here:
                ask = f"type there: tmux has-session -t ={name.value}"
                what = f"whether a session {name.value} exists on {layer.place} is unknown here"
                yield Hit(name.span, what, instead=ask, unknown=True)
            elif tmux_state.session_exists(name.value):
                yield Hit(name.span, f"a session {name.value} is there already")


def _cleared(launch: Launch, name: str) -> bool:
    """Whether the launch asks for the session or ends it in front."""
    text = "\n".join(" ".join(x.command.argv) for chain in launch.chains for x in chain.layers)
    asks = rf"\b(kill-session|has-session|has)\b.{{0,20}}\b{re.escape(name)}\b"
    return re.search(asks, text) is not None


def _no_remain(launch: Launch) -> Iterator[Hit]:
    tmux_texts = " ".join(" ".join(layer.command.argv) for _, layer in _starts(launch))
    if any(kept in tmux_texts for kept in ("remain-on-exit", "$?", "PIPESTATUS")):
        return
    for _, layer in _starts(launch):
        through = [c for c in launch.trainers if any(x.command is layer.command for x in c.layers)]
        if not through or through[-1].program.shell.keys or _stays(through[-1], layer):
            continue
        conf = _own_options(layer).get("-f")
        if layer.place.here and tmux_state.option("remain-on-exit", conf)[0] in {"on", "failed"}:
            continue
        end = behind(layer.command.words[-1].span)
        yield Hit(
            layer.command.words[0].span,
            "the session is gone with the program, and its exit status too",
            edits=(Edit(end, " \\; set-option remain-on-exit on"),),
        )


def _ends_at_once(launch: Launch) -> Iterator[Hit]:
    for _, layer in _starts(launch):
        inner = [c for c in launch.chains if any(x.command is layer.command for x in c.layers)]
        started = [c for c in inner if not c.program.shell.keys and c.program.name != layer.name]
        names = {basename(c.program.command.argv[0]) for c in started if c.program.command.argv}
        if names and names <= AT_ONCE:
            yield Hit(
                layer.command.words[0].span,
                "its command ends at once, and the session with it",
                instead="tmux new-session -d -s NAME -c DIRECTORY, without a command",
            )


def _stays(chain: Chain, layer: Layer) -> bool:
    """Whether the session's command ends in a shell or another program that stays."""
    index = next(i for i, each in enumerate(chain.layers) if each.command is layer.command)
    for inner in chain.layers[index + 1 :]:
        last = inner.shell.script.pipelines[-1].commands[0] if inner.own else inner.command
        if last is not inner.command:
            words = [basename(word) for word in last.argv if word != "exec"]
            return bool(words) and words[0] in STAYING
    return False


def _unattached(launch: Launch) -> Iterator[Hit]:
    for _, layer in _starts(launch):
        if not layer.place.here:
            continue
        for name in ("destroy-unattached", "exit-unattached"):
            value, where = tmux_state.option(name, _own_options(layer).get("-f"))
            if value == "on":
                word = layer.command.words[0]
                yield Hit(word.span, f"{where} sets {name} on: nobody attaches, so it ends at once")


def _shell(launch: Launch) -> Iterator[Hit]:
    for chain, layer in _starts(launch):
        handed = next((x.handed for x in chain.layers if x.command is layer.command), None)
        if not layer.place.here or handed is None or handed.how != "text":
            continue
        shell, where = tmux_state.default_shell(_own_options(layer).get("-f"))
        if basename(shell) in tmux_state.NO_SHELL:
            yield Hit(layer.command.words[0].span, f"{where} names {shell}, which runs nothing")
        elif basename(shell) in tmux_state.C_SHELLS and "2>" in (
            handed.text.value if handed.text else ""
        ):
            yield Hit(layer.command.words[0].span, f"{where} names {shell}, which has no `2>&1`")


def _no_terminal(launch: Launch) -> Iterator[Hit]:
    for _, layer in _starts(launch):
        for part in tmux_commands(layer.command):
            options, _ = split_options(
                part.words[1:], ["-c", "-e", "-F", "-f", "-n", "-s", "-t", "-x", "-y"].__contains__
            )
            if part.argv[0] in NEW and "-d" not in options and not layer.tty:
                word = part.words[0]
                yield Hit(
                    word.span,
                    "without -d it needs a terminal, and there is none here",
                    edits=(Edit(behind(word.span), " -d"),),
                )


RULES = (
    Rule(
        "DL020",
        "the tmux session's name is taken",
        Severity.RUN,
        "tmux says `duplicate session` and starts nothing, while the old session looks like the"
        " new one.",
        "tmux new-session -d -s taken 'exec python -u train.py >> /tmp/train.log 2>&1' \\;"
        " set-option remain-on-exit on",
        "tmux new-session -d -s train 'exec python -u train.py >> /tmp/train.log 2>&1' \\;"
        " set-option remain-on-exit on",
        "the old session is ended before the launch.",
        _taken,
        given="a session `taken` exists",
    ),
    Rule(
        "DL021",
        "the tmux session vanishes with the program",
        Severity.STATUS,
        "Without remain-on-exit the session ends when its command does, however it ends: neither"
        " the status nor the last screen can be seen afterwards.",
        "tmux new-session -d -s train 'exec python -u train.py >> /tmp/train.log 2>&1'",
        "tmux new-session -d -s train 'exec python -u train.py >> /tmp/train.log 2>&1' \\;"
        " set-option remain-on-exit on",
        "the status is written to a file by the session's command.",
        _no_remain,
    ),
    Rule(
        "DL022",
        "tmux ends what nobody is attached to",
        Severity.RUN,
        "destroy-unattached and exit-unattached end a detached session before its command has"
        " run: measured, the trainer started in 0 of 20 runs.",
        "tmux -f unattached.conf new-session -d -s train"
        " 'exec python -u train.py >> /tmp/train.log 2>&1' \\; set-option remain-on-exit on",
        "tmux -f /dev/null new-session -d -s train"
        " 'exec python -u train.py >> /tmp/train.log 2>&1' \\; set-option remain-on-exit on",
        "a server runs already that was started without these options.",
        _unattached,
        given="unattached.conf says `set -g destroy-unattached on`",
    ),
    Rule(
        "DL023",
        "tmux's shell cannot run the command",
        Severity.RUN,
        "tmux hands its command to the default shell: nologin and false run nothing, and csh"
        " knows no `2>&1`. The client ends with status 0 all the same.",
        "tmux -f nologin.conf new-session -d -s train"
        " 'exec python -u train.py >> /tmp/train.log 2>&1' \\; set-option remain-on-exit on",
        "tmux -f bash.conf new-session -d -s train"
        " 'exec python -u train.py >> /tmp/train.log 2>&1' \\; set-option remain-on-exit on",
        "a server runs already with another default-shell.",
        _shell,
        given="nologin.conf says `set -g default-shell /usr/sbin/nologin`, bash.conf /bin/bash",
    ),
    Rule(
        "DL024",
        "tmux without -d and without a terminal",
        Severity.RUN,
        "`open terminal failed: not a terminal`: the client ends with status 1 and nothing starts.",
        'ssh host "tmux new-session -s train'
        " 'exec python -u train.py >> /tmp/train.log 2>&1' \\\\; set-option remain-on-exit on\"",
        'ssh host "tmux new-session -d -s train'
        " 'exec python -u train.py >> /tmp/train.log 2>&1' \\\\; set-option remain-on-exit on\"",
        "it is run by hand, in a terminal.",
        _no_terminal,
    ),
    Rule(
        "DL035",
        "the tmux session ends before it is used",
        Severity.RUN,
        "A session's command replaces its shell: after `cd` the session is over, and the keys"
        " that are sent to it go nowhere.",
        "tmux new-session -d -s train 'cd /workspace'; tmux send-keys -t train"
        " 'exec python -u train.py >> /workspace/train.log 2>&1' Enter",
        "tmux new-session -d -s train -c /workspace; tmux send-keys -t train"
        " 'exec python -u train.py >> /workspace/train.log 2>&1' Enter",
        "tmux keeps dead panes, and nothing is sent to this one.",
        _ends_at_once,
    ),
)

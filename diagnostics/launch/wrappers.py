"""Programs that run another program: what each hands over, and where that then runs.

Those that take options and then a command are in `known_wrappers.py`; those that read shell text
have a function each.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from diagnostics.launch.known_wrappers import SLURM_FLAGS, WRAPPERS, Wrapper, names
from diagnostics.launch.shell import Command, Text, Word, join

ASSIGNS = re.compile(r"[A-Za-z_]\w*=")


@dataclass(frozen=True)
class Handed:
    """What a wrapper runs: words, or shell text, or a shell script.

    `how`: `words`, `text`, `script` (`words` are the path and its arguments), `keys` (typed into a
    shell by tmux send-keys), `function` (the text of its body). `hop` names another root or machine
    (`ssh host`, `pct exec 200`), `remote` says that it is another machine; `tty` is None where the
    wrapper leaves it as it is.
    `detached`: the wrapper returns at once, and its own redirects do not reach the program.
    `stdin`: the script comes through standard input, from where the wrapper is typed.
    """

    how: str
    words: tuple[Word, ...] = ()
    text: Text | None = None
    assignments: tuple[tuple[str, Word], ...] = ()
    hop: str = ""
    remote: bool = False
    tty: bool | None = None
    detached: bool = False
    stdin: bool = False
    options: dict[str, Word | None] = field(default_factory=dict)


SHELLS = {"bash", "sh", "dash", "zsh", "ksh"}
TMUX_STARTS = {
    "new-session": "-c -e -F -f -n -s -t -x -y",
    "new": "-c -e -F -f -n -s -t -x -y",
    "new-window": "-c -e -F -n -t",
    "neww": "-c -e -F -n -t",
    "split-window": "-c -e -F -l -p -t",
    "respawn-pane": "-c -e -t",
    "respawn-window": "-c -e -t",
}


def basename(word: str) -> str:
    """The program's name: `/usr/bin/bash` is `bash`."""
    return word.rsplit("/", 1)[-1]


def split_options(
    words: Sequence[Word], takes_value: Callable[[str], bool]
) -> tuple[dict[str, Word | None], tuple[Word, ...]]:
    """Leading options with their values, and the words behind them (without a first `--`).

    A cluster is taken apart: `-dms train` is `-d`, `-m`, and `-s` with its value.
    """
    options: dict[str, Word | None] = {}
    rest = [*words]
    while rest and rest[0].value.startswith("-") and rest[0].value != "-":
        word = rest.pop(0)
        if word.value == "--":
            break
        if word.value.startswith("--"):
            name, equals, _ = word.value.partition("=")
            options[name] = _tail(word, len(name) + 1) if equals else None
            if not equals and takes_value(name) and rest:
                options[name] = rest.pop(0)
            continue
        for i, letter in enumerate(word.value[1:], 1):
            options[f"-{letter}"] = None
            if takes_value(f"-{letter}"):
                attached = i + 1 < len(word.value)
                options[f"-{letter}"] = _tail(word, i + 1) if attached else _first(rest)
                break
    return options, tuple(rest)


def _first(rest: list[Word]) -> Word | None:
    return rest.pop(0) if rest else None


def _tail(word: Word, start: int) -> Word:
    """The word without its first characters: the value in `--wrap=value`."""
    text, span = word.text.cut(start, len(word.value)), word.text.span(start)
    inside = tuple(e for e in word.expansions if span.covers(e.span))
    return Word(text, span, inside, word.quoted)


def name_of(command: Command) -> str:
    """The wrapper's name with its verb (`tmux new-session`, `pct exec`), or the program's."""
    argv = command.argv
    if not argv:
        return ""
    name = basename(argv[0])
    verbs = [word for word in argv[1:] if not word.startswith("-")][:2]
    for known in (" ".join([name, *verbs]), " ".join([name, *verbs[:1]])):
        if known in WRAPPERS:
            return known
    if name == "tmux":
        return " ".join([name, *(part.argv[0] for part in tmux_commands(command)[:1])])
    return name


def hand_over(command: Command) -> tuple[Handed, ...]:
    """What this command runs in turn; nothing if it is no wrapper."""
    if not command.words:
        return ()
    name = name_of(command)
    if name in WRAPPERS:
        return tuple(_wrapped(command, name, WRAPPERS[name]))
    special = SPECIAL.get(name.partition(" ")[0])
    if special is None and basename(command.argv[0]) == command.argv[0]:
        return ()
    if special is None:
        return (Handed("script", command.words),)
    return tuple(special(command))


def _wrapped(command: Command, name: str, wrapper: Wrapper) -> Iterator[Handed]:
    options, rest = split_options(command.words[len(name.split()) :], wrapper.takes_value)
    own, rest = rest[: wrapper.operands], rest[wrapper.operands :]
    more, rest = split_options(rest, wrapper.takes_value) if wrapper.operands else ({}, rest)
    assigned = []
    while name in {"env", "sudo"} and rest and ASSIGNS.match(rest[0].value):
        equals = rest[0].value.index("=")
        assigned.append((rest[0].value[:equals], _tail(rest[0], equals + 1)))
        rest = rest[1:]
    if not rest:
        return
    where = own[0].value if own else _attached_to(options) if name == "lxc-attach" else ""
    yield Handed(
        "words",
        rest,
        assignments=(*assigned, *_environment(command)),
        hop=f"{name} {where}".strip() if wrapper.hop else "",
        remote=wrapper.remote,
        tty=bool(wrapper.ttys & (options.keys() | more.keys())) if wrapper.ttys else None,
        detached=bool(wrapper.detaches & options.keys()),
        options=options | more,
    )


def _attached_to(options: dict[str, Word | None]) -> str:
    """`lxc-attach -n NAME` names its container in an option."""
    word = options.get("-n") or options.get("--name")
    return word.value if word else ""


def _environment(command: Command) -> Iterator[tuple[str, Word]]:
    """`-e NAME=value` and `--env NAME=value` of containers."""
    for option, word in zip(command.words, command.words[1:], strict=False):
        if option.value in {"-e", "--env"} and ASSIGNS.match(word.value):
            yield word.value.partition("=")[0], _tail(word, word.value.index("=") + 1)


SSH_VALUED = names("-b -c -D -E -e -F -I -i -J -L -l -m -O -o -p -Q -R -S -W -w")


def _ssh(command: Command) -> Iterator[Handed]:
    options, rest = split_options(command.words[1:], SSH_VALUED.__contains__)
    if not rest:
        return
    host, (more, words) = rest[0], split_options(rest[1:], SSH_VALUED.__contains__)
    tty = "-t" in options | more
    there = Handed("text", words, hop=f"ssh {host.value}", remote=True, tty=tty, options=options)
    text = join(word.text for word in words) if words else None
    if text is None or _reads_stdin(text.value.split()):
        yield from _stdin(command, there)
    elif text is not None:
        yield replace(there, text=text)


def _reads_stdin(argv: list[str]) -> bool:
    """`bash` and `bash -s`, alone."""
    options = [word for word in argv[1:] if word.startswith("-") and "c" not in word]
    return bool(argv) and basename(argv[0]) in SHELLS and len(options) == len(argv) - 1


def _stdin(command: Command, handed: Handed) -> Iterator[Handed]:
    """A here-document or a file, which a shell without a command reads."""
    for redirect in command.redirects:
        if redirect.body is not None:
            yield replace(handed, how="text", words=(), text=redirect.body)
        elif redirect.operator == "<" and redirect.fd == 0 and redirect.target:
            yield replace(handed, how="script", words=(redirect.target,), stdin=True)


def _shell(command: Command) -> Iterator[Handed]:
    options, rest = split_options(command.words[1:], {"-o", "-O", "+o"}.__contains__)
    if "-c" in options:
        if rest:
            yield Handed("text", rest, rest[0].text, options=options)
    elif rest and "-s" not in options:
        yield Handed("script", rest, options=options)
    else:
        yield from _stdin(command, Handed("text", options=options))


def tmux_commands(command: Command) -> list[Command]:
    """`tmux -L name new … \\; set …` as one command for each verb, without tmux's own options."""
    _, rest = split_options(command.words[1:], names("-L -S -f -c -T").__contains__)
    parts: list[list[Word]] = [[]]
    for word in rest:
        if word.value == ";":
            parts.append([])
        else:
            parts[-1].append(word)
    return [Command(tuple(part), (), (), command.span) for part in parts if part]


def _tmux(command: Command) -> Iterator[Handed]:
    for part in tmux_commands(command):
        verb = part.argv[0]
        if verb in TMUX_STARTS:
            yield from _tmux_start(part, names(TMUX_STARTS[verb]))
        elif verb in {"send-keys", "send"}:
            _, words = split_options(part.words[1:], {"-t", "-N"}.__contains__)
            typed = [w.text for w in words if w.value not in {"Enter", "C-m", "KPEnter"}]
            if typed:
                yield Handed("keys", words, join(typed), tty=True, detached=True)


def _tmux_start(part: Command, valued: frozenset[str]) -> Iterator[Handed]:
    """One word is shell text; several are run as they are."""
    options, words = split_options(part.words[1:], valued.__contains__)
    if len(words) == 1:
        yield Handed("text", words, words[0].text, tty=True, detached=True, options=options)
    elif words:
        yield Handed("words", words, tty=True, detached=True, options=options)


def _screen(command: Command) -> Iterator[Handed]:
    options, words = split_options(command.words[1:], names("-c -e -h -p -s -S -t -T").__contains__)
    if words and "-d" in options | {"-m": None} and "-X" not in options:
        yield Handed("words", words, tty=True, detached=True, options=options)


def _script(command: Command) -> Iterator[Handed]:
    valued = names("-c -E -I -O -B -T -m -o --command --log-out --log-io")
    options, _ = split_options(command.words[1:], valued.__contains__)
    word = options.get("-c") or options.get("--command")
    if word is not None:
        yield Handed("text", (word,), word.text, tty=True, options=options)


def _su(command: Command) -> Iterator[Handed]:
    for option, word in zip(command.words, command.words[1:], strict=False):
        if option.value in {"-c", "--command"}:
            yield Handed("text", (word,), word.text)


def _sg(command: Command) -> Iterator[Handed]:
    """`sg GROUP -c 'text'`; the `-c` may be left out."""
    words = [word for word in command.words[1:] if word.value not in {"-", "-c"}]
    if len(words) > 1:
        yield Handed("text", (words[1],), words[1].text)


def _flock(command: Command) -> Iterator[Handed]:
    """`flock FILE program` or `flock FILE -c 'text'`."""
    valued = names("-w -E --wait --timeout --conflict-exit-code")
    _, rest = split_options(command.words[1:], valued.__contains__)
    if [word.value for word in rest[1:2]] in (["-c"], ["--command"]):
        yield from (Handed("text", (word,), word.text) for word in rest[2:3])
    elif rest[1:]:
        yield Handed("words", rest[1:])


def _sbatch(command: Command) -> Iterator[Handed]:
    options, rest = split_options(command.words[1:], lambda name: name not in SLURM_FLAGS)
    job = Handed("script", rest, hop="sbatch", remote=True, tty=False, detached=True)
    wrapped = options.get("--wrap")
    if wrapped is not None:
        yield replace(job, how="text", words=(wrapped,), text=wrapped.text, options=options)
    elif rest:
        yield replace(job, options=options)


def _source(command: Command) -> Iterator[Handed]:
    if len(command.words) > 1:
        yield Handed("script", command.words[1:])


def _eval(command: Command) -> Iterator[Handed]:
    if len(command.words) > 1:
        yield Handed("text", command.words[1:], join(w.text for w in command.words[1:]))


SPECIAL: dict[str, Callable[[Command], Iterator[Handed]]] = {
    "ssh": _ssh,
    "tmux": _tmux,
    "screen": _screen,
    "script": _script,
    "su": _su,
    "runuser": _su,
    "sg": _sg,
    "flock": _flock,
    "sbatch": _sbatch,
    "source": _source,
    ".": _source,
    "eval": _eval,
    **dict.fromkeys(SHELLS, _shell),
}

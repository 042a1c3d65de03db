"""Which launches may be run with a canary: those of which every command is known to do no harm."""

import re
from collections.abc import Iterator

from diagnostics.launch.layers import Chain, Launch, Layer
from diagnostics.launch.parse import parse
from diagnostics.launch.shell import Command, Source, Span, Text, Word
from diagnostics.launch.streams import logs
from diagnostics.launch.wrappers import SHELLS, basename, tmux_commands

# They run another program, in this file system and as this user, and do nothing else.
WRAPPERS = {
    *SHELLS,
    *("nohup", "setsid", "stdbuf", "timeout", "nice", "ionice", "taskset", "numactl", "env"),
    *("exec", "command", "time", "script", "source", ".", "torchrun"),
}
# They change the shell that runs them, or only show something.
QUIET = {
    *("cd", "echo", "printf", "export", "set", "unset", "true", "false", ":", "ulimit", "umask"),
    *("wait", "disown", "exit", "return", "shift", "test", "[", "[[", "pwd", "date", "hostname"),
    *("shopt", "local", "declare", "readonly", "hash", "read", "sleep", "id", "whoami", "uname"),
    *("dirname", "basename", "realpath", "readlink", "nproc", "tee", "cat", "grep", "ts", "type"),
}
# Unless they are asked so.
LOUD = re.compile(r"date\b.* (-\w*s|--set)|hostname [^-]|hostname -(F|b)")
# Nothing is lost if these are left out, and they would leave something behind.
STAND_INS = {"mkdir", "touch", "nvidia-smi", "clear"}
TMUX = {
    *("new-session", "new", "start-server", "start", "send-keys", "send", "has-session", "has"),
    *("kill-session", "list-sessions", "ls", "rename-window"),
}
TMUX_SETS = {"set-option", "set", "set-window-option", "setw"}
SETTABLE = {
    *("remain-on-exit", "destroy-unattached", "exit-unattached", "exit-empty", "history-limit"),
    *("mouse", "status", "default-terminal", "base-index", "escape-time"),
}
INTERACTIVE = {"-i", "-l", "--login", "--norc", "--noprofile"}
ACTIVATES = re.compile(r"(conda|mamba|micromamba) activate|module (load|purge)")
# Wrappers that write a file of their own when asked to.
OWN_FILES = {
    "script": {"-O", "-I", "-B", "-T", "-t", "--log-out", "--log-in", "--log-io", "--log-timing"},
    "time": {"-o", "--output"},
}
# All that env may be asked: --split-string runs what it holds.
ENV = {"-i", "--ignore-environment", "-u", "--unset", "-C", "--chdir", "-v", "--debug"}
# A shell runs what they hold.
RUN_BY_SHELLS = {"PROMPT_COMMAND", "BASH_ENV", "ENV", "PS0", "PS1", "PS2", "PS4"}
SUBSTITUTES = re.compile(r"\$\((?!\()|`|[<>]\(")


def objections(launch: Launch) -> Iterator[str]:
    """What speaks against running it, by name; nothing if it may be run."""
    if launch.trainer is None:
        yield "no program that trains was found in it"
    elif len(launch.trainers) > 1:
        yield f"it starts {len(launch.trainers)} trainers: which one is to be replaced?"
    for shell in launch.shells:
        if shell.script.broken is not None:
            yield _at(shell.script.broken, "this does not parse")
        for name, body in shell.script.functions.items():
            yield _at(body.span(), f"{name}: a function, and a name may stand for another command")
    for source in dict.fromkeys(shell.script.text.source for shell in launch.shells):
        yield from _unseen(source, launch)
    for chain in launch.chains:
        yield from _of_chain(chain, is_trainer=chain is launch.trainer)


def _unseen(source: Source, launch: Launch) -> Iterator[str]:
    """Substitutions that stand in no word of a command: `for x in $(...)`."""
    seen = [comment.span() for shell in launch.shells for comment in shell.script.comments]
    for command in (layer.command for chain in launch.chains for layer in chain.layers):
        seen += [expansion.span for word in _words(command) for expansion in word.expansions]
        seen += [redirect.span for redirect in command.redirects if redirect.into]
    for found in SUBSTITUTES.finditer(source.text):
        here = Span(source, found.start(), found.end())
        if not any(span.covers(here) for span in seen):
            yield _at(here, f"{source.text[found.start() :].splitlines()[0]}: not understood")
    if "/dev/tcp/" in source.text or "/dev/udp/" in source.text:
        yield f"{source.name}: it opens a network connection"


def _of_chain(chain: Chain, is_trainer: bool) -> Iterator[str]:
    for layer in chain.layers:
        if layer.handed is not None and layer.handed.hop:
            yield _at(layer.command.span, f"{layer.handed.hop}: it runs somewhere else")
            return
        yield from _of_words(layer.command)
        if layer.name.startswith("tmux"):
            yield from _of_tmux(layer.command)
    for layer in chain.layers[:-1]:
        yield from _of_wrapper(layer)
    if any(log.word is None for log in logs(chain)):
        yield _at(chain.program.command.span, "nohup would write nohup.out here: name a log")
    if chain.unread is not None:
        yield _at(chain.unread.span, f"{chain.unread.value}: this script cannot be read")
    elif not is_trainer:
        yield from _of_program(chain.program.command, chain.program.own)


def _of_wrapper(layer: Layer) -> Iterator[str]:
    # `$COMMAND` hands over what the variable holds.
    if layer.name not in WRAPPERS and not layer.name.startswith(("tmux", "$")):
        yield _at(layer.command.span, f"{layer.name}: not known to do nothing else")
    options = layer.handed.options.keys() if layer.handed else set()
    if options & OWN_FILES.get(layer.name, set()):
        yield _at(layer.command.span, f"{layer.name} would write a file of its own")
    if layer.name == "env" and options - ENV:
        asked = ", ".join(sorted(options - ENV))
        yield _at(layer.command.span, f"env {asked}: not known to do nothing else")


def _of_program(command: Command, own: bool = True) -> Iterator[str]:
    """Of a command that is not the trainer. `own`: it stands by itself, and can be left out."""
    if not command.words:
        return
    name, typed = command.argv[0], " ".join(command.argv)
    shell = basename(name) in SHELLS and not set(command.argv[1:]) - INTERACTIVE
    ignores = name == "trap" and command.argv[1:2] in (["-"], [""])
    left_out = name in STAND_INS and own
    quiet = name in QUIET | {"exec"} and not LOUD.match(typed)
    if not (shell or ignores or left_out or quiet or ACTIVATES.match(typed) or _is_tmux(name)):
        yield _at(command.span, f"{name}: a launch may not do this with a canary in it")


def _is_tmux(name: str) -> bool:
    return basename(name) == "tmux"


def _of_tmux(command: Command) -> Iterator[str]:
    for verb, *words in (part.argv for part in tmux_commands(command)):
        option = next((word for word in words if not word.startswith("-")), "")
        if verb not in TMUX and not (verb in TMUX_SETS and option in SETTABLE):
            yield _at(command.span, f"tmux {verb} {option}".rstrip() + ": not known to be private")
    if re.search(r"\s-[SfT]", " ".join(command.argv[:4])):
        yield _at(command.span, "tmux -S and -f name a server or a configuration of their own")
    if any("#(" in word for word in command.argv):
        yield _at(command.span, "tmux runs what stands in #(...)")


def _words(command: Command) -> list[Word]:
    """All words, those of assignments and redirects too."""
    words = [*command.words, *(word for _, word in command.assignments)]
    return words + [r.target for r in command.redirects if r.target is not None and not r.into]


def _of_words(command: Command) -> Iterator[str]:
    """Of commands that stand in the words of another: $(...)."""
    for word in _words(command):
        for expansion in word.expansions:
            if SUBSTITUTES.search(expansion.span.text) and not _only_asks(expansion.span.text):
                yield _at(word.span, f"{expansion.span.text}: not known to do no harm")
    for redirect in command.redirects:
        for inner in redirect.into:
            yield from _of_program(inner)
    for name, word in command.assignments:
        if name in RUN_BY_SHELLS:
            yield _at(word.span, f"{name}: a shell runs what it holds")


def _only_asks(typed: str) -> bool:
    """Whether a substitution runs only commands that show something."""
    if not (typed.startswith("$(") and typed.endswith(")")):
        return False
    script = parse(Text.of(Source("substitution", typed[2:-1])))
    commands = [command for pipeline in script.pipelines for command in pipeline.commands]
    return script.broken is None and all(map(_is_question, commands))


def _is_question(command: Command) -> bool:
    inner = [e.span.text for word in _words(command) for e in word.expansions]
    asks = all(_only_asks(text) for text in inner if SUBSTITUTES.search(text))
    named = not list(_of_program(command, own=False))
    return asks and named and not any(redirect.writes for redirect in command.redirects)


def _at(span: Span, why: str) -> str:
    place = span.source.path.name if span.source.path else span.source.name
    return f"{place}, line {span.line}: {why}"

"""Follow a launch from the shell the user types in to the program that trains.

    launch = read(Source("command line", text))
    for chain in launch.chains: ...

A chain is one way through the launch: each layer is a command as its shell sees it, the first one
typed by the user, the last one the program (or what could not be read: `chain.unread`).
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path

from diagnostics.launch.known_wrappers import WRAPPERS, names
from diagnostics.launch.parse import parse, parse_source
from diagnostics.launch.shell import Command, Pipeline, Script, Source, Span, Text, Word
from diagnostics.launch.whereabouts import other_root, script_source, spelled_out, written
from diagnostics.launch.wrappers import SHELLS, Handed, basename, hand_over, name_of

DEEPEST = 16
RUNNERS = {"screen", "script", "su", "runuser", "sg", "flock"}
LAUNCHERS = {"torchrun", "accelerate", "deepspeed", "horovodrun", "mpirun", "mpiexec"}


@dataclass(frozen=True)
class Place:
    """Where a command runs: the hops from the user's machine (`ssh host`, `pct exec 200`).

    `root` is the directory under which its files can be read from here, None if they cannot.
    """

    hops: tuple[str, ...] = ()
    remote: bool = False
    root: Path | None = Path("/")

    @property
    def here(self) -> bool:
        """Whether it is the user's own machine and root."""
        return not self.hops

    @property
    def other_roots(self) -> tuple[str, ...]:
        """The hops without batch systems, whose nodes share directories."""
        return tuple(hop for hop in self.hops if not hop.startswith(("srun", "sbatch")))

    def inside(self, handed: Handed) -> "Place":
        """The place that a wrapper leads to."""
        if not handed.hop:
            return self
        remote = self.remote or handed.remote
        root = None if remote or not self.here else other_root(handed.hop)
        return Place((*self.hops, handed.hop), remote, root)

    def __str__(self) -> str:
        return " > ".join(self.hops) or "this machine"


@dataclass(frozen=True, eq=False)
class Shell:
    """A shell text and the shell that reads it.

    `kind` is `command line`, `file`, `source`, `function`, or the wrapper that opened it;
    `opened_by` are the layers from the user to that wrapper. `keys` were typed into an interactive
    shell by tmux send-keys. `sourced` are the scripts that it reads with `source`, and the
    functions that it calls.
    """

    script: Script
    kind: str
    place: Place = field(default_factory=Place)
    tty: bool = True
    opened_by: tuple["Layer", ...] = ()
    keys: bool = False
    sourced: list["Shell"] = field(default_factory=list)

    @property
    def caller(self) -> "Layer | None":
        """The command of the same process that this text is run by, if it is one."""
        return self.opened_by[-1] if self.kind in {"source", "function"} else None

    @property
    def process(self) -> "Shell":
        """The shell that runs it: of a function and of what is sourced, the caller's."""
        return self.caller.shell.process if self.caller else self

    def earlier(self, pipeline: Pipeline | None = None) -> Iterator[tuple[Pipeline, "Layer"]]:
        """The commands in front of a pipeline, or all, with those that are sourced or called.

        Each with the pipeline of this shell in which it is run, as a layer of the shell that it
        stands in.
        """
        opened = {id(shell.opened_by[-1].command): shell for shell in self.sourced}
        for each in self.script.before(pipeline) if pipeline else self.script.pipelines:
            for command in each.commands:
                name = name_of(command)
                yield each, Layer(name, command, each, self, self.place, self.tty, own=True)
                if id(command) in opened:
                    yield from ((each, inner) for _, inner in opened[id(command)].earlier())

    def commands(self, pipeline: Pipeline | None = None) -> Iterator[Command]:
        """As `earlier`, the commands alone."""
        return (step.command for _, step in self.earlier(pipeline))

    def front(self, pipeline: Pipeline) -> Iterator[Command]:
        """The commands that the process has run in front of a pipeline."""
        if self.caller:
            yield from self.caller.shell.front(self.caller.pipeline)
        yield from self.commands(pipeline)

    def settings(self, pipeline: Pipeline) -> Iterator[Command]:
        """As `front`, without what subshells have set for themselves."""
        if self.caller:
            yield from self.caller.shell.settings(self.caller.pipeline)
        for earlier, step in self.earlier(pipeline):
            if self.script.outlasts(earlier, pipeline):
                yield step.command

    def rest(self, pipeline: Pipeline) -> Iterator[Pipeline]:
        """The pipelines that the process runs behind one."""
        yield from self.script.after(pipeline)
        if self.caller:
            yield from self.caller.shell.rest(self.caller.pipeline)

    def functions(self) -> dict[str, Text]:
        """The functions that it can call, those that a shell around exports included."""
        known = self.opened_by[-1].shell.functions() if self.opened_by else {}
        if not self.caller:
            known = {name: known[name] for name in known if self._is_given(name)}
        return known | self._defined()

    def _defined(self) -> dict[str, Text]:
        inner = (shell._defined().items() for shell in self.sourced)
        return self.script.functions | dict(chain.from_iterable(inner))

    def _is_given(self, name: str) -> bool:
        """Whether the shell around exports a function."""
        outer = self.opened_by[-1]
        exports = (c.argv for c in outer.shell.front(outer.pipeline) if c.argv[:1] == ["export"])
        return self.kind == "bash" and any("-f" in argv and name in argv for argv in exports)

    def values(self, pipeline: Pipeline | None = None) -> dict[str, Word]:
        """Variables set in front of a pipeline, here and in the shells around, by their last value.

        `NAME=value command` counts inside that command only.
        """
        known: dict[str, Word] = {}
        for layer in self.opened_by:
            known |= layer.shell.assigned(layer.pipeline) if layer.own else {}
            known |= dict(layer.command.assignments)
        if self.kind == "function":
            given = self.opened_by[-1].command.words[1:]
            known |= {str(i): word for i, word in enumerate(given, 1)}
        return known | self.assigned(pipeline)

    def assigned(self, pipeline: Pipeline | None) -> dict[str, Word]:
        """Those that this shell itself has set."""
        known: dict[str, Word] = {}
        for command in self.commands(pipeline):
            if not command.words or command.argv[0] in {"export", "declare", "readonly", "local"}:
                known |= dict(command.assignments)
        return known


@dataclass(frozen=True, eq=False)
class Layer:
    """One command of a chain: `name` is the wrapper's (`tmux new-session`) or the program's.

    `own` says that it stands in the shell text itself, with redirects and a pipeline; the others
    are the words behind a wrapper.
    """

    name: str
    command: Command
    pipeline: Pipeline
    shell: Shell
    place: Place
    tty: bool
    own: bool
    handed: Handed | None = None

    def values(self) -> dict[str, Word]:
        """The variables that the shell knows when it runs this command."""
        return self.shell.values(self.pipeline)


@dataclass(frozen=True, eq=False)
class Chain:
    """From what the user typed to one program."""

    layers: tuple[Layer, ...]

    @property
    def program(self) -> Layer:
        """The innermost command."""
        return self.layers[-1]

    @property
    def unread(self) -> Word | None:
        """The script that could not be read, if the chain ends at one."""
        handed = self.program.handed
        return handed.words[0] if handed and handed.how == "script" else None

    @property
    def bare(self) -> bool:
        """Whether it ends at a wrapper that is given nothing to run."""
        name = self.program.name
        known = name in WRAPPERS or name in SHELLS | RUNNERS
        return not name or (known and self.unread is None)

    @property
    def understood(self) -> bool:
        """Whether it ends at a launcher or Python: what others start, they alone know."""
        return is_training(self.program.command.argv)

    def names(self) -> list[str]:
        """The layers' names, outermost first."""
        return [layer.name for layer in self.layers]


@dataclass(frozen=True)
class Launch:
    """All that was read, in the order in which it is written."""

    source: Source
    shells: tuple[Shell, ...]
    chains: tuple[Chain, ...]

    @cached_property
    def trainer(self) -> Chain | None:
        """The chain that trains: the last with a launcher or Python, else the last unread script.

        None where all programs are the shell's own furniture (cd, mkdir, echo).
        """
        ranked = [(rank, i) for i, c in enumerate(self.chains) if (rank := _rank(c))]
        return self.chains[max(ranked)[1]] if ranked else None

    @cached_property
    def trainers(self) -> tuple[Chain, ...]:
        """All chains with a launcher or Python; if there are none, the trainer alone."""
        certain = tuple(chain for chain in self.chains if _rank(chain) == CERTAIN)
        return certain or ((self.trainer,) if self.trainer else ())

    @cached_property
    def training_layers(self) -> tuple[Layer, ...]:
        """The layers of all these chains, each once."""
        found = {id(layer): layer for chain in self.trainers for layer in chain.layers}
        return tuple(found.values())


FURNITURE = names(
    "cd mkdir echo export set unset source . test [ true false wait sleep cat rm cp mv ls date trap"
    " ulimit umask alias declare local readonly shift exit return pwd touch chmod chown kill pkill"
    " tmux screen module conda mamba pip printf read eval tail head grep sed awk tee disown"
    " hostname nvidia-smi which command sync sbatch ssh docker podman git wget curl tar ln"
    " apt-get uv install"
)
CERTAIN = 3


def _rank(chain: Chain) -> int:
    """3: a launcher, or Python with a program; 2: a script unread; 1: another program; 0: none."""
    argv = chain.program.command.argv
    if is_training(argv):
        return CERTAIN
    if chain.unread is not None:
        return 2 if chain.program.name not in {"source", "."} else 0
    return 0 if not argv or basename(argv[0]) in FURNITURE else 1


def is_python(word: str) -> bool:
    """Whether a command's first word is a Python interpreter."""
    return re.fullmatch(r"(python|pypy)[\d.]*", basename(word)) is not None


def is_training(argv: list[str]) -> bool:
    """A launcher, a Python program (no one-liner, no pip, no version), or dflash."""
    if not argv:
        return False
    if is_python(argv[0]):
        rest = " ".join(argv[1:3])
        return len(argv) > 1 and not re.match(r"-c\b|-m (pip|venv)|-V|--version", rest)
    name = basename(argv[0])
    unknown = argv[0].startswith("$") and any(word.endswith(".py") for word in argv[1:])
    return unknown or name in LAUNCHERS | {"dflash"} or name.endswith(".py")


def read(source: Source, instead: Mapping[Path, str] | None = None) -> Launch:
    """Read what was typed and everything it leads to.

    Args:
        instead: what scripts are taken to say, where that is not what they say on the disk.
    """
    reader = _Reader(instead or {})
    shell = Shell(parse_source(source), "file" if source.path else "command line")
    chains = tuple(reader.shell(shell))
    return Launch(source, tuple(reader.shells), chains)


@dataclass
class _Reader:
    """Collects the shells while it follows the commands."""

    instead: Mapping[Path, str]
    shells: list[Shell] = field(default_factory=list)

    def shell(self, shell: Shell) -> Iterator[Chain]:
        self.shells.append(shell)
        for pipeline in shell.script.pipelines:
            for command in pipeline.commands:
                name, place, tty = name_of(command), shell.place, shell.tty
                yield from self._follow(Layer(name, command, pipeline, shell, place, tty, own=True))

    def _follow(self, layer: Layer, outer: tuple[Layer, ...] = ()) -> Iterator[Chain]:
        above = outer or layer.shell.opened_by
        handed = _handed(layer, above) if len(above) < DEEPEST else ()
        followed = False
        for each in handed:
            layers = (*above, replace(layer, handed=each))
            inner = self._inner(layers, each)
            if inner is not None:
                followed = True
                yield from inner
        if not followed:
            last = next((h for h in handed if h.how == "script" and self._is_script(layer)), None)
            yield Chain((*above, replace(layer, handed=last)))

    def _is_script(self, layer: Layer) -> bool:
        """Not for `/opt/bin/python`, which only looks like a script because it has a path."""
        word = layer.command.argv[0]
        return basename(word) in SHELLS | {"source", ".", "sbatch"} or word.endswith("sh")

    def _inner(self, layers: tuple[Layer, ...], handed: Handed) -> Iterator[Chain] | None:
        """What a wrapper runs; None for a script that cannot be read."""
        layer = layers[-1]
        place = layer.place.inside(handed)
        tty = layer.tty if handed.tty is None else handed.tty
        if handed.how == "words":
            return self._follow(_behind(layer, handed, place, tty), layers)
        if handed.text is not None:
            called = handed.how == "function"
            kind, keys = ("function" if called else layer.name), handed.how == "keys"
            shell = Shell(parse(handed.text), kind, place, tty, layers, keys)
            if called:
                layer.shell.sourced.append(shell)
            return self.shell(shell)
        reads_here = layer.shell.place if handed.stdin else place
        if layer.name == "sbatch":  # it sends the script's text
            reads_here = layer.place
        text = _typed_script(layers, handed) if self._is_script(layer) else None
        if text is not None:
            return self.shell(Shell(parse(text), "file", place, tty, layers))
        source = script_source(handed.words[0], layer, reads_here, asked=handed.stdin)
        if source is None or source.path is None or source.path in _paths(layers):
            return None
        source = replace(source, text=self.instead.get(source.path, source.text))
        kind = "source" if layer.name in {"source", "."} else "file"
        shell = Shell(parse_source(source), kind, place, tty, layers)
        if kind == "source":
            layer.shell.sourced.append(shell)
        return self.shell(shell)


def _behind(layer: Layer, handed: Handed, place: Place, tty: bool) -> Layer:
    """The command behind a wrapper, which reads the wrapper's standard input."""
    first, last = handed.words[0].span, handed.words[-1].span
    span = Span(first.source, first.start, last.end)
    if not layer.command.span.covers(span):  # words out of a variable
        span = layer.command.span
    fed = tuple(redirect for redirect in layer.command.redirects if redirect.fd == 0)
    command = Command(handed.words, handed.assignments, fed, span)
    name = name_of(command)
    return Layer(name, command, layer.pipeline, layer.shell, place, tty, own=False)


def _handed(layer: Layer, above: tuple[Layer, ...]) -> tuple[Handed, ...]:
    """What a command runs in turn, as a function, through a variable or as a wrapper."""
    return _called(layer, above) or _variable(layer) or hand_over(layer.command)


def _called(layer: Layer, above: tuple[Layer, ...]) -> tuple[Handed, ...]:
    """The function of this name; not again from within itself, nor behind another program."""
    by_shell = layer.own or above[-1].name == "time"
    words = layer.command.words
    body = layer.shell.functions().get(words[0].value) if words and by_shell else None
    if body is None or any(each.handed and each.handed.text is body for each in above):
        return ()
    return (Handed("function", words, body),)


def _typed_script(layers: tuple[Layer, ...], handed: Handed) -> Text | None:
    """What the launch itself has just written into a script: `cat > run.sh <<EOF`."""
    found = None
    for command, redirect in written(handed.words[0], layers[-1]):
        bodies = [each.body for each in command.redirects if each.body is not None]
        found = bodies[-1] if bodies and command.argv == ["cat"] and not redirect.appends else None
    return None if any(layer.shell.script.text is found for layer in layers) else found


def _variable(layer: Layer) -> tuple[Handed, ...]:
    """`$LAUNCHER train.py` and `eval $COMMAND`, if the launch says what the variable holds.

    `"$@"` in a function is what it was called with.
    """
    if layer.shell.kind == "function" and layer.command.argv[:1] == ["$@"]:
        given = layer.shell.opened_by[-1].command.words[1:]
        return (Handed("words", (*given, *layer.command.words[1:])),) if given else ()
    evaluates = layer.name == "eval" and len(layer.command.words) == 2
    words = layer.command.words[1:] if evaluates else layer.command.words
    text = spelled_out(words[0], layer.values()) if words else None
    if text is None:
        return ()
    if evaluates:
        return (Handed("text", words, text),)
    pipelines = parse(text).pipelines
    if len(pipelines) != 1 or not pipelines[0].commands[0].words:
        return ()
    first = pipelines[0].commands[0]
    return (Handed("words", (*first.words, *words[1:]), assignments=first.assignments),)


def _paths(layers: Iterable[Layer]) -> set[Path | None]:
    return {layer.shell.script.text.source.path for layer in layers}

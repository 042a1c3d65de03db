"""What a word stands for, and where the file that it names lies, as far as the launch says."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from diagnostics.launch.shell import Command, Expansion, Pipeline, Redirect, Source, Text, Word
from diagnostics.launch.wrappers import SHELLS

if TYPE_CHECKING:
    from diagnostics.launch.layers import Layer, Place

CDS = {"cd", "pushd", "popd"}
CD_OPTIONS = {"--", "-L", "-P"}
MAKERS = {"git", "cp", "rsync", "scp", "wget", "curl", "tar", "unzip", "ln", "uv"}
DEEPEST = 16  # of variables that hold variables
VALUE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
DEFAULT = re.compile(r"""\$\{(\w+):?-["']?(.*?)["']?\}""", re.DOTALL)
_SCRIPT = r"(?:0|BASH_SOURCE(?:\[0\])?)"
_DIRNAME = rf'\$\(dirname (?:-- )?"?\$\{{?{_SCRIPT}\}}?"?\)'
# $(dirname "$0"), ${0%/*}, $(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
OWN_DIRECTORY = re.compile(
    rf'{_DIRNAME}|\$\{{{_SCRIPT}%/\*\}}|\$\(cd (?:-- )?"?{_DIRNAME}"?[^;&]*(?:;|&&) *pwd[ LP-]*\)'
)
# $(dirname "$LOG"), ${LOG%/*}
PARENT = re.compile(r'\$\(dirname (?:-- )?"?(\$\w+|\$\{\w+\})"?\)|\$\{(\w+)%/\*\}')
SHEBANG = re.compile(rb"#!.*\b(?:ba|da|z|k)?sh\b")


def spelled_out(word: Word, known: Mapping[str, Word]) -> Text | None:
    """What a word that is one variable holds, as it is written in the launch.

    A default (`${PYTHON:-python}`) counts. None if the launch does not say.
    """
    if len(word.expansions) != 1 or word.expansions[0].span.text != word.value:
        return None
    name = VALUE.fullmatch(word.value)
    if name is not None:
        held = known.get(name[1] or name[2])
        inner = spelled_out(held, {}) if held else None
        return inner or (held.text if held and held.value else None)
    default = DEFAULT.fullmatch(word.value)
    return word.text.cut(*default.span(2)) if default and default[2] else None


def value_of(word: Word, known: dict[str, Word], depth: int = 0) -> str | None:
    """The word with variables put in whose value is written in the launch; None if one is not."""
    value = word.value
    for expansion in word.expansions:
        inside = _held(expansion, known, depth)
        if inside is None:
            return None
        value = value.replace(expansion.span.text, inside)
    return value


def _held(expansion: Expansion, known: dict[str, Word], depth: int) -> str | None:
    typed, source = expansion.span.text, expansion.span.source
    if OWN_DIRECTORY.fullmatch(typed):
        return source.directory or None
    parent = parent_of(typed)
    name = VALUE.fullmatch(parent or typed)
    found = known.get(name[1] or name[2]) if name and depth <= DEEPEST else None
    value = value_of(found, known, depth + 1) if found else None
    if not (parent and value):
        return value
    return os.path.dirname(value) or (value if "%" in typed else ".")


def parent_of(typed: str) -> str:
    """The variable whose directory is asked for, as `$NAME`; empty if that is not what it says."""
    found = PARENT.fullmatch(typed)
    name = re.sub(r"\W", "", found[1] or found[2]) if found else ""
    return f"${name}" if name else ""


def path_in(word: Word, layer: "Layer", place: "Place | None" = None) -> Path | None:
    """Where the word's path lies, seen from here; None if that cannot be known.

    Relative paths are followed through a `cd` in front. `~` and $HOME are known here only.
    """
    place = place or layer.place
    return _resolved(word, layer.values(), place, working_directory(layer, place))


def _resolved(
    word: Word, known: dict[str, Word], place: "Place", directory: Path | None
) -> Path | None:
    """The path that a word names to a shell that stands in this directory (None: unknown).

    None also where we may not look whether it is there.
    """
    value = value_of(word, known)
    if value is None and place.here:
        value = _with_home(word, known)
    if value is None or place.root is None or not value:
        return None
    if value.startswith("~"):
        known_home = place.here and not (home := os.path.expanduser(value)).startswith("~")
        return _seen(Path(home)) if known_home else None
    if not value.startswith("/"):
        return _seen(directory / value) if directory else None
    return _seen(place.root / value.lstrip("/"))


def _seen(path: Path) -> Path | None:
    try:
        path.stat()
    except PermissionError:
        return None
    except (OSError, ValueError):  # it is not there
        return path
    return path


def _with_home(word: Word, known: dict[str, Word]) -> str | None:
    names = {"$HOME", "${HOME}"}
    home = [e for e in word.expansions if e.span.text in names]
    if not home or len(home) != len(word.expansions):
        return None
    return re.sub(r"\$HOME|\$\{HOME\}", lambda _: str(Path.home()), word.value)


@dataclass(frozen=True)
class Entered:
    """A directory that a `cd` or `tmux -c` leads to.

    `word` names it (None: `cd -`), in the shell of `layer`, in its pipeline `at`. `path` is it as
    seen from here (None: that cannot be known), `said` as the launch says it.
    """

    word: Word | None
    layer: "Layer"
    at: Pipeline
    path: Path | None = None
    said: str = ""


def entered(layer: "Layer", place: "Place", at: Pipeline | None = None) -> Iterator[Entered]:
    """The directories that the launch goes through in this place, up to the layer's command.

    Args:
        at: up to this pipeline of the layer's shell instead.
    """
    path: Path | None = Path.cwd() if place.here else None
    said = ""
    for way in _ways(layer, place, at or layer.pipeline):
        known = way.layer.values()
        path = _resolved(way.word, known, place, path) if way.word else None
        said = _below(said, value_of(way.word, known) or way.word.value) if way.word else "$OLDPWD"
        yield replace(way, path=path, said=said)


def _ways(layer: "Layer", place: "Place", at: Pipeline) -> Iterator[Entered]:
    for each in (*layer.shell.opened_by, layer):
        if each.place.hops != place.hops:
            continue
        stop = at if each is layer else each.pipeline
        if each.own or each is layer:
            yield from (Entered(_directory_of(cd), each, p) for p, cd in _cds(each, stop))
        options = each.handed.options if each.handed and each.name.startswith("tmux") else {}
        if "-c" in options and stop is each.pipeline:
            yield Entered(options["-c"], each, stop)


def _cds(layer: "Layer", at: Pipeline) -> Iterator[tuple[Pipeline, Command]]:
    for pipeline in layer.shell.script.before(at):
        command = pipeline.commands[0]
        around = at.block[: len(pipeline.block)] == pipeline.block  # not in another subshell
        if command.argv[:1] and command.argv[0] in CDS and around:
            yield pipeline, command


def _directory_of(cd: Command) -> Word | None:
    words = [word for word in cd.words[1:] if word.value not in CD_OPTIONS]
    if not words and cd.argv[0] == "cd":
        span = cd.words[0].span
        return Word(Text("~", (span.start,), span.source), span)
    return words[0] if len(words) == 1 and words[0].value != "-" else None


def working_directory(layer: "Layer", place: "Place") -> Path | None:
    """Where the layer's shell stands after the `cd`s in front of it; None if unknown."""
    start = Path.cwd() if place.here else None
    return [start, *(way.path for way in entered(layer, place))][-1]


def said_directory(layer: "Layer", at: Pipeline | None = None) -> str:
    """As `working_directory`, but as the launch says it; empty if it says nothing."""
    return ["", *(way.said for way in entered(layer, layer.place, at))][-1]


def said_path(word: Word, layer: "Layer", at: Pipeline | None = None) -> str:
    """As `path_in`, but as the launch says it: `$RUNS/train.log`."""
    value = value_of(word, layer.shell.values(at or layer.pipeline)) or word.value
    return _below(said_directory(layer, at), value)


def _below(directory: str, path: str) -> str:
    return os.path.join(directory, path) if is_relative(path) else path


def is_relative(path: str) -> bool:
    """Whether what it names depends on where the shell stands, as far as it is said."""
    return not path.startswith(("/", "~", "$"))


def may_be_made(layer: "Layer", at: Pipeline) -> bool:
    """Whether something in front brings files: a clone, a copy, a virtual environment."""
    argvs = [command.argv for command in layer.shell.front(at)]
    return any(argv and (argv[0] in MAKERS or "venv" in argv) for argv in argvs)


def written(word: Word, layer: "Layer") -> Iterator[tuple[Command, Redirect]]:
    """The commands in front that write the file which a word names, each with its redirect."""
    wanted = os.path.normpath(said_path(word, layer))
    for each in (*layer.shell.opened_by, layer):
        if each.place.hops != layer.place.hops:
            continue
        for _, step in each.shell.earlier(each.pipeline):
            for redirect in (r for r in step.command.redirects if r.writes):
                target = said_path(redirect.target, step) if redirect.target else ""
                if os.path.normpath(target) == wanted:
                    yield step.command, redirect


def other_root(hop: str) -> Path | None:
    """A container's root where it lies in this file system, or None."""
    *_, name = hop.split()
    known = {
        "chroot": [Path(name)],
        "pct": [Path(f"/var/lib/lxc/{name}/rootfs")],
        "lxc-attach": [Path(f"/var/lib/lxc/{name}/rootfs")],
        "lxc": [Path(f"/var/lib/lxd/storage-pools/default/containers/{name}/rootfs")],
        "incus": [Path(f"/var/lib/incus/storage-pools/default/containers/{name}/rootfs")],
    }
    paths = known.get(hop.split()[0], [])
    return next((path for path in paths if path.is_dir() and os.access(path, os.X_OK)), None)


def script_source(word: Word, layer: "Layer", place: "Place", *, asked: bool) -> Source | None:
    """The shell script that a word names, if it can be read from here.

    Args:
        asked: a shell is asked to read it, whatever it is called.
    """
    path = path_in(word, layer, place)
    try:
        if path is None or not path.is_file() or path.stat().st_size > 1 << 20:
            return None
        raw = path.read_bytes()
    except OSError:
        return None
    if b"\0" in raw:
        return None  # a program, no text
    given_to_shell = asked or layer.name in SHELLS | {"source", ".", "sbatch"}
    if not given_to_shell and not SHEBANG.match(raw) and path.suffix != ".sh":
        return None
    own = path if place.here or place.root is None else Path("/") / path.relative_to(place.root)
    return Source(word.value, raw.decode(errors="replace"), path, str(own.parent))

"""What a word stands for, and where the file that it names lies, as far as the launch says."""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from diagnostics.launch.shell import Expansion, Source, Text, Word
from diagnostics.launch.wrappers import SHELLS

if TYPE_CHECKING:
    from diagnostics.launch.layers import Layer, Place

DEEPEST = 16  # of variables that hold variables
VALUE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")
DEFAULT = re.compile(r"""\$\{(\w+):?-["']?(.*?)["']?\}""", re.DOTALL)
_SCRIPT = r"(?:0|BASH_SOURCE(?:\[0\])?)"
_DIRNAME = rf'\$\(dirname (?:-- )?"?\$\{{?{_SCRIPT}\}}?"?\)'
# $(dirname "$0"), ${0%/*}, $(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
OWN_DIRECTORY = re.compile(
    rf'{_DIRNAME}|\$\{{{_SCRIPT}%/\*\}}|\$\(cd (?:-- )?"?{_DIRNAME}"?[^;&]*(?:;|&&) *pwd[ LP-]*\)'
)
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
    name = VALUE.fullmatch(typed)
    found = known.get(name[1] or name[2]) if name and depth <= DEEPEST else None
    return value_of(found, known, depth + 1) if found else None


def path_in(word: Word, layer: "Layer", place: "Place | None" = None) -> Path | None:
    """Where the word's path lies, seen from here; None if that cannot be known.

    Relative paths are followed through a `cd` in front. `~` and $HOME are known here only.
    """
    place = place or layer.place
    known = layer.values()
    value = value_of(word, known)
    if value is None and place.here:
        value = _with_home(word, known)
    if value is None or place.root is None or not value:
        return None
    if value.startswith("~"):
        known_home = place.here and not (home := os.path.expanduser(value)).startswith("~")
        return Path(home) if known_home else None
    if not value.startswith("/"):
        directory = working_directory(layer, place)
        return directory / value if directory else None
    return place.root / value.lstrip("/")


def _with_home(word: Word, known: dict[str, Word]) -> str | None:
    names = {"$HOME", "${HOME}"}
    home = [e for e in word.expansions if e.span.text in names]
    if not home or len(home) != len(word.expansions):
        return None
    return re.sub(r"\$HOME|\$\{HOME\}", lambda _: str(Path.home()), word.value)


def working_directory(layer: "Layer", place: "Place") -> Path | None:
    """Where the layer's shell stands after the `cd`s in front of it; None if unknown."""
    directory: Path | None = Path.cwd() if place.here else None
    for word, known in _entered(layer, place):
        value = value_of(word, known) if word else None
        if value is None:
            return None
        base = place.root if value.startswith("/") else directory
        directory = base / value.lstrip("/") if base else None
    return directory


def said_directory(layer: "Layer") -> str:
    """As `working_directory`, but as the launch says it; empty if it says nothing."""
    said = ""
    for word, known in _entered(layer, layer.place):
        value = (value_of(word, known) or word.value) if word else "$HOME"
        said = value if value.startswith(("/", "~", "$")) or not said else f"{said}/{value}"
    return said


def _entered(layer: "Layer", place: "Place") -> Iterator[tuple[Word | None, dict[str, Word]]]:
    """What the `cd`s in front, in this place, are given, with the variables known there."""
    for each in (*layer.shell.opened_by, layer):
        if (each.own or each is layer) and each.place.hops == place.hops:
            yield from ((word, each.values()) for word in _directories(each))


def _directories(layer: "Layer") -> Iterator[Word | None]:
    """Where `cd` and `tmux -c` lead to; None for one that cannot be known."""
    block = layer.pipeline.block
    for pipeline in layer.shell.script.before(layer.pipeline):
        command = pipeline.commands[0]
        around = block[: len(pipeline.block)] == pipeline.block  # not in another subshell
        if command.argv[:1] == ["cd"] and around:
            yield command.words[1] if len(command.words) == 2 else None
    if layer.handed and layer.name.startswith("tmux") and "-c" in layer.handed.options:
        yield layer.handed.options["-c"]


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
    given_to_shell = asked or layer.name in SHELLS | {"source", ".", "sbatch"}
    if not given_to_shell and not SHEBANG.match(raw) and path.suffix != ".sh":
        return None
    own = path if place.here or place.root is None else Path("/") / path.relative_to(place.root)
    return Source(word.value, raw.decode(errors="replace"), path, str(own.parent))

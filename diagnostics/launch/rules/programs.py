"""Interpreters, scripts and environments that are not there."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from diagnostics.launch.layers import Launch, Layer, Shell, is_python
from diagnostics.launch.rules.directories import made
from diagnostics.launch.rules.places import programs
from diagnostics.launch.rules.rule import Hit, Rule, Severity
from diagnostics.launch.shell import Span, Word
from diagnostics.launch.whereabouts import (
    entered,
    may_be_made,
    path_in,
    said_path,
    value_of,
    written,
)

CHANGES_PATH = {"source", ".", "conda", "mamba", "module", "eval", "pyenv", "spack"}
HOOKS = ("conda.sh", "shell.bash hook", "shell hook", "source activate", ".bashrc", "micromamba")


def _missing(launch: Launch) -> Iterator[Hit]:
    seen = set[Span]()
    files = [*programs(launch), *_interpreters(launch)]
    for word, layer in files:
        path = path_in(word, layer)
        if layer.name in {"source", "."} and "/" not in word.value:
            continue  # it is searched for in PATH
        if word.span in seen or (path and _comes_to_be(path, word, layer)):
            continue
        seen.add(word.span)
        if path is None:
            yield from _unknown(word, layer)
            continue
        on = "" if layer.place.here else f" (in {layer.place})"
        yield Hit(word.span, f"there is no {path}{on}", instead=_look(path))
    yield from _directories(launch)
    yield from _not_executable(launch)
    yield from _unnamed(launch)
    for word in _commands(launch):
        if word.span not in seen:
            seen.add(word.span)
            ask = f"activate its environment, or name it by its path: command -v {word.value}"
            yield Hit(word.span, f"{word.value} is not on this machine's PATH", instead=ask)


def _comes_to_be(path: Path, word: Word, layer: Layer) -> bool:
    """Whether it is there, or the launch makes it, or the directories that it goes through."""
    if path.exists() or may_be_made(layer, layer.pipeline) or any(written(word, layer)):
        return True
    new = [w for w in entered(layer, layer.place) if w.path is None or not w.path.is_dir()]
    through = bool(new) and all(made(way.said, way.layer, way.at) for way in new)
    return through and Path(os.path.normpath(path)).exists()


def _unknown(word: Word, layer: Layer) -> Iterator[Hit]:
    """On another machine it is DL029 that says so."""
    if layer.place.here:
        said = said_path(word, layer)
        what = f"where {word.value} is looked for is not said in the launch"
        ask = "name it by its whole path"
        if said.startswith("/"):
            what = f"you may not look whether there is a {said}"
            ask = f"as the user who may: ls -l {said}"
        yield Hit(word.span, what, instead=ask, unknown=True)


def _look(path: Path) -> str:
    """The nearest directory that exists is where the path goes wrong."""
    exists = next(parent for parent in path.parents if parent.is_dir())
    return f"a path that exists; the nearest that does is {exists}"


def _unnamed(launch: Launch) -> Iterator[Hit]:
    """A program that is a variable which the launch does not set."""
    for layer in (chain.program for chain in launch.trainers):
        word = layer.command.words[0]
        if word.expansions and value_of(word, layer.values()) is None:
            what = f"which program {word.value} is is not said in the launch"
            ask = "check it again with the program in its place"
            yield Hit(word.span, what, instead=ask, unknown=True)


def _not_executable(launch: Launch) -> Iterator[Hit]:
    for word, layer in _interpreters(launch):
        path = path_in(word, layer)
        if path and path.is_file() and not os.access(path, os.X_OK):
            ask = f"chmod +x {word.span.text}"
            why = "The launch ends with `Permission denied`, where perhaps nobody looks."
            yield Hit(word.span, f"{path} is not executable", why=why, instead=ask)


def _directories(launch: Launch) -> Iterator[Hit]:
    """Python runs one that holds a `__main__.py`; nothing else does."""
    for word, layer in (*programs(launch), *_interpreters(launch)):
        path = path_in(word, layer)
        first = word is layer.command.words[0]
        runs = path and not first and is_python(layer.name) and (path / "__main__.py").is_file()
        if path and path.is_dir() and not runs:
            why = "The launch ends with `Is a directory`, where perhaps nobody looks."
            yield Hit(word.span, f"{path} is a directory", why=why, instead="a program in it")


def _interpreters(launch: Launch) -> Iterator[tuple[Word, Layer]]:
    """First words with a slash in them."""
    for chain in launch.chains:
        for layer in chain.layers:
            word = layer.command.words[0] if layer.command.words else None
            if word and "/" in word.value and not word.value.startswith("$"):
                yield word, layer


def _commands(launch: Launch) -> Iterator[Word]:
    """Bare names of training programs that this machine does not have."""
    for chain in launch.trainers:
        layer = chain.program
        word = layer.command.words[0]
        bare = "/" not in word.value and not word.expansions and layer.place.here
        if bare and not _path_changes(chain.layers) and not shutil.which(word.value):
            yield word


def _path_changes(layers: tuple[Layer, ...]) -> bool:
    for layer in layers:
        for command in layer.shell.front(layer.pipeline):
            names = {name for name, _ in command.assignments}
            if "PATH" in names or (command.argv[:1] and command.argv[0] in CHANGES_PATH):
                return True
    return any(layer.name in {"conda run", "mamba run", "uv run", "poetry run"} for layer in layers)


def _conda(launch: Launch) -> Iterator[Hit]:
    for shell in launch.shells:
        process = shell.process
        if process.kind == "command line" or process.keys or shell.kind == "source":
            continue
        for pipeline in shell.script.pipelines:
            command = pipeline.commands[0]
            activates = command.argv[:2] in (["conda", "activate"], ["mamba", "activate"])
            if activates and not _hooked(process, command.span):
                yield Hit(command.span, "this shell has not read conda's hook")


def _hooked(shell: Shell, activation: Span) -> bool:
    """Whether conda's function is defined in front, or an interactive shell reads ~/.bashrc."""
    start = next((i for i, o in enumerate(shell.script.text.origins) if o >= activation.start), 0)
    front = shell.script.text.value[:start]
    handed = shell.opened_by[-1].handed if shell.opened_by else None
    interactive = handed is not None and "-i" in handed.options
    return interactive or any(hook in front for hook in HOOKS)


RULES = (
    Rule(
        "DL031",
        "the interpreter, script or environment is not there",
        Severity.RUN,
        "The launch ends with `No such file or directory` before the first line of the trainer,"
        " where perhaps nobody looks.",
        ".no-venv/bin/python -u train.py >> train.log 2>&1",
        "python -u train.py >> train.log 2>&1",
        "the launch makes it first, or runs on another machine.",
        _missing,
    ),
    Rule(
        "DL032",
        "conda activate in a shell that does not know it",
        Severity.RUN,
        "`conda activate` is a shell function, which only interactive shells read from ~/.bashrc:"
        " here it fails, and the system's python runs instead.",
        "bash -c 'conda activate train && exec python -u train.py >> /tmp/train.log 2>&1'",
        "bash -c 'source ~/miniconda3/etc/profile.d/conda.sh && conda activate train &&"
        " exec python -u train.py >> /tmp/train.log 2>&1'",
        "BASH_ENV or the image defines the function.",
        _conda,
    ),
)

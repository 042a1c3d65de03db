"""A user's own launch with a canary in the trainer's place and scratch files in its logs' places.

Words are replaced where they stand, inside whatever quotes: the program that Python is to run,
every path that is written to, and the path of every script that had to be changed, and is a copy
from then on. The result no longer names the trainer, so that it cannot start it. It is read again,
and refused if it does not read as the same launch.
"""

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from diagnostics.launch.harmless import STAND_INS, objections
from diagnostics.launch.layers import Chain, Launch, Layer, read
from diagnostics.launch.private_tmux import shim_with_settings
from diagnostics.launch.rules.rule import Edit, applied
from diagnostics.launch.scene import Plan, place_victim
from diagnostics.launch.shapes import Look, Shape
from diagnostics.launch.shell import Command, Redirect, Source, Word
from diagnostics.launch.stand_in import CannotRewrite, stand_in
from diagnostics.launch.streams import logs, tee_logs
from diagnostics.launch.wrappers import basename

SPECIAL_FILES = re.compile(r"/dev/(null|stdout|stderr|tty|fd/\d+)$")
OWN_PATH = re.compile(r"\$0\b|\$\{0\}|\$BASH_SOURCE\b|\$\{BASH_SOURCE(\[0\])?\}")
PLAIN = re.compile(r"[\w./+-]+")


@dataclass(frozen=True)
class Rewritten:
    """The launch as it is to be typed, where its log will be, and the program it stands in for."""

    shape: Shape
    log: Path
    pid_file: Path | None
    stands_in_for: str
    is_slow: bool


def rewrite(source: Source, folder: Path, plan: Plan) -> Rewritten:
    """Write the canary and the copies into `folder`. Raises CannotRewrite, having run nothing."""
    launch = read(source)
    if reasons := list(objections(launch)):
        raise CannotRewrite(reasons)
    chain = launch.trainer
    assert chain is not None
    edits = _Edits(launch, chain, folder, plan)
    line = edits.carry_out()
    _verify(launch, chain, line, edits)
    return Rewritten(
        _shape(launch, chain, line),
        edits.log,
        edits.pid_file,
        " ".join(chain.program.command.argv),
        basename(chain.program.command.argv[0]) == "torchrun",
    )


class _Edits:
    """All that is to be replaced, by the file in which it stands; None is what was typed."""

    def __init__(self, launch: Launch, chain: Chain, folder: Path, plan: Plan) -> None:
        self._launch = launch
        self._folder = folder
        self._files: dict[str, Path] = {}
        self._by_file: dict[Path | None, list[Edit]] = {}
        (folder / "written").mkdir()
        (folder / "scripts").mkdir()
        self.canary = place_victim(folder, "canary.py", plan)
        self._add(stand_in(chain.program, self.canary))
        for command in _commands(launch):
            if command.argv[:1] and command.argv[0] in STAND_INS:
                self._add(Edit(command.span, "true"))
        if tmux := shim_with_settings(folder):
            for word in _tmux_words(launch):
                self._add(Edit(word.span, str(tmux)))
        for word in _written(launch):
            self._add(Edit(word.span, str(self._scratch(word))))
        self.log = self._scratch(_log_word(chain))
        written = [r.target for c in _tellers(launch) for r in c.redirects if _writes_file(r)]
        self.pid_file = self._scratch(written[0]) if written and written[0] else None

    def _add(self, edit: Edit) -> None:
        self._by_file.setdefault(edit.span.source.path, []).append(edit)

    def _scratch(self, word: Word) -> Path:
        """The same text means the same file."""
        typed = word.span.text.strip("'\"\\")
        name = re.sub(r"[^\w.]", "_", basename(typed))
        numbered = self._folder / "written" / f"{len(self._files)}-{name}"
        return self._files.setdefault(typed, numbered)

    def carry_out(self) -> str:
        """Copy each changed script, innermost first, and return what is to be typed."""
        for shell in reversed(self._launch.shells):
            source = shell.script.text.source
            if source.path is None or source == self._launch.source or not shell.opened_by:
                continue
            if shell.kind in ("file", "source") and source.path in self._by_file:
                handed = shell.opened_by[-1].handed
                assert handed is not None
                self._add(Edit(handed.words[0].span, str(self._copy(source))))
        source = self._launch.source
        if source.path is None:
            return applied(source.text, self._by_file.get(None, []))
        copy = self._copy(source)
        return str(copy) if source.text.startswith("#!") else f"bash {copy}"

    def _copy(self, source: Source) -> Path:
        assert source.path is not None
        edits = [*self._by_file.get(source.path, []), *_own_paths(self._launch, source)]
        name = re.sub(r"[^\w.]", "_", source.path.name)
        copy = self._folder / "scripts" / f"{len(self._by_file)}-{name}"
        copy.write_text(applied(source.text, edits))
        shutil.copymode(source.path, copy)
        copy.chmod(copy.stat().st_mode | 0o100)
        return copy


def _own_paths(launch: Launch, source: Source) -> Iterator[Edit]:
    """A copy lies elsewhere: `$0` and `$BASH_SOURCE` become the path of the original."""
    path = str(source.path)
    for command in _commands(launch):
        words = [*command.words, *(word for _, word in command.assignments)]
        words += [r.target for r in command.redirects if r.target is not None]
        for span in (e.span for word in words for e in word.expansions):
            if span.source == source and OWN_PATH.search(span.text):
                if not PLAIN.fullmatch(path):
                    raise CannotRewrite(
                        [f"{path}: it asks for its own path, which has odd characters"]
                    )
                yield Edit(span, OWN_PATH.sub(path, span.text))


def _commands(launch: Launch) -> Iterator[Command]:
    """Every command that is written anywhere, those of process substitutions too."""
    for shell in launch.shells:
        for pipeline in shell.script.pipelines:
            for command in pipeline.commands:
                yield command
                for redirect in command.redirects:
                    yield from redirect.into


def _tmux_words(launch: Launch) -> Iterator[Word]:
    for chain in launch.chains:
        for command in (layer.command for layer in chain.layers):
            if command.words and basename(command.argv[0]) == "tmux":
                yield command.words[0]


def _tellers(launch: Launch) -> Iterator[Command]:
    """The commands that tell a process id: `echo $!`."""
    for command in _commands(launch):
        told = any(e.span.text in ("$!", "${!}") for word in command.words for e in word.expansions)
        if told and command.argv[0] in ("echo", "printf"):
            yield command


def _written(launch: Launch) -> Iterator[Word]:
    """Every path that is opened for writing."""
    for command in _commands(launch):
        for redirect in command.redirects:
            if redirect.target is not None and _writes_file(redirect):
                yield redirect.target
    for chain in launch.chains:
        for layer in chain.layers:
            yield from (log.word for log in tee_logs(layer.command, layer) if log.word)
            yield from _of_substitutions(layer)
        yield from (log.word for log in logs(chain) if log.word)


def _of_substitutions(layer: Layer) -> Iterator[Word]:
    for redirect in layer.command.redirects:
        for command in redirect.into:
            yield from (log.word for log in tee_logs(command, layer) if log.word)


def _writes_file(redirect: Redirect) -> bool:
    target = redirect.target.value if redirect.target else ""
    return redirect.writes and not SPECIAL_FILES.match(target)


def _log_word(chain: Chain) -> Word:
    found = [log.word for log in logs(chain)]
    if not found:
        raise CannotRewrite(["the trainer's output goes to no file: there is no log to look at"])
    assert found[0] is not None  # nohup.out was objected to
    return found[0]


def _verify(launch: Launch, chain: Chain, line: str, edits: _Edits) -> None:
    """Raises CannotRewrite unless it reads as before, with the canary and scratch files in it."""
    again = read(Source("rewritten", line))
    new = again.trainer
    layers = len(chain.layers) + (launch.source.path is not None)
    runs = new is not None and any("/canary" in word for word in new.program.command.argv)
    inside = str(edits.canary.parent)
    written = [word.value for word in _written(again) if not SPECIAL_FILES.match(word.value)]
    parses = all(shell.script.broken is None for shell in again.shells)
    same = new is not None and len(new.layers) == layers and len(again.trainers) == 1
    if not (parses and same and runs and all(value.startswith(inside) for value in written)):
        raise CannotRewrite(["with the canary in its place it no longer reads as the same launch"])


def _shape(launch: Launch, chain: Chain, line: str) -> Shape:
    """What is known of the launch, as of the shapes that are tried without one."""
    text = "\n".join(shell.script.text.source.text for shell in launch.shells)
    session = any(layer.name.startswith("tmux") for layer in chain.layers)
    detached = any(
        layer.pipeline.background or (layer.handed is not None and layer.handed.detached)
        for layer in chain.layers
    )
    look = Look.LINE if not detached else Look.NOWHERE
    if session and re.search(r"remain-on-exit\s+on", text):
        look = Look.PANE
    return Shape(
        "your launch",
        line,
        script=text,
        look=look,
        session=session,
        prints_pid=any(_tellers(launch)),
    )

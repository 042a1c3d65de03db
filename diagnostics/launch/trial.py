"""One launch, tried for real: a victim is started in one shape, dies in one way, and what is left?

`run` must be called in a process that does nothing else: every descendant of it is the trial's, and
is gone when it returns.
"""

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

from diagnostics.launch import family, pool, victim
from diagnostics.launch.console import Console
from diagnostics.launch.deaths import BUFFERINGS, DEATHS, Blow, Death
from diagnostics.launch.scene import LINES, Desk, Scene, can_mount
from diagnostics.launch.shapes import SHAPES, Look, Shape
from diagnostics.reproducers import last_line

START_S = 30.0  # for the victim to write its lines; a loaded machine is slow
END_S = 15.0  # for it to die
IDLE_S = 1.0  # nothing has moved for so long: it will not start any more
WHOLE_LINE = re.compile(rf"line (\d{{6}}) \.{{{victim.WIDTH - 13}}}")
SETTLE_S = 0.15  # nothing has moved for so long: nothing more will happen


@dataclass(frozen=True)
class Cell:
    """A launch to try: the names of its shape, death and buffering."""

    shape: str
    death: str
    buffering: str


@dataclass(frozen=True)
class Result:
    """What one launch left.

    `kept` of `written` lines are in the log. `last_words` is None where the death has none,
    `status` where nobody can say, `session` where there was to be none, `pid_is_trainers` where
    none was printed. `returned`: the death did not kill it. `survived`: it still ran at the end.
    `orphans` are other Pythons that still ran. `hangs`: the line had not ended, though the trainer
    had. `said`: where it never started, the last line of its log or terminal. `unclear` says why
    nothing can be said.
    """

    started: bool
    log: bool
    kept: int
    written: int
    last_words: bool | None = None
    status: int | None = None
    returned: bool = False
    survived: bool = False
    session: bool | None = None
    pid_is_trainers: bool | None = None
    orphans: int = 0
    hangs: bool = False
    said: str = ""
    unclear: str = ""


def makes_sense(shape: Shape, death: Death) -> bool:
    """Whether the shape has what this death strikes."""
    has = {
        Blow.KILL_TEE: shape.pipes,
        Blow.STOP_PRINTED: shape.prints_pid,
        Blow.KILL_SESSION: shape.session,
    }
    return has.get(death.blow, True)


def why_not(cell: Cell) -> str | None:
    """Why this cell cannot be tried here, or None; empty if it makes no sense anywhere."""
    shape, death, buffering = SHAPES[cell.shape], DEATHS[cell.death], BUFFERINGS[cell.buffering]
    if not makes_sense(shape, death):
        return ""
    tools = ["bash", *shape.needs, *(["stdbuf"] if "stdbuf" in buffering.python else [])]
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        return f"no {missing[0]} here"
    if death.needs == "tmpfs" and not can_mount():
        return "no small disk can be mounted here"
    return None


def run(cell: Cell) -> Result:
    """Try it. Raises OSError where the machine has no room, TimeoutError if a process stays."""
    shape, death, buffering = SHAPES[cell.shape], DEATHS[cell.death], BUFFERINGS[cell.buffering]
    with tempfile.TemporaryDirectory(prefix="dflash-launch-") as name:
        desk = Desk(Path(name), shape, death, buffering)
        with desk.disk():
            return attempt(desk, desk.line, desk.work, death)


def attempt(scene: Scene, line: str, cwd: Path, death: Death) -> Result:
    """Type the line, let the victim that it starts die so, and look; nothing is left running."""
    console = Console(line, scene.shape.where, cwd, scene.env, scene.record.parent)
    try:
        return _Trial(scene, console, death).result()
    finally:
        family.end_all()
        console.close()


class _Trial:
    def __init__(self, scene: Scene, console: Console, death: Death) -> None:
        self._scene = scene
        self._console = console
        self._death = death

    def result(self) -> Result:
        """Wait for the lines, deal the blow, wait until nothing moves any more, and look."""
        idle = family.Quiet(IDLE_S)
        if not self._until(lambda: bool(self._said("written")) or idle(), START_S):
            return self._look(f"it had not written its lines after {START_S:g} s")
        pid = self._pid()
        if pid is not None and self._said("written"):
            if self._death.blow is not Blow.NONE and not self._all_is_read():
                return self._look(f"what it wrote had not been read after {END_S:g} s")
            self._strike(pid)
            if self._must_die() and not self._until(lambda: self._is_over(pid), END_S):
                return self._look(f"it had not died after {END_S:g} s")
        quiet = family.Quiet(SETTLE_S)
        if not self._until(quiet, END_S):
            return self._look(f"its processes were still busy after {END_S:g} s")
        return self._look()

    def _until(self, condition: Callable[[], bool], within_s: float) -> bool:
        def listening() -> bool:
            pool.leave_if_told()
            self._console.listen()
            return condition()

        return family.wait_until(listening, within_s)

    def _all_is_read(self) -> bool:
        """A `tee` with something to read is busy: how far it is, is the machine's load."""
        return self._until(family.Quiet(SETTLE_S), END_S)

    def _said(self, word: str) -> list[str]:
        """The lines of the victim's record that begin so: one, or two if two victims ran."""
        try:
            lines = self._scene.record.read_text().splitlines()
        except FileNotFoundError:
            return []
        return [line for line in lines if line.startswith(word)]

    def _pid(self) -> int | None:
        said = self._said("pid")
        return int(said[0].split()[1]) if said else None

    def _printed_pid(self) -> int | None:
        if not self._scene.shape.prints_pid:
            return None
        if self._scene.pid_file is not None:
            return _read_number(self._scene.pid_file)
        return self._console.printed_pid()

    def _is_trainers(self, process: psutil.Process) -> bool:
        """Whether it runs the trainer's Python."""
        said = self._said("pid")
        try:
            return bool(said) and process.exe() == said[0].split(maxsplit=2)[2]
        except psutil.Error:
            return False

    def _is_over(self, pid: int) -> bool:
        return not family.is_alive(pid) or bool(self._said("returned"))

    def _must_die(self) -> bool:
        """Whether it cannot survive, so that there is an end to wait for."""
        return self._death.blow in (Blow.NONE, Blow.KILL, Blow.TERM, Blow.KILL_TEE)

    def _strike(self, pid: int) -> None:
        """Deal the blow that the death asks for."""
        match self._death.blow:
            case Blow.KILL:
                os.kill(pid, signal.SIGKILL)
            case Blow.TERM:
                os.kill(pid, signal.SIGTERM)
            case Blow.HANG_UP:
                self._console.hang_up()
            case Blow.KILL_SESSION:
                self._scene.tmux("kill-session")
            case Blow.KILL_TEE:
                for process in family.living():
                    if process.name() == "tee":
                        process.kill()
            case Blow.STOP_PRINTED:
                printed = self._printed_pid()
                for process in family.living():
                    if process.pid == printed:
                        process.terminate()

    def _look(self, unclear: str = "") -> Result:
        shape, pid = self._scene.shape, self._pid()
        log = read_log(self._scene.log, self._death.last_words)
        printed = self._printed_pid()
        written = self._said("written")
        survived = pid is not None and family.is_alive(pid)
        return Result(
            started=pid is not None,
            log=log is not None,
            kept=log.kept if log else 0,
            written=int(written[0].split()[1]) if written else LINES if pid else 0,
            last_words=bool(log and log.last_words) if self._death.last_words else None,
            status=self._status(),
            returned=bool(self._said("returned")),
            survived=survived,
            session=self._has_session() if shape.session else None,
            pid_is_trainers=printed == pid if printed is not None else None,
            orphans=sum(p.pid != pid for p in family.living() if self._is_trainers(p)),
            hangs=not survived and not self._console.is_over(),
            said="" if pid else last_line(_text(self._scene.log) or self._console.text()),
            unclear=unclear,
        )

    def _has_session(self) -> bool:
        return self._scene.tmux("has-session") is not None

    def _status(self) -> int | None:
        """The trainer's exit status, where this shape lets a user look for it."""
        match self._scene.shape.look:
            case Look.LINE:
                return self._console.status()
            case Look.FILE:
                return _read_number(self._scene.log.with_name("status"))
            case Look.PANE:
                return self._pane_status()
            case Look.NOWHERE:
                return None

    def _pane_status(self) -> int | None:
        """A tmux built with libutempter misses deaths (tmux#311) until another child of it ends."""
        self._scene.tmux("run-shell", "true")
        asked = "#{pane_dead_status} -#{pane_dead_signal}"
        answer = self._scene.tmux("display-message", "-p", asked) or ""
        numbers = [int(word) for word in answer.split() if word.strip("-").isdigit()]
        return numbers[0] if numbers else None


@dataclass(frozen=True)
class Log:
    """What a log has of the victim's lines, and whether it has its last words."""

    kept: int
    last_words: bool


def read_log(path: Path, last_words: str) -> Log | None:
    """None if there is no log. A line counts once, and if it is whole."""
    text = _text(path)
    if text is None:
        return None
    return Log(len(set(WHOLE_LINE.findall(text))), bool(last_words) and last_words in text)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return None


def _read_number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (FileNotFoundError, ValueError):
        return None

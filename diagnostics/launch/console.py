"""Where a launch line is typed: an interactive bash on a terminal, or what ssh does with it."""

import fcntl
import os
import pty
import re
import subprocess
import termios
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from diagnostics.launch.shapes import Where

PRINTED_PID = re.compile(rb"(?m)^(\d+)\r?$")

ASK = """PROMPT_COMMAND='printf "%s\\n" $? >> "$DFLASH_LINE_STATUS"'"""


class Console:
    """A line being run in a directory, with what it shows and the status that it gives.

    `scratch` is a private directory for its own use.
    At a prompt, `$?` is asked for before each new prompt: the second time it is the line's.
    """

    def __init__(
        self, line: str, where: Where, folder: Path, env: Mapping[str, str], scratch: Path
    ) -> None:
        self.shown = b""
        self._status_path = scratch / "line-status"
        self._at_prompt = where is Where.PROMPT
        self._has_terminal = where is not Where.SSH
        self._reading, writing = pty.openpty() if self._has_terminal else os.pipe()
        os.set_blocking(self._reading, False)
        command = ["bash", "--norc", "--noprofile", "--noediting", "-i"]
        self._shell = subprocess.Popen(
            command if self._at_prompt else ["bash", "-c", line],
            stdin=writing if self._has_terminal else subprocess.DEVNULL,
            stdout=writing,
            stderr=writing,
            cwd=folder,
            env={**env, "DFLASH_LINE_STATUS": str(self._status_path)},
            start_new_session=True,
            preexec_fn=_take_terminal if self._has_terminal else None,
        )
        os.close(writing)
        if self._at_prompt:
            os.write(self._reading, f"{ASK}\n{line}\n".encode())

    def status(self) -> int | None:
        """What the line ended with, as the shell has it; None while it runs, or if none can say."""
        self.listen()
        if not self._at_prompt:
            return self._shell.poll()
        with suppress(FileNotFoundError, IndexError):
            return int(self._status_path.read_text().split("\n")[:-1][1])
        return None

    def is_over(self) -> bool:
        """Whether the line has ended, or its shell has."""
        return self.status() is not None or self._shell.poll() is not None

    def printed_pid(self) -> int | None:
        """The process id that the line printed, if it did."""
        self.listen()
        found = PRINTED_PID.search(self.shown)
        return int(found[1]) if found else None

    def text(self) -> str:
        """What was shown so far."""
        self.listen()
        return self.shown.decode(errors="replace")

    def hang_up(self) -> None:
        """Close the terminal, as a lost connection does."""
        self.listen()
        self._hang_up()

    def _hang_up(self) -> None:
        if self._reading >= 0:
            os.close(self._reading)
            self._reading = -1

    def listen(self) -> None:
        """Take what was shown, so that nobody waits for room; `ssh -t` goes when its shell ends."""
        ended = self._shell.poll() is not None
        with suppress(OSError):
            while self._reading >= 0 and (piece := os.read(self._reading, 1 << 16)):
                self.shown += piece
        if ended and self._has_terminal:
            self._hang_up()

    def close(self) -> None:
        """Once its processes were ended."""
        self.hang_up()
        self._shell.wait()


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)

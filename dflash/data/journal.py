"""What has been generated so far: one line for each batch of prompts, on disk before the next.

A process that is killed, at any moment, loses the batch it was in; the next one goes on with that
batch. The directory also says which settings it belongs to, so that two are never mixed.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dflash.data.completions import Completion
from dflash.durable import drop_torn_line
from dflash.errors import DataError


class Journal:
    """A context manager, held by one process at a time; `batches` is how many are done."""

    def __init__(self, directory: Path, settings: Mapping[str, Any]) -> None:
        """Open or begin it. Raises DataError if another process has it, or other settings did."""
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / "batches.jsonl").open("a+b")
        try:
            self._lock()
            self._check_settings(dict(settings))
            self.batches = drop_torn_line(self._file)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._file.close()
        if error is not None and not self.batches:
            self.discard()

    def append(self, rows: Sequence[Completion]) -> None:
        """Record the next batch; it is on disk when this returns."""
        line = json.dumps([asdict(row) for row in rows], separators=(",", ":"))
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.batches += 1

    def rows(self) -> Iterator[Completion]:
        """Everything recorded, in order."""
        with (self.directory / "batches.jsonl").open("rb") as file:
            for line in file:
                yield from (Completion(**row) for row in json.loads(line))

    def discard(self) -> None:
        """Delete it: what it holds is elsewhere."""
        shutil.rmtree(self.directory)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"{self.directory} is being written by another process",
                remedy="Wait for it, or choose another --output-dir.",
            ) from error

    def _check_settings(self, settings: dict[str, Any]) -> None:
        path = self.directory / "settings.json"
        if not path.exists():
            fresh = path.with_suffix(".new")
            fresh.write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
            fresh.rename(path)
        before = json.loads(path.read_text(encoding="utf-8"))
        changed = [key for key in settings if before.get(key) != settings[key]]
        if changed:
            said = "; ".join(f"{key} {before.get(key)} -> {settings[key]}" for key in changed)
            raise DataError(
                f"{self.directory} was begun with other settings: {said}",
                remedy="Type the same options to go on, or delete that directory to start anew.",
            )

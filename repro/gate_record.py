"""What a step does with shared state, from which it follows whether its order matters."""

from __future__ import annotations

import importlib
from collections import deque
from typing import Any

from turns import Touched

from dflash.concurrency import gate, scope, task_group

# By its full name: the package's `channel` is the function.
channel = importlib.import_module("dflash.concurrency.channel")
Channel = channel._Channel
# Shared state, by class: attribute -> what it is called in a step's record.
GUARDED: dict[type, dict[str, str]] = {
    scope.Scope: {"reason": "reason", "cause": "cause"},
    gate.Gate: {"_missing": "missing"},
    Channel: {n: n for n in ("items", "senders", "receivers", "broken", "cause")},
    channel.Sender: {"_peers": "senders"},  # the same set as the channel's
    channel.Receiver: {"_peers": "receivers"},
    task_group.TaskGroup: {n: n for n in ("_threads", "_ended", "_failures", "_open")},
}


class Record:
    """What one step does with shared state.

    Two steps that write the same, or of which one writes what the other reads, are not
    independent; nor are one that begins to wait and one that notifies. Two that wait, or two that
    notify, are.
    """

    def __init__(self) -> None:
        self.others: list[tuple[str, Touched]] = []
        self._does: set[str] = set()
        self._spoilt_by: set[str] = set()
        self._seen: dict[str, tuple[Any, str, Any]] = {}

    def reads(self, what: str) -> None:
        self._does.add(f"reads {what}")
        self._spoilt_by.add(f"writes {what}")

    def writes(self, what: str) -> None:
        self._does.add(f"writes {what}")
        self._spoilt_by |= {f"writes {what}", f"reads {what}"}

    def waits(self) -> None:
        self._does.add("waits")
        self._spoilt_by.add("notifies")

    def notifies(self) -> None:
        self._does.add("notifies")
        self._spoilt_by.add("waits")

    def looks(self, of: Any, name: str, what: str) -> None:
        """An attribute was taken, perhaps to change what it holds."""
        what = named(of, what)
        if what not in self._seen:
            self._seen[what] = (of, name, _copy(object.__getattribute__(of, name)))
            self.reads(what)

    def touched(self) -> Touched:
        """All of it, once the step is over."""
        for what, (of, name, before) in self._seen.items():
            if _copy(object.__getattribute__(of, name)) != before:
                self.writes(what)
        return Touched(frozenset(self._does), frozenset(self._spoilt_by), tuple(self.others))


def named(of: Any, what: str) -> str:
    """Channels have several of each; the others are there once."""
    return f"{of.name}.{what}" if isinstance(of, Channel | channel._End) else what


def _copy(value: Any) -> Any:
    if isinstance(value, dict):
        return tuple(value.items())
    if isinstance(value, set):
        return frozenset(value)
    return tuple(value) if isinstance(value, list | deque) else value

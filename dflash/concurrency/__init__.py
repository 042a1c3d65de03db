"""Threads that cannot fail or hang unseen: a scope, channels, a start-up gate and a task group.

Standard library only. A `TaskGroup` owns the threads and a `Scope`; `channel` and `Gate` are made
in that scope, so that the first failure ends every wait in it.
"""

from dflash.concurrency.channel import (
    ChannelBroken,
    ChannelClosed,
    EndOfChannel,
    Receiver,
    Sender,
    channel,
)
from dflash.concurrency.gate import Gate, GateTimeout, MissingParty
from dflash.concurrency.scope import Cancelled, Scope, WaitTimeout, stacks_of
from dflash.concurrency.task_group import StuckThreads, TaskGroup

__all__ = [
    "Cancelled",
    "ChannelBroken",
    "ChannelClosed",
    "EndOfChannel",
    "Gate",
    "GateTimeout",
    "MissingParty",
    "Receiver",
    "Scope",
    "Sender",
    "StuckThreads",
    "TaskGroup",
    "WaitTimeout",
    "channel",
    "stacks_of",
]

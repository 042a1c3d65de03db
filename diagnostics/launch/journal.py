"""What is written down of a launch, stage by stage, so that its end can be told whoever dies.

One file for each name, `$XDG_STATE_HOME/dflash-diag/launch/NAME/journal.jsonl`: JSON lines that are
only ever added, private to the user, each on the disk before the next stage begins. A launch is the
records with one `run`; the first is the client's. Standard library only: the supervisor writes it.

stage         written by   says
client        client       command, log, manner, prefix; a process; what the launch wants
supervisor    supervisor   the process that waits for the trainer
prefix        supervisor   the process of --exec-in
redirect      supervisor   the log that it opened: path, device, inode
exec          supervisor   the trainer: pid, start_ticks since the boot boot_id, pid_namespace
first_line    supervisor   seconds after its start
forwarded     supervisor   a signal that the trainer was sent (not-forwarded: could not be)
hang-up       supervisor   the terminal went away
exit          supervisor   status or signal; processes that are left; how many the kernel killed
failed        supervisor   the step that failed, and why
lost          supervisor   --exec-in's process ended, and not with the trainer's end
superseded    supervisor   a later launch took the name before this one began
"""

import json
import os
from pathlib import Path

from diagnostics.launch.onsite import Record


def state_dir() -> Path:
    """Where all launches of this user are written down."""
    home = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(home) / "dflash-diag" / "launch"


def journal_of(name: str) -> Path:
    """The journal of a name; its directory need not exist."""
    return state_dir() / name / "journal.jsonl"


def names() -> list[str]:
    """All that were ever launched; none where this user may not look (sudo keeps HOME)."""
    try:
        folders = sorted(os.listdir(state_dir()))
    except OSError:
        return []
    return [name for name in folders if last_run(journal_of(name))]


def append(path: str | Path, record: Record) -> None:
    """Add one line, on the disk when this returns. Raises OSError."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
    descriptor = os.open(path, flags, 0o600)
    try:
        os.write(descriptor, json.dumps(record).encode() + b"\n")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def records(path: str | Path) -> list[Record]:
    """All records; a line that a crash tore is left out."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [record for line in lines if (record := parsed(line))]


def parsed(line: str) -> Record | None:
    """The record in a line, or None if there is none."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "stage" in record else None


def last_run(path: str | Path) -> dict[str, Record]:
    """Stage -> the last record of it, of the last launch; empty if there was none."""
    found = records(path)
    clients = [record for record in found if record["stage"] == "client"]
    if not clients:
        return {}
    return {each["stage"]: each for each in found if each.get("run") == clients[-1]["run"]}

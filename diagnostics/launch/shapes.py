"""Ways to start a training run, as data: a shape is one entry here and nothing anywhere else.

A `line` is what a user types. It runs in a private directory with `train.py`, the victim, in it;
`{python}` becomes `python3`, `python3 -u` or the like. `start.sh`, where a shape has one, is what
its `script` says. `tmux` is one with a private server.
"""

from dataclasses import dataclass
from enum import StrEnum

PYTHON = "{python}"
TRAIN = f"{PYTHON} train.py"
LOG = "train.log"
SESSION = "train"
EXEC, PIPE = "exec > log", "exec | tee log"  # the two that are held against each other


class Where(StrEnum):
    """Who reads the line."""

    PROMPT = "an interactive bash on a terminal"
    SSH_T = "bash -c on a terminal that goes away with it, as under ssh -t"
    SSH = "bash -c without a terminal, as under ssh"


class Look(StrEnum):
    """Where a user finds the trainer's exit status."""

    LINE = "$? after the line"
    PANE = "the status that tmux keeps of a dead pane"
    FILE = "a file that the launch writes"
    NOWHERE = "nowhere"


@dataclass(frozen=True)
class Shape:
    """One way to start.

    `needs`: the programs without which it cannot be tried. `session`: whether a tmux session is to
    be there afterwards. `prints_pid`: whether the line prints a process id. `log`: where it goes.
    `races`: whether the trainer starts at all is chance.
    """

    name: str
    line: str
    script: str = ""
    where: Where = Where.PROMPT
    look: Look = Look.LINE
    needs: tuple[str, ...] = ()
    session: bool = False
    prints_pid: bool = False
    log: str = LOG
    races: bool = False

    @property
    def pipes(self) -> bool:
        """Whether a `tee` stands between trainer and log."""
        return "tee " in self.line + self.script


def _tmux(name: str, command: str, script: str = "", look: Look = Look.NOWHERE) -> Shape:
    """A detached session that runs `command`."""
    line = f"tmux new-session -d -s {SESSION} '{command}'"
    return Shape(name, line, script, look=look, needs=("tmux",), session=True)


def _background(
    name: str, line: str, script: str = "", where: Where = Where.PROMPT, *, races: bool = False
) -> Shape:
    """A line that ends at once and prints a process id."""
    needs = tuple(tool for tool in ("nohup", "setsid") if tool in line)
    told = "$!" in line
    return Shape(name, line, script, where, Look.NOWHERE, needs, prints_pid=told, races=races)


_TO_LOG = "> train.log 2>&1"
_KEEP = "tmux start-server \\; set-option -g remain-on-exit on \\; "

SHAPES = {
    shape.name: shape
    for shape in (
        # In the foreground of a shell.
        Shape("> log", f"{TRAIN} {_TO_LOG}"),
        Shape("script > log", f"bash start.sh {_TO_LOG}", TRAIN),
        Shape(EXEC, f"bash start.sh {_TO_LOG}", f"exec {TRAIN}"),
        Shape("exec > log in script", "bash start.sh", f"exec {_TO_LOG}\n{TRAIN}"),
        Shape(">> log", f"{TRAIN} >> train.log 2>&1"),
        Shape("&> log", f"{TRAIN} &> train.log"),
        Shape("&> log, in dash", f"dash -c '{TRAIN} &> train.log'", needs=("dash",)),
        Shape("> log, no 2>&1", f"{TRAIN} > train.log"),
        Shape("2>&1 > log", f"{TRAIN} 2>&1 > train.log"),
        Shape("> missing/log", f"{TRAIN} > missing/train.log 2>&1", log="missing/train.log"),
        Shape("| tee log", f"{TRAIN} 2>&1 | tee train.log"),
        Shape("| tee log, no 2>&1", f"{TRAIN} | tee train.log"),
        Shape(PIPE, "bash start.sh 2>&1 | tee train.log", f"exec {TRAIN}"),
        Shape("pipefail | tee log", f"set -o pipefail; {TRAIN} 2>&1 | tee train.log"),
        Shape(
            "| tee missing/log", f"{TRAIN} 2>&1 | tee missing/train.log", log="missing/train.log"
        ),
        Shape("> >(tee log)", f"{TRAIN} > >(tee train.log) 2>&1"),
        Shape("script -c", f"script -qefc '{TRAIN}' train.log", needs=("script",)),
        # In the background.
        _background("&", f"{TRAIN} {_TO_LOG} & echo $!"),
        _background("& disown", f"{TRAIN} {_TO_LOG} & echo $!; disown"),
        Shape("& wait", f"{TRAIN} {_TO_LOG} & wait $!"),
        _background("nohup &", f"nohup {TRAIN} {_TO_LOG} & echo $!"),
        _background("nohup script &", f"nohup bash start.sh {_TO_LOG} & echo $!", f"{TRAIN}\ntrue"),
        _background("nohup exec &", f"nohup bash start.sh {_TO_LOG} & echo $!", f"exec {TRAIN}"),
        _background("| tee log &", f"{TRAIN} 2>&1 | tee train.log & echo $!"),
        _background("setsid &", f"setsid {TRAIN} {_TO_LOG} < /dev/null & echo $!"),
        _background("setsid -f", f"setsid -f {TRAIN} {_TO_LOG} < /dev/null"),
        _background("trap '' HUP &", f"trap '' HUP; {TRAIN} {_TO_LOG} & echo $!"),
        # The terminal goes away with bash: SIGHUP may come before nohup ignores it.
        _background(
            "ssh -t: nohup &",
            f"nohup {TRAIN} {_TO_LOG} & echo $!",
            where=Where.SSH_T,
            races=True,
        ),
        _background(
            "ssh -t: trap, nohup &",
            f"trap '' HUP; nohup {TRAIN} {_TO_LOG} & echo $!",
            where=Where.SSH_T,
        ),
        _background(
            "ssh: nohup script &",
            f"/bin/bash -lc 'nohup /bin/bash start.sh {_TO_LOG} & echo $!' 2>&1",
            f"{TRAIN}\ntrue",
            Where.SSH,
        ),
        # In a detached tmux session.
        _tmux("tmux: > log", f"{TRAIN} {_TO_LOG}"),
        _tmux("tmux: exec > log", f"bash start.sh {_TO_LOG}", f"exec {TRAIN}"),
        _tmux("tmux: exec | tee log", "bash start.sh 2>&1 | tee train.log", f"exec {TRAIN}"),
        _tmux("tmux: > log; exec bash", f"{TRAIN} {_TO_LOG}; exec bash --norc"),
        _tmux("tmux: status in file", f"{TRAIN} {_TO_LOG}; echo $? > status", look=Look.FILE),
        Shape(
            "tmux: remain-on-exit",
            f"{_KEEP}new-session -d -s {SESSION} 'exec {TRAIN} {_TO_LOG}'",
            look=Look.PANE,
            needs=("tmux",),
            session=True,
        ),
        Shape(
            "tmux: remain, tee",
            f"{_KEEP}new-session -d -s {SESSION} "
            f"'set -o pipefail; {TRAIN} 2>&1 | tee -a train.log'",
            look=Look.PANE,
            needs=("tmux",),
            session=True,
        ),
        Shape(
            "tmux: send-keys | tee",
            f"tmux new-session -d -s {SESSION} 'exec bash --norc' \\; "
            f"send-keys '{TRAIN} 2>&1 | tee train.log' Enter",
            look=Look.NOWHERE,
            needs=("tmux",),
            session=True,
        ),
        Shape(
            "tmux: pipe-pane",
            f"tmux new-session -d -s {SESSION} '{TRAIN}' \\; pipe-pane 'cat > train.log'",
            look=Look.NOWHERE,
            needs=("tmux",),
            session=True,
        ),
    )
}

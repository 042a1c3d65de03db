"""What the new run needs: its output directory, room for checkpoints, data, target."""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from diagnostics.preflight.inquiry import Answer, NoAnswer, ask
from diagnostics.preflight.line import Line, Run, Seen, ok, problem, size, unknown
from diagnostics.preflight.machine import nearest_existing, not_writable

SAVES = "SIGTERM lets dflash train finish its step and save. "
BEHIND = "Check the path where the run will run (in the container, if it runs in one)."


def open_run(config: Path) -> Run:
    """The run that a configuration file describes. Raises dflash.errors.ConfigError."""
    from dflash import heartbeat
    from dflash.config import TrainConfig

    read = TrainConfig.from_toml(config)
    directory = Path(read.run.output_dir).absolute()
    try:
        beats = heartbeat.read(directory / heartbeat.FILE, with_events=False)
    except (OSError, ValueError):
        return Run(read, directory, None)
    return Run(read, directory, beats.pid if beats.is_alive else None)


def output_directory(seen: Seen) -> Line:
    """Nobody else writes there, and it can be written to."""
    name, run = "output directory", _of(seen)
    # Not whoever reads the log there: `tail -f`, an editor.
    own = [p for p in seen.table.processes if "python" in p.name and run.owns(p)]
    if own:
        return seen.leftovers(name, "", [(p, f"uses {run.directory}") for p in own], SAVES)
    if run.pid is not None:
        said = f"process {run.pid}, which cannot be looked into, runs in {run.directory}"
        return problem(name, said, remedy="End it, or choose another --output-dir.")
    if os.path.exists(run.directory) and not os.path.isdir(run.directory):
        return problem(name, f"{run.directory} is no directory", remedy="Choose another.")
    nearest = nearest_existing(run.directory)
    wrong = not_writable(nearest)
    if wrong:
        return problem(name, wrong[0], *wrong[1:], remedy="Choose another --output-dir.")
    made = "" if nearest == run.directory else ", to be made"
    if seen.table.gap:
        return unknown(name, f"{run.directory}{made}: nobody uses it, as far as can be seen")
    return ok(name, f"{run.directory}{made}, writable, and nobody uses it")


def inquire(config: Path, seen: Seen, progress: Callable[[str], None]) -> list[Line]:
    """The lines for what a child has to be asked."""
    try:
        answers: Mapping[str, Answer] = ask(config, progress)
    except NoAnswer as none:
        answers, why = {}, str(none)
    else:
        why = "see target and data"
    lines = []
    for subject, judge in JUDGES.items():
        answer = answers.get(subject)
        if answer is None:
            lines.append(unknown(NAMES[subject], f"could not be asked: {why}"))
        elif "error" in answer:
            remedy = answer["remedy"] or BEHIND
            lines.append(problem(NAMES[subject], answer["error"], remedy=remedy))
        else:
            lines.append(judge(answer, _of(seen)))
    return lines


def _of(seen: Seen) -> Run:
    assert seen.run is not None
    return seen.run


def _target(answer: Answer, run: Run) -> Line:
    told = "{kind}, {layers} layers of hidden size {hidden}, {tokens} tokens".format(**answer)
    told = f"{run.config.model.target_model}: {told}; no weights were loaded"
    if answer["missing"]:
        slow = f"{told}; without kernels for its linear attention: correct, but much slower"
        return problem(NAMES["target"], slow, remedy=f"pip install {' '.join(answer['missing'])}")
    return ok(NAMES["target"], told)


def _data(answer: Answer, run: Run) -> Line:
    name, where = NAMES["data"], run.config.data.data_dir
    if not answer["rows"]:
        return problem(name, f"{where} has no row", remedy="Prepare it again: dflash prepare")
    first, last = answer["ends"]
    told = f"{answer['rows']} rows; the first has {first} tokens, the last {last}"
    if answer["steps"] is None:
        return unknown(name, f"{where}: {told}; without the target, ids were not checked")
    return ok(name, f"{where}: {told}; {answer['steps']} steps")


def _resume(answer: Answer, run: Run) -> Line:
    start = answer["from"] or "the beginning"
    return ok(NAMES["resume"], f"--resume {run.config.run.resume}: from {start}")


def _space(answer: Answer, run: Run) -> Line:
    """One more than is kept, while the next one is being written."""
    name, each, kept = NAMES["space"], answer["bytes"], answer["kept"]
    need = (kept + 1) * each
    free = shutil.disk_usage(nearest_existing(run.directory)).free
    told = (
        f"{kept} checkpoint(s) of {size(each)} and one being written: {size(need)}"
        f" of {size(free)} free"
    )
    if need > free:
        fits = int(free // each) - 1 if each else 0
        remedy = f"Type --keep-checkpoints {fits}" if fits > 0 else "Make room, or go elsewhere"
        return problem(name, told, remedy=f"{remedy}; this run saves {answer['saves']} times.")
    return ok(name, told)


NAMES = {"target": "target", "data": "data", "resume": "start", "space": "disk space"}
JUDGES: dict[str, Callable[[Answer, Run], Line]] = {
    "target": _target,
    "data": _data,
    "resume": _resume,
    "space": _space,
}

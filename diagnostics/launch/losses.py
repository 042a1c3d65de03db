"""What a user is left without after a trial: one judgement, for the table, the verdict and CI."""

import signal
from collections.abc import Iterator

from diagnostics.launch.deaths import Blow, Death
from diagnostics.launch.shapes import Look, Shape
from diagnostics.launch.trial import Result
from diagnostics.reproducers import Outcome


def judged(shape: Shape, death: Death, result: Result) -> tuple[Outcome, str]:
    """A trial as CI counts it, with what was lost."""
    if result.unclear:
        return Outcome.CANNOT_TELL, result.unclear
    lost = losses(shape, death, result)
    return (Outcome.REPRODUCED, ", ".join(lost)) if lost else (Outcome.ABSENT, "all is there")


def losses(shape: Shape, death: Death, result: Result) -> list[str]:
    """In words, worst first; empty if all that one needs to know is there.

    A worker that outlives its trainer is no loss of the launch: no launch line ends it.
    """
    if result.unclear:
        return []
    return [*_of_the_log(shape, death, result), *_of_the_end(shape, death, result)]


def _of_the_log(shape: Shape, death: Death, result: Result) -> Iterator[str]:
    if not result.log:
        yield "no log"
    if shape.races:
        yield f"its start is chance ({'it did' if result.started else 'not'} this time)"
    elif not result.started:
        yield "never started"
    if not result.started:
        return
    if result.log and result.kept < result.written and not result.survived:
        yield f"{result.written - result.kept} of {result.written} lines"
    if result.log and result.last_words is False and not result.returned:
        yield f"its last words ({death.last_words})"


def _of_the_end(shape: Shape, death: Death, result: Result) -> Iterator[str]:
    if not result.started:
        return
    if death.blow is Blow.HANG_UP:
        if not result.survived:
            yield "the run"
    elif result.survived:
        yield "control: it runs on"
    elif result.hangs:
        yield "its end: the launch still waits"
    elif (true := true_status(death, result)) is not None and not seen_right(true, result.status):
        where = "nowhere" if shape.look is Look.NOWHERE else f"{result.status}"
        yield f"exit status {in_words(true)} (seen: {where})"
    if result.pid_is_trainers is False:
        yield "the trainer's process id"


def true_status(death: Death, result: Result) -> int | None:
    """What the trainer ended with, as subprocess has it; None if this death does not tell."""
    if death.ends is None:
        return None
    return 0 if result.returned else death.ends


def seen_right(true: int, seen: int | None) -> bool:
    """A shell says 128 + N for signal N."""
    return seen == true or (true < 0 and seen == 128 - true)


def in_words(status: int) -> str:
    """`SIGKILL` for -9, else the number."""
    return signal.Signals(-status).name if status < 0 else str(status)

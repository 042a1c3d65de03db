"""The first version without a failure, by binary search over what was measured."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Boundary:
    """Neighbouring versions: the last with the failure, and the first without it.

    Both are empty, and `why` says why, where that cannot be told.
    """

    last_with: str = ""
    first_without: str = ""
    why: str = ""


def first_without(versions: Sequence[str], has: Callable[[str], bool | None]) -> Boundary:
    """Search `versions` (oldest first); `has` measures one: None if it could not tell.

    Assumes that the failure, once gone, stays away. That is checked at both ends and on either side
    of the boundary only; `has` is asked more than once for a version, so it should remember.
    """
    if len(versions) < 2:
        return Boundary(why=f"{len(versions)} version: it takes two, one with it and one without")
    if has(versions[0]) is not True:
        return Boundary(why=f"the oldest, {versions[0]}, {_state(has(versions[0]))}")
    if has(versions[-1]) is not False:
        return Boundary(why=f"the newest, {versions[-1]}, {_state(has(versions[-1]))}")
    low, high = _narrow(versions, has)
    if high - low > 1:
        untold = ", ".join(versions[low + 1 : high])
        return Boundary(
            why=f"{versions[low]} has it, {versions[high]} does not, and between them {untold} "
            "could not be measured"
        )
    for index, expected in ((low - 1, True), (high + 1, False)):
        if 0 <= index < len(versions) and has(versions[index]) is (not expected):
            why = f"it comes and goes: {versions[index]} {_state(not expected)}"
            return Boundary(why=f"{why}, beyond {versions[low]} and {versions[high]}")
    return Boundary(versions[low], versions[high])


def _narrow(versions: Sequence[str], has: Callable[[str], bool | None]) -> tuple[int, int]:
    """The closest pair, by index, of a version with the failure and a later one without."""
    low, high, untold = 0, len(versions) - 1, set[int]()
    while left := [index for index in range(low + 1, high) if index not in untold]:
        middle = min(left, key=lambda index: abs(2 * index - low - high))
        answer = has(versions[middle])
        if answer is None:
            untold.add(middle)
        elif answer:
            low = middle
        else:
            high = middle
    return low, high


def _state(answer: bool | None) -> str:
    return {True: "has it", False: "does not have it", None: "could not be measured"}[answer]

"""A narrow, predictable domain: what a small drafter can learn in a minute or two on a CPU."""

TASKS = ("adds {} to a number", "multiplies a number by {}", "subtracts {} from a number")
NUMBERS = range(2, 26)
# Every fifth number is held out, with all its tasks: the drafter never sees it.
HELD_OUT_EVERY = 5


def prompts() -> tuple[list[str], list[str]]:
    """The prompts to train on, and those to measure on."""
    held_out = [n for n in NUMBERS if n % HELD_OUT_EVERY == 1]
    learned = [n for n in NUMBERS if n not in held_out]
    return _texts(learned), _texts(held_out)


def _texts(numbers: list[int]) -> list[str]:
    return [
        f"Write a Python function that {task.format(number)}. Give the code only."
        for number in numbers
        for task in TASKS
    ]

"""A narrow, predictable domain: what a small drafter can learn in a minute or two on a CPU."""

VERBS = ("sort", "count", "reverse", "print", "filter", "copy", "join", "split", "check", "merge")
OBJECTS = (
    "a list of words",
    "a list of numbers",
    "the lines of a file",
    "the keys of a dictionary",
    "the characters of a string",
    "the rows of a table",
    "a list of names",
    "a list of dates",
    "the items of a set",
)
# Every sixth prompt is held out: no verb and no object is new to the drafter, each pair is.
HELD_OUT_EVERY = 6


def prompts() -> tuple[list[str], list[str]]:
    """The prompts to train on, and those to measure on."""
    pairs = [(verb, thing) for verb in VERBS for thing in OBJECTS]
    texts = [
        f"Write a Python function that can {verb} {thing}. Give the code only."
        for verb, thing in pairs
    ]
    held_out = texts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]
    return [text for text in texts if text not in held_out], held_out

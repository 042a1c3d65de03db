"""`dflash generate`: the target's own text, written faster with a drafter, as it is decoded."""

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from dflash.decode import Step, decoded_from
from dflash.decoding_options import DecodingOptions
from dflash.engine import Engine, load_engine
from dflash.errors import Exit
from dflash.promptsets import prompt_ids
from dflash.verify import require_tree_mask

UNFINISHED = "\ufffd"  # what a tokenizer shows for part of a character


def generate(
    checkpoint: Path, prompts: Iterable[str], decoding: DecodingOptions, tree_nodes: int
) -> int:
    """Write each prompt's continuation to stdout, its tau and speed to stderr."""
    engine = load_engine(checkpoint, decoding)
    if tree_nodes:
        require_tree_mask(engine.target)
    for prompt in prompts:
        _generate(engine, prompt_ids(engine.tokenizer, prompt, raw=decoding.raw), tree_nodes)
    return Exit.OK


def _generate(engine: Engine, prompt: list[int], tree_nodes: int) -> None:
    steps: list[Step] = []
    started_s = time.perf_counter()
    try:
        for piece in pieces(
            engine.tokenizer, decode_parts(engine.steps(prompt, tree_nodes), steps)
        ):
            print(piece, end="", flush=True)
    finally:
        print(flush=True)
        if steps:
            print(_closing_line(steps, time.perf_counter() - started_s), file=sys.stderr)


def decode_parts(steps: Iterable[Step], done: list[Step]) -> Iterator[list[int]]:
    """The tokens of each pass, while the passes are kept in `done`."""
    for step in steps:
        done.append(step)
        yield step.tokens


def pieces(tokenizer: PreTrainedTokenizerBase, parts: Iterable[Sequence[int]]) -> Iterator[str]:
    """Text as its tokens come in, whole characters only; joined, it is the whole text decoded."""
    tokens: list[int] = []
    shown = text = ""
    for part in parts:
        tokens += part
        text = str(tokenizer.decode(tokens, skip_special_tokens=True))
        if not text.endswith(UNFINISHED):
            yield text[len(shown) :]
            shown = text
    yield text[len(shown) :]


def _closing_line(steps: list[Step], seconds: float) -> str:
    decoded = decoded_from(steps)
    count = len(decoded.tokens)
    return (
        f"{count} tokens in {len(steps)} passes of the target: tau "
        f"{decoded.acceptance_length:.2f}, {count / seconds:.1f} tokens/s"
    )

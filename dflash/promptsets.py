"""Prompts to decode: a text file, a JSONL file, or a directory of tokenized completions."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from dflash.data.completions import Completion, Completions
from dflash.data.generate import chat_prompt
from dflash.data.sources import CONVERSATION_KEYS, holds_objects, lines, objects
from dflash.errors import DataError

FORMS = 'one of {"prompt": "..."} and {"conversations": [{"role": "user", "content": "..."}]}'
SHAREGPT = {"human": "user", "gpt": "assistant"}


@dataclass(frozen=True)
class PromptSet:
    """Documents whose part before `prompt_length` is a prompt; a text of the target may follow.

    `note`: what is to be said of these texts before they are replayed; empty if nothing.
    """

    name: str
    documents: list[Completion]
    note: str = ""


def read_prompts(
    path: Path,
    tokenizer: PreTrainedTokenizerBase,
    target: Path,
    vocab_size: int,
    *,
    limit: int | None,
    raw: bool,
) -> PromptSet:
    """The first `limit` prompts of a file or directory; raises DataError naming the line or row.

    Of tokenized completions, which must be of `target`'s tokenizer, the first answer is kept.

    A line of a text file is a prompt; JSONL may hold chats, cut after the last user's turn. Text is
    put under the tokenizer's chat template, if it has one, unless `raw`.
    """
    stored = Completions(path) if path.is_dir() else None
    if stored is None:
        found = _written(path, tokenizer, raw)
    else:
        stored.check_target(target, vocab_size)
        found = (stored.completion(row).first_answer() for row in range(len(stored)))
    documents = list(islice(found, limit))
    if not documents:
        raise DataError(f"{path}: no prompt in it", remedy="give a file with one prompt a line")
    for one in documents:
        if not one.prompt_length:
            raise DataError(
                f"{path}: row {one.id!r} starts without a prompt",
                remedy="loss_mask must be 0 on the prompt's tokens",
            )
    return PromptSet(path.stem, documents, stored.sampled() if stored else "")


def _written(path: Path, tokenizer: PreTrainedTokenizerBase, raw: bool) -> Iterator[Completion]:
    as_text = raw or not tokenizer.chat_template
    for number, prompt in _chats(path, as_text) if holds_objects(path) else lines(path):
        if not isinstance(prompt, str) or prompt.strip():
            ids = prompt_ids(tokenizer, prompt, raw=raw)
            yield Completion(str(number), path.stem, ids, [0] * len(ids))


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, str]], *, raw: bool
) -> list[int]:
    """Token ids of a text, or of a chat up to the assistant's next turn; raises DataError."""
    if isinstance(prompt, str):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"the prompt {prompt[:40]!r} is not UTF-8", remedy="Give it as UTF-8."
            ) from error
        if raw or not tokenizer.chat_template:
            if not (ids := list(tokenizer(prompt)["input_ids"])):
                raise DataError("the prompt is empty", remedy="Give one token at least.")
            return ids
        prompt = [{"role": "user", "content": prompt}]
    if not tokenizer.chat_template:
        raise DataError(
            "the target's tokenizer has no chat template for prompts that are chats",
            remedy='give prompts as text: {"prompt": "..."}',
        )
    return chat_prompt(tokenizer, prompt)


def _chats(path: Path, as_text: bool) -> Iterator[tuple[int, str | list[dict[str, str]]]]:
    for number, row in objects(path):
        try:
            yield number, _prompt(row, as_text)
        except (LookupError, TypeError) as error:
            shown = json.dumps(row)[:60]
            raise DataError(
                f"{path}: line {number} must be {FORMS}, got {shown}",
                remedy="Mend or delete that line.",
            ) from error


def _prompt(row: dict[str, Any], as_text: bool) -> str | list[dict[str, str]]:
    """A text, which is preferred with `as_text`, or the turns of a chat up to the user's last one.

    Empty where nobody asks anything.
    """
    given = [row[key] for key in CONVERSATION_KEYS if row.get(key) is not None]
    texts = [said for said in given if isinstance(said, str)]
    said = next(filter(None, [*texts, *given] if as_text else given), given[0])
    if isinstance(said, str):
        return said
    turns = [_turn(turn) for turn in said]
    asked = [i for i, turn in enumerate(turns) if turn["role"] == "user"]
    return turns[: asked[-1] + 1] if asked else ""


def _turn(turn: dict[str, str]) -> dict[str, str]:
    role = turn["role"] if "role" in turn else turn["from"]
    content = turn["content"] if "content" in turn else turn["value"]
    return {"role": SHAREGPT.get(role, role), "content": content}

"""What `dflash prepare` reads: prompts, conversations, or rows that are tokenized already.

Text has one prompt a line. A JSONL line is an object with `prompt` (a text or messages), `messages`
or `conversations` (`role`/`content` or `from`/`value`), or `input_ids` and `loss_mask`, which is
what `speculators regenerate-responses` writes. Lines count from 1, rows of a table from 0.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dflash.data.completions import Completion, Completions
from dflash.data.generate import Message
from dflash.errors import DataError

ROLES = {"user": "user", "human": "user", "system": "system"}
CONVERSATION_KEYS = ("messages", "conversations", "prompt")


@dataclass(frozen=True)
class Conversation:
    """System and user messages, in order: the assistant's are written anew."""

    line: int
    id: str
    messages: tuple[Message, ...]

    @property
    def user_turns(self) -> int:
        """Answers that it asks for."""
        return sum(message["role"] == "user" for message in self.messages)


@dataclass(frozen=True)
class TokenRow:
    """A row that is tokenized already; `text` is what its ids stand for, where the source says."""

    where: str
    completion: Completion
    text: str | None = None


def is_tokenized(source: Path) -> bool:
    """Whether the source holds token ids already; of a JSONL file the first line decides."""
    if source.is_dir() or source.suffix == ".parquet":
        return True
    first = next(iter(objects(source)), None) if holds_objects(source) else None
    return first is not None and "input_ids" in first[1]


def conversations(source: Path) -> Iterator[Conversation]:
    """The prompts of a text or JSONL file; one without messages is to be left out."""
    if not holds_objects(source):
        for number, text in lines(source):
            messages = ({"role": "user", "content": text},) if text.strip() else ()
            yield Conversation(number, str(number), messages)
        return
    for number, row in objects(source):
        name = str(row.get("id") or row.get("uuid") or number)
        yield Conversation(number, name, tuple(_messages(source, number, row)))


def token_rows(source: Path) -> Iterator[TokenRow]:
    """The rows of a tokenized source. Raises DataError naming the row that is none."""
    if source.is_dir() or not holds_objects(source):
        data = Completions(source)
        yield from (TokenRow(f"row {i}", data.completion(i)) for i in range(len(data)))
        return
    for number, row in objects(source):
        ids, mask = (_integers(source, number, row, key) for key in ("input_ids", "loss_mask"))
        if len(ids) != len(mask):
            raise _bad_line(
                source, number, f"has {len(ids)} input_ids but {len(mask)} loss_mask entries"
            )
        done = Completion(str(row.get("id", number)), str(row.get("source", "")), ids, mask)
        yield TokenRow(f"line {number}", done, row.get("text"))


def holds_objects(source: Path) -> bool:
    """Whether a file is JSONL, by its name; otherwise it is text. Raises DataError for .json."""
    if source.suffix.lower() == ".json":
        raise DataError(
            f"{source}: a .json file is neither text nor JSONL",
            remedy="Write one object a line, and call it .jsonl.",
        )
    return source.suffix.lower() == ".jsonl"


def lines(source: Path) -> Iterator[tuple[int, str]]:
    """Number and text of every line, those of a text editor; raises DataError."""
    try:
        file = source.open("rb")
    except OSError as error:
        raise DataError(
            f"{source}: cannot be read: {error.strerror}",
            remedy="Give a .txt or .jsonl file, or a directory of tokenized completions.",
        ) from error
    with file:
        for number, line in enumerate(file, start=1):
            try:
                yield number, line.decode("utf-8").rstrip("\r\n")
            except UnicodeDecodeError as error:
                raise _bad_line(source, number, f"is not UTF-8 ({error.reason})") from error


def objects(source: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and object of every line of a JSONL file that is not empty; raises DataError."""
    for number, text in lines(source):
        if not text.strip():
            continue
        try:
            row = json.loads(text)
        except ValueError as error:
            raise _bad_line(source, number, f"is cut off or not JSON ({error})") from error
        if not isinstance(row, dict):
            raise _bad_line(source, number, f"is a JSON {type(row).__name__}, not an object")
        yield number, row


def _messages(source: Path, number: int, row: dict[str, Any]) -> Iterator[Message]:
    key = next((key for key in CONVERSATION_KEYS if row.get(key) is not None), None)
    if key is None:
        raise _bad_line(
            source, number, f"has none of {', '.join(CONVERSATION_KEYS)}; found {sorted(row)}"
        )
    said = row[key]
    turns = [{"role": "user", "content": said}] if isinstance(said, str) else said
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise _bad_line(source, number, f"{key} must be a text or a list of messages")
    for turn in turns:
        role, content = turn.get("role") or turn.get("from"), turn.get("content", turn.get("value"))
        if role in ROLES and not isinstance(content, str):
            raise _bad_line(source, number, f"a {role} message has no text but {content!r}")
        if role in ROLES and content.strip():
            yield {"role": ROLES[role], "content": content}


def _integers(source: Path, number: int, row: dict[str, Any], key: str) -> list[int]:
    values = row.get(key)
    if not isinstance(values, list) or not all(isinstance(value, int) for value in values):
        raise _bad_line(source, number, f"{key} must be a list of integers")
    return [int(value) for value in values]


def _bad_line(source: Path, number: int, what: str) -> DataError:
    return DataError(f"{source}: line {number} {what}", remedy="Mend or delete that line.")

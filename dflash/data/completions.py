"""Tokenized completions on disk: the Arrow layout of `datasets.save_to_disk` plus `meta.json`.

Columns: `input_ids` (list of int32), `loss_mask` (list of int8, 1 = supervised), `seq_len` (int32)
and, optionally, `id` and `source`. The same directory loads with `datasets.load_from_disk`.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from dflash.data.tables import list_lengths, read_table
from dflash.durable import staged, write_json
from dflash.errors import DataError

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("source", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.int8())),
        ("seq_len", pa.int32()),
    ]
)
DATA_FILE = "data-00000-of-00001.arrow"
ROWS_PER_WRITE = 1000


@dataclass(frozen=True)
class Completion:
    """One document: a prompt and what the target wrote after it.

    `input_ids` and `loss_mask` have one entry per token; `loss_mask` is 1 where the target wrote.
    """

    id: str
    source: str
    input_ids: Sequence[int]
    loss_mask: Sequence[int]

    @property
    def prompt_length(self) -> int:
        """Tokens before the first supervised one."""
        ones = (i for i, supervised in enumerate(self.loss_mask) if supervised)
        return next(ones, len(self.loss_mask))

    def cut(self, length: int) -> "Completion":
        """Its first tokens."""
        ids, mask = self.input_ids[:length], self.loss_mask[:length]
        return replace(self, input_ids=ids, loss_mask=mask)

    def first_answer(self) -> "Completion":
        """The document up to where the target first stopped writing: one turn of a chat."""
        rest = enumerate(self.loss_mask[self.prompt_length :], start=self.prompt_length)
        return self.cut(next((i for i, supervised in rest if not supervised), len(self.loss_mask)))


class Completions:
    """A directory of tokenized completions, memory-mapped; safe to read from several threads.

    A directory or file as `dflash.data.tables` reads it. Raises DataError when it is not one.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        self._table = table = read_table(self.directory)
        self._ids, self._mask = table["input_ids"], table["loss_mask"]
        self.lengths = list_lengths(self._ids)

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Row's (input_ids int64, loss_mask bool), both of shape [length]."""
        ids = self._ids[row].values.to_numpy(zero_copy_only=False).astype(np.int64)
        mask = self._mask[row].values.to_numpy(zero_copy_only=False).astype(bool)
        return ids, mask

    def completion(self, row: int) -> Completion:
        """Row as a Completion; rows without an id are called by their number."""
        ids, mask = self.tokens(row)
        return Completion(
            id=self._text("id", row) or str(row),
            source=self._text("source", row),
            input_ids=ids.tolist(),
            loss_mask=mask.astype(int).tolist(),
        )

    def _text(self, column: str, row: int) -> str:
        if column not in self._table.column_names:
            return ""
        return str(self._table[column][row].as_py() or "")

    def anchor_counts(self, max_seq_len: int) -> np.ndarray:
        """Per row, the supervised tokens whose successor is supervised too, both before the cut."""
        counts = []
        for chunk in self._mask.chunks:
            lengths = list_lengths(chunk)
            row = np.repeat(np.arange(len(lengths)), lengths)
            position = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            supervised = chunk.flatten().to_numpy(zero_copy_only=False).astype(bool)
            supervised &= position < max_seq_len
            pairs = supervised[:-1] & supervised[1:] & (row[:-1] == row[1:])
            counts.append(np.bincount(row[:-1][pairs], minlength=len(lengths)))
        return np.concatenate(counts) if counts else np.empty(0, dtype=np.int64)

    def check_target(self, target: Path, vocab_size: int) -> None:
        """Raise DataError unless the token ids are those of the target in that directory."""
        self.check_vocabulary(vocab_size)
        self.check_tokenizer(target)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise DataError, naming the row, when a token id does not exist in the target."""
        first_row = 0
        for chunk in self._ids.chunks:
            ids = chunk.flatten().to_numpy(zero_copy_only=False)
            bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
            if bad.size:
                ends = np.cumsum(self.lengths[first_row : first_row + len(chunk)])
                row = first_row + int(np.searchsorted(ends, bad[0], side="right"))
                raise DataError(
                    f"{self.directory}: row {row} has token id {ids[bad[0]]}, "
                    f"the target's vocabulary ends at {vocab_size - 1}",
                    remedy="prepare the data with the tokenizer of --target-model",
                )
            first_row += len(chunk)

    def check_tokenizer(self, target: Path) -> None:
        """Raise DataError when meta.json says that the ids are another tokenizer's.

        Data without a meta.json, or a target without a tokenizer.json, says nothing.
        """
        made_with = self.meta().get("tokenizer_sha256")
        ours = tokenizer_digest(target)
        if made_with and ours and made_with != ours:
            raise DataError(
                f"{self.directory}: its token ids are another tokenizer's than that of {target}"
                f" (vocabulary hash {made_with[:12]}, {ours[:12]})",
                remedy="Prepare the data with this --target-model, or give the target it is from.",
            )

    def sampled(self) -> str:
        """What is to be said of texts that are not the target's greedy ones; empty otherwise."""
        made = self.meta().get("generation")
        temperature = made.get("temperature") if isinstance(made, dict) else None
        if not isinstance(temperature, int | float) or not temperature:
            return ""
        return (
            f"{self.directory} was sampled at temperature {temperature:g}: tau by replay is that of"
            " these texts, not of the target's greedy ones"
        )

    def meta(self) -> dict[str, Any]:
        """What meta.json says of its making; nothing where there is none."""
        path = self.directory / "meta.json"
        return _read_json(path) if path.is_file() else {}

    def digest(self) -> str:
        """SHA-256 of all ids and masks, whatever the files' layout and integer types."""
        digest = hashlib.sha256(self.lengths.tobytes())
        for column, dtype in ((self._ids, np.int32), (self._mask, np.bool_)):
            for chunk in column.chunks:
                values = chunk.flatten().to_numpy(zero_copy_only=False)
                digest.update(values.astype(dtype).tobytes())
        return digest.hexdigest()


def tokenizer_digest(target: Path) -> str | None:
    """SHA-256 of which text each token id stands for; None where there is no tokenizer.json.

    Not of the file, which the same tokenizer saved by another version differs in.
    """
    path = target / "tokenizer.json"
    if not path.is_file():
        return None
    tokenizer = _read_json(path)
    added = sorted((token["id"], token["content"]) for token in tokenizer.get("added_tokens", []))
    vocabulary = [tokenizer.get("model", {}).get("vocab"), added]
    return hashlib.sha256(json.dumps(vocabulary, sort_keys=True).encode()).hexdigest()


def write_completions(
    directory: Path | str,
    completions: Iterable[Completion],
    meta: dict[str, Any],
    counts: Callable[[], dict[str, Any]] = dict,
) -> None:
    """Write completions and `meta.json` (target, tokenizer, generation settings) to a directory.

    `counts` is asked when all completions have been written. The directory appears whole or not at
    all. Raises DataError when it exists.
    """
    directory = Path(directory)
    refuse_existing(directory)
    with staged(directory) as staging:
        with pa.ipc.new_stream(str(staging / DATA_FILE), SCHEMA) as writer:
            rows = iter(completions)
            while some := list(islice(rows, ROWS_PER_WRITE)):
                writer.write_table(pa.table(_columns(some), schema=SCHEMA))
        write_json(staging / "state.json", _state())
        write_json(staging / "dataset_info.json", {"description": "DFlash tokenized completions"})
        write_json(staging / "meta.json", {**meta, **counts()})


def refuse_existing(directory: Path) -> None:
    """Raise DataError when there is something at the place to write to."""
    if os.path.lexists(directory):
        raise DataError(f"{directory} exists already", remedy="remove it or choose another name")


def _columns(completions: Sequence[Completion]) -> dict[str, list[Any]]:
    return {
        "id": [c.id for c in completions],
        "source": [c.source for c in completions],
        "input_ids": [list(c.input_ids) for c in completions],
        "loss_mask": [list(c.loss_mask) for c in completions],
        "seq_len": [len(c.input_ids) for c in completions],
    }


def _state() -> dict[str, Any]:
    return {
        "_data_files": [{"filename": DATA_FILE}],
        "_fingerprint": "dflash",
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} is not a JSON object: {error}", remedy="restore it") from error

"""Tokenized completions on disk: the Arrow layout of `datasets.save_to_disk` plus `meta.json`.

Columns: `input_ids` (list of int32), `loss_mask` (list of int8, 1 = supervised), `seq_len` (int32)
and, optionally, `id` and `source`. The same directory loads with `datasets.load_from_disk`.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

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
REQUIRED_COLUMNS = ("input_ids", "loss_mask")


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


class Completions:
    """A directory of tokenized completions, memory-mapped; safe to read from several threads.

    Raises DataError when the directory is not one, a column is missing, or two columns disagree.
    """

    def __init__(self, directory: Path | str) -> None:
        self.directory = Path(directory)
        table = _read_table(self.directory)
        missing = [name for name in REQUIRED_COLUMNS if name not in table.column_names]
        if missing:
            raise DataError(
                f"{self.directory}: no column {missing[0]!r}; found {table.column_names}",
                remedy="write it with `dflash.data.completions.write_completions`, or rename it",
            )
        self._ids, self._mask = table["input_ids"], table["loss_mask"]
        self._table = table
        self.lengths = _list_lengths(self._ids)
        _check_same_lengths(self.directory, self.lengths, _list_lengths(self._mask))

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
            lengths = _list_lengths(chunk)
            row = np.repeat(np.arange(len(lengths)), lengths)
            position = np.arange(len(row)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            supervised = chunk.flatten().to_numpy(zero_copy_only=False).astype(bool)
            supervised &= position < max_seq_len
            pairs = supervised[:-1] & supervised[1:] & (row[:-1] == row[1:])
            counts.append(np.bincount(row[:-1][pairs], minlength=len(lengths)))
        return np.concatenate(counts) if counts else np.empty(0, dtype=np.int64)

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


def write_completions(
    directory: Path | str, completions: Sequence[Completion], meta: dict[str, Any]
) -> None:
    """Write completions and `meta.json` (target, tokenizer, generation settings) to a directory.

    The directory appears whole or not at all: it is written beside its name and renamed.
    """
    directory = Path(directory)
    if directory.exists():
        raise DataError(f"{directory} exists already", remedy="remove it or choose another name")
    staging = directory.with_name(f".{directory.name}.writing")
    staging.mkdir(parents=True, exist_ok=True)
    table = pa.table(_columns(completions), schema=SCHEMA)
    with pa.ipc.new_stream(str(staging / DATA_FILE), SCHEMA) as writer:
        writer.write_table(table)
    _write_json(staging / "state.json", _state())
    _write_json(staging / "dataset_info.json", {"description": "DFlash tokenized completions"})
    _write_json(staging / "meta.json", meta)
    staging.rename(directory)


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


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _read_table(directory: Path) -> pa.Table:
    files = _data_files(directory)
    try:
        tables = [pa.ipc.open_stream(pa.memory_map(str(path))).read_all() for path in files]
        return pa.concat_tables(tables)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(
            f"{directory}: cannot read as Arrow: {error}",
            remedy="the file is truncated or foreign; prepare the data again",
        ) from error


def _data_files(directory: Path) -> list[Path]:
    state = directory / "state.json"
    if not state.is_file():
        raise DataError(
            f"{directory}: no state.json, so not a directory of tokenized completions",
            remedy="give the directory that `datasets.save_to_disk` wrote",
        )
    try:
        entries = json.loads(state.read_text(encoding="utf-8"))["_data_files"]
        return [directory / entry["filename"] for entry in entries]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{state}: names no Arrow files under _data_files ({error!r})",
            remedy="give the directory that `datasets.save_to_disk` wrote",
        ) from error


def _list_lengths(lists: Any) -> np.ndarray:
    return np.asarray(pc.list_value_length(lists).to_numpy(), dtype=np.int64)


def _check_same_lengths(directory: Path, ids: np.ndarray, mask: np.ndarray) -> None:
    rows = np.flatnonzero(ids != mask)
    if rows.size:
        row = int(rows[0])
        raise DataError(
            f"{directory}: row {row} has {ids[row]} input_ids but {mask[row]} loss_mask entries",
            remedy="every token needs its loss_mask entry; prepare the data again",
        )

"""Arrow and Parquet files of token rows: read whole, checked, every refusal with its row.

What `datasets.save_to_disk` writes (state.json and Arrow streams), as `speculators prepare-data`
does, a directory of Parquet files, or one Parquet file.
"""

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from dflash.errors import DataError

REQUIRED_COLUMNS = ("input_ids", "loss_mask")
WHAT_TO_GIVE = "give the directory that `dflash prepare` or `datasets.save_to_disk` wrote"


def read_table(path: Path) -> pa.Table:
    """The rows at `path`, memory-mapped where the format allows, with the two columns checked.

    Raises DataError when there are none to read, a column is missing or of another type, or a row
    has no value or two of different lengths.
    """
    files = [path] if path.suffix == ".parquet" else _files_in(path)
    try:
        table = pa.concat_tables([_read_file(file) for file in files])
    except (pa.ArrowInvalid, OSError) as error:
        kind = "Parquet" if files[0].suffix == ".parquet" else "Arrow"
        raise DataError(
            f"{path}: cannot read as {kind}: {error}",
            remedy="the file is truncated or foreign; prepare the data again",
        ) from error
    _check_columns(path, table)
    _check_same_lengths(path, *(list_lengths(table[name]) for name in REQUIRED_COLUMNS))
    return table


def list_lengths(lists: pa.ChunkedArray | pa.ListArray) -> np.ndarray:
    """Entries of each row."""
    return np.asarray(pc.list_value_length(lists).to_numpy(), dtype=np.int64)


def _read_file(file: Path) -> pa.Table:
    if file.suffix == ".parquet":
        return pq.read_table(file)
    return pa.ipc.open_stream(pa.memory_map(str(file))).read_all()


def _files_in(directory: Path) -> list[Path]:
    state = directory / "state.json"
    if not state.is_file():
        if parquet := sorted(directory.glob("*.parquet")):
            return parquet
        raise DataError(
            f"{directory}: no state.json and no *.parquet, so not a directory of token rows",
            remedy=WHAT_TO_GIVE,
        )
    try:
        entries = json.loads(state.read_text(encoding="utf-8"))["_data_files"]
        files = [directory / entry["filename"] for entry in entries]
        if not files:
            raise ValueError("none at all")
        return files
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{state}: names no Arrow files under _data_files ({error!r})", remedy=WHAT_TO_GIVE
        ) from error


def _check_columns(path: Path, table: pa.Table) -> None:
    for name in REQUIRED_COLUMNS:
        if name not in table.column_names:
            raise DataError(
                f"{path}: no column {name!r}; found {table.column_names}",
                remedy="make it with `dflash prepare`, or rename it",
            )
        column = table[name]
        if not _is_list_of_numbers(column.type):
            raise DataError(
                f"{path}: column {name!r} must hold lists of integers, holds {column.type}",
                remedy="make it with `dflash prepare`",
            )
        if column.null_count:
            row = pc.index(column.is_null(), True).as_py()
            raise DataError(
                f"{path}: row {row} has no {name} ({column.null_count} such rows)",
                remedy="take these rows out",
            )
        entries = pc.list_flatten(column)
        if entries.null_count:
            first = pc.index(entries.is_null(), True).as_py()
            row = np.searchsorted(np.cumsum(list_lengths(column)), first, side="right")
            raise DataError(
                f"{path}: row {row} has {name} with gaps ({entries.null_count} missing in all)",
                remedy="take these rows out, or give every token its value",
            )


def _is_list_of_numbers(kind: pa.DataType) -> bool:
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return is_list and (
        pa.types.is_integer(kind.value_type) or pa.types.is_boolean(kind.value_type)
    )


def _check_same_lengths(path: Path, ids: np.ndarray, mask: np.ndarray) -> None:
    rows = np.flatnonzero(ids != mask)
    if rows.size:
        row = int(rows[0])
        raise DataError(
            f"{path}: row {row} has {ids[row]} input_ids but {mask[row]} loss_mask entries",
            remedy="every token needs its loss_mask entry; prepare the data again",
        )


def some(rows: Iterable[object], most: int = 5) -> str:
    """`3, 17, 20 and 4 more`."""
    numbers = list(rows)
    more = f" and {len(numbers) - most} more" if len(numbers) > most else ""
    return ", ".join(map(str, numbers[:most])) + more

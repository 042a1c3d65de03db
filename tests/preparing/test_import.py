"""Rows that are tokenized already: speculators' layouts, and our own."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dflash.data.completions import write_completions


def table(**columns):
    kinds = {"input_ids": pa.list_(pa.int64()), "loss_mask": pa.list_(pa.int64())}
    return pa.table({name: pa.array(rows, kinds.get(name)) for name, rows in columns.items()})


# As speculators' prepare-data leaves it: int64 lists, seq_len, no id.
IDS = [[5, 6, 7, 8], [5] * 70, [5, 6, 7], [5, 6, 7], [9, 9]]
MASKS = [[0, 0, 1, 1], [0] * 10 + [1] * 60, [0, 0, 0], [0, 0, 1], [1, 1]]


@pytest.mark.parametrize("layout", ["save_to_disk", "parquet file", "parquet directory"])
def test_rows_of_speculators_are_imported(prepare, tmp_path, layout, file, rows_of):
    rows = table(input_ids=IDS, loss_mask=MASKS, seq_len=[len(ids) for ids in IDS])
    source = tmp_path / ("rows.parquet" if layout == "parquet file" else "rows")
    if layout == "save_to_disk":
        source.mkdir()
        with pa.ipc.new_stream(str(source / "data-00000-of-00001.arrow"), rows.schema) as writer:
            writer.write_table(rows)
        state = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}
        (source / "state.json").write_text(json.dumps(state))
    else:
        source.suffix or source.mkdir()
        pq.write_table(rows, source if source.suffix else source / "0.parquet")
    result = prepare(source)
    assert result.exit_code == 0, result.output
    imported = rows_of(tmp_path / "data")
    assert [row.input_ids for row in imported] == [IDS[0], IDS[1][:64], IDS[4]]
    assert [row.loss_mask for row in imported] == [MASKS[0], MASKS[1][:64], MASKS[4]]
    assert "1 rows cut to --max-seq-len: row 1 (70 tokens)" in result.log
    assert "1 rows left out, loss_mask is 0 throughout: row 2" in result.log
    assert "1 rows left out, no two supervised tokens in a row: row 3" in result.log
    assert "nothing in" in result.log and "says which tokenizer" in result.log


def test_rows_that_speculators_regenerated_are_imported(
    prepare, tmp_path, tiny_tokenizer, file, rows_of
):
    ids = tiny_tokenizer("def open(self):")["input_ids"]
    row = {
        "id": "c_gen0",
        "primary_id": "c",
        "input_ids": ids,
        "loss_mask": [0] + [1] * (len(ids) - 1),
        "text": tiny_tokenizer.decode(ids, skip_special_tokens=False),
        "metadata": {"idx": 0},
    }
    assert prepare(file("rows.jsonl", row)).exit_code == 0
    (imported,) = rows_of(tmp_path / "data")
    assert (imported.id, imported.input_ids) == ("c_gen0", ids)


def test_our_own_rows_of_another_tokenizer_are_refused(
    prepare, tmp_path, tiny_target_dir, file, rows_of, texts
):
    assert prepare(file("p.txt", *texts), out="mine").exit_code == 0
    again = prepare(tmp_path / "mine", out="again")
    assert again.exit_code == 0, again.output
    assert rows_of(tmp_path / "again") == rows_of(tmp_path / "mine")
    about = json.loads((tmp_path / "mine" / "meta.json").read_text())
    write_completions(
        tmp_path / "other", rows_of(tmp_path / "mine"), {**about, "tokenizer_sha256": "0" * 64}
    )
    result = prepare(tmp_path / "other", out="refused")
    assert (result.exit_code, "another tokenizer's" in result.log) == (1, True)
    assert not (tmp_path / "refused").exists()

"""Tokenized completions on disk: what is written, what is read, what is refused."""

import itertools
import json

import numpy as np
import pyarrow as pa
import pytest

from dflash.data.completions import SCHEMA, Completion, Completions, write_completions
from dflash.errors import DataError


def completion(name, prompt, written):
    """`prompt` and `written` are token ids; the written ones are supervised."""
    mask = [0] * len(prompt) + [1] * len(written)
    return Completion(name, "unit", [*prompt, *written], mask)


ROWS = [completion("a", [5, 6], [7, 8, 9]), completion("b", [], [3]), completion("c", [1] * 4, [2])]


@pytest.fixture
def written(tmp_path):
    write_completions(tmp_path / "data", ROWS, {"target": "tiny"})
    return tmp_path / "data"


def save(directory, *files, names=None):
    """A directory as `save_to_disk` leaves it: each file is a list of tables, one batch each."""
    directory.mkdir()
    entries = []
    for i, tables in enumerate(files):
        name = f"data-{i:05d}-of-{len(files):05d}.arrow"
        entries.append({"filename": name})
        with pa.ipc.new_stream(str(directory / name), tables[0].schema) as writer:
            for table in tables:
                writer.write_table(table)
    (directory / "state.json").write_text(json.dumps({"_data_files": entries}))
    return directory


def table(ids, masks, **columns):
    lists = {
        "input_ids": pa.array(ids, pa.list_(pa.int32())),
        "loss_mask": pa.array(masks, pa.list_(pa.int8())),
    }
    return pa.table({**lists, **columns})


def random_table(random, rows):
    lengths = random.integers(0, 9, rows)
    masks = [random.integers(0, 2, n).tolist() for n in lengths]
    return table([random.integers(0, 50, n).tolist() for n in lengths], masks)


def test_what_is_written_is_read_back(written):
    data = Completions(written)
    assert len(data) == 3
    assert data.lengths.tolist() == [5, 1, 5]
    assert [data.completion(row) for row in range(3)] == ROWS
    ids, mask = data.tokens(0)
    assert (ids.dtype, mask.dtype) == (np.int64, np.bool_)
    assert (ids.tolist(), mask.tolist()) == ([5, 6, 7, 8, 9], [False, False, True, True, True])


def test_the_prompt_ends_where_supervision_begins():
    assert [row.prompt_length for row in ROWS] == [2, 0, 4]


def test_the_directory_is_what_load_from_disk_expects(written):
    # datasets 4: load_from_disk reads these keys and Arrow's stream format.
    state = json.loads((written / "state.json").read_text())
    assert set(state) == {
        "_data_files",
        "_fingerprint",
        "_format_columns",
        "_format_kwargs",
        "_format_type",
        "_output_all_columns",
        "_split",
    }
    assert state["_data_files"] == [{"filename": "data-00000-of-00001.arrow"}]
    assert isinstance(json.loads((written / "dataset_info.json").read_text()), dict)
    assert json.loads((written / "meta.json").read_text()) == {"target": "tiny"}
    read = pa.ipc.open_stream(str(written / "data-00000-of-00001.arrow")).read_all()
    assert read.schema == SCHEMA
    assert read["seq_len"].to_pylist() == [5, 1, 5]
    assert str(read.schema.field("input_ids").type) == "list<item: int32>"
    assert str(read.schema.field("loss_mask").type) == "list<item: int8>"


def test_a_directory_that_exists_is_not_written_over(written):
    before = (written / "meta.json").read_text()
    with pytest.raises(DataError, match="exists already"):
        write_completions(written, ROWS[:1], {})
    assert (written / "meta.json").read_text() == before


def test_a_failed_write_leaves_no_directory(tmp_path):
    with pytest.raises(TypeError):
        write_completions(tmp_path / "data", ROWS, {"target": object()})
    assert not (tmp_path / "data").exists()
    write_completions(tmp_path / "data", ROWS, {})
    assert len(Completions(tmp_path / "data")) == 3


def test_several_files_of_several_batches_are_one_table(tmp_path):
    random = np.random.default_rng(0)
    tables = [random_table(random, rows) for rows in (3, 0, 5, 2)]
    data = Completions(save(tmp_path / "data", tables[:3], tables[3:]))
    rows = [row for t in tables for row in t["input_ids"].to_pylist()]
    assert [data.tokens(i)[0].tolist() for i in range(len(data))] == rows
    assert data.lengths.tolist() == [len(row) for row in rows]


def test_rows_without_an_id_are_called_by_their_number(tmp_path):
    data = Completions(save(tmp_path / "data", [table([[1, 2]] * 2, [[1, 1]] * 2)]))
    assert [data.completion(i).id for i in range(2)] == ["0", "1"]
    assert data.completion(1).source == ""


@pytest.mark.parametrize("limit", [1, 2, 4, 100])
def test_anchor_counts_equal_a_loop(tmp_path, limit):
    random = np.random.default_rng(1)
    tables = [random_table(random, rows) for rows in (20, 0, 7, 1)]
    data = Completions(save(tmp_path / "data", tables[:2], tables[2:]))
    expected = []
    for i in range(len(data)):
        mask = data.tokens(i)[1][:limit]
        expected.append(sum(bool(a and b) for a, b in itertools.pairwise(mask)))
    assert data.anchor_counts(limit).tolist() == expected


def test_an_empty_table_has_no_rows(tmp_path):
    data = Completions(save(tmp_path / "data", [table([], [])]))
    assert len(data) == 0
    assert data.anchor_counts(10).tolist() == []


def test_a_bool_loss_mask_is_read_as_well(tmp_path):
    masks = pa.array([[False, True, True], [True]], pa.list_(pa.bool_()))
    bare = table([[1, 2, 3], [4]], [[], []]).drop_columns(["loss_mask"])
    data = Completions(save(tmp_path / "data", [bare.append_column("loss_mask", masks)]))
    assert data.tokens(0)[1].tolist() == [False, True, True]
    assert data.anchor_counts(10).tolist() == [1, 0]


def test_a_directory_without_a_state_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no state\.json") as caught:
        Completions(tmp_path)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("state", ["{", "{}", "[]", '{"_data_files": [{}]}', '{"_data_files": []}'])
def test_a_state_that_says_nothing_is_refused(tmp_path, state):
    (tmp_path / "state.json").write_text(state)
    with pytest.raises(DataError, match=r"state\.json"):
        Completions(tmp_path)


def test_a_truncated_file_is_refused(written):
    path = written / "data-00000-of-00001.arrow"
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(DataError, match="cannot read as Arrow") as caught:
        Completions(written)
    assert "truncated" in caught.value.remedy


def test_a_missing_file_is_refused(written):
    (written / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(DataError, match=r"cannot read as Arrow.*No such file"):
        Completions(written)


@pytest.mark.parametrize("column", ["input_ids", "loss_mask"])
def test_a_missing_column_is_named(tmp_path, column):
    without = table([[1]], [[1]]).drop_columns([column])
    with pytest.raises(DataError, match=f"no column '{column}'; found"):
        Completions(save(tmp_path / "data", [without]))


def test_a_row_whose_columns_disagree_is_named(tmp_path):
    first, second = table([[1]], [[1]]), table([[1, 2], [1, 2, 3]], [[1, 1], [1]])
    with pytest.raises(DataError, match="row 2 has 3 input_ids but 1 loss_mask entries"):
        Completions(save(tmp_path / "data", [first], [second]))


@pytest.mark.parametrize("column", ["input_ids", "loss_mask"])
def test_a_row_with_gaps_is_named(tmp_path, column):
    lists = {"input_ids": [[1, 2], [3, 4]], "loss_mask": [[1, 1], [1, 1]]}
    whole = table(*lists.values())
    lists[column] = [[1], [1, None], [1, 1]]
    other = "loss_mask" if column == "input_ids" else "input_ids"
    lists[other] = [[1], [1, 1], [1, 1]]
    gaps = table(*(lists[name] for name in ("input_ids", "loss_mask")))
    with pytest.raises(DataError, match=rf"row 3 has {column} with gaps \(1 missing in all\)"):
        Completions(save(tmp_path / "data", [whole], [gaps]))


def test_the_first_answer_ends_where_the_target_stops_writing():
    chat = Completion("0", "", range(12), [0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1])
    assert list(chat.first_answer().input_ids) == [0, 1, 2, 3, 4]
    assert chat.first_answer().loss_mask == [0, 0, 1, 1, 1]
    assert ROWS[0].first_answer() == ROWS[0]
    prompt = completion("d", [1, 2, 3], [])
    assert prompt.first_answer() == prompt
    assert list(chat.cut(3).input_ids) == [0, 1, 2]


def test_completions_that_were_sampled_say_so(tmp_path, written):
    assert Completions(written).sampled() == ""
    write_completions(tmp_path / "hot", ROWS, {"generation": {"temperature": 0.7}})
    assert "was sampled at temperature 0.7" in Completions(tmp_path / "hot").sampled()


@pytest.mark.parametrize(
    "generation", [None, "greedy", [0.7], {}, {"temperature": 0}, {"temperature": "0.7"}]
)
def test_what_others_say_of_their_generation_is_no_error(tmp_path, generation):
    write_completions(tmp_path / "data", ROWS, {"generation": generation})
    assert Completions(tmp_path / "data").sampled() == ""


@pytest.mark.parametrize("bad", [-1, 10, 4000])
@pytest.mark.parametrize("place", [(0, 0), (2, 1), (3, 0), (4, 2)])
def test_a_token_that_the_target_lacks_is_named_with_its_row(tmp_path, bad, place):
    ids = [[9, 1, 2], [], [0, 9, 3], [4], [9, 9, 9]]
    row, position = place
    ids[row][position] = bad
    masks = [[1] * len(row) for row in ids]
    tables = [table(ids[:2], masks[:2]), table(ids[2:4], masks[2:4]), table(ids[4:], masks[4:])]
    data = Completions(save(tmp_path / "data", tables[:2], tables[2:]))
    with pytest.raises(DataError, match=f"row {row} has token id {bad}, .* ends at 9"):
        data.check_vocabulary(10)
    data.check_vocabulary(5000) if bad > 0 else None

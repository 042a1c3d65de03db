"""Prompts and conversations: what is written for them, what is counted, what is refused."""

import json

import pytest
import torch

from dflash.data.completions import Completions
from dflash.data.generate import meta
from dflash.data.regenerate import Prompter, Writer

LENGTH = 12


def test_text_prompts_are_answered_through_the_chat_template(
    prepare, tmp_path, tiny_tokenizer, tiny_target_dir, file, rows_of, texts
):
    source = file("prompts.txt", *texts)
    result = prepare(source, "--batch-size", 2)
    assert result.exit_code == 0, result.output
    rows = rows_of(tmp_path / "data")
    assert [row.id for row in rows] == ["1", "2", "3"]
    for text, row in zip(texts, rows, strict=True):
        said = tiny_tokenizer.decode(row.input_ids[: row.prompt_length])
        assert said == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        assert 1 < sum(row.loss_mask) <= LENGTH
    about = json.loads((tmp_path / "data" / "meta.json").read_text())
    assert about["tokenizer_sha256"] == meta(tiny_target_dir)["tokenizer_sha256"]
    assert about["generation"]["chat_template"] is True
    assert about["generation"]["temperature"] == 0.0
    assert about["source"]["name"] == "prompts.txt"
    assert about["counts"] == {"rows": 3}
    assert about["software"]["torch"]
    assert "3 prompts done" in result.log
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_without_the_template_a_prompt_is_continued_as_it_stands(
    prepare, tmp_path, tiny_tokenizer, file, rows_of, texts
):
    assert prepare(file("p.txt", *texts), "--no-chat-template").exit_code == 0
    for text, row in zip(texts, rows_of(tmp_path / "data"), strict=True):
        assert row.input_ids[: row.prompt_length] == tiny_tokenizer(text)["input_ids"]


CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "open a file"},
    {"role": "assistant", "content": "NOT THE TARGET'S"},
    {"role": "user", "content": "now close it"},
]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": CHAT, "id": "chat"},
        {"conversations": CHAT, "id": "chat"},
        {
            "conversations": [
                {
                    "from": {"user": "human", "assistant": "gpt"}.get(m["role"], m["role"]),
                    "value": m["content"],
                }
                for m in CHAT
            ],
            "id": "chat",
        },
    ],
    ids=["messages", "conversations", "from/value"],
)
def test_every_turn_of_a_conversation_is_written_anew(
    prepare, tmp_path, tiny_tokenizer, row, file, rows_of
):
    source = file("chat.jsonl", row, {"prompt": "import os", "id": "one"})
    result = prepare(source, "--max-seq-len", 200)
    assert result.exit_code == 0, result.output
    first, second, single = rows_of(tmp_path / "data")
    assert [first.id, second.id, single.id] == ["chat/0", "chat/1", "one"]
    said = tiny_tokenizer.decode(second.input_ids[: second.prompt_length])
    assert "be brief" in said and "now close it" in said
    assert "NOT THE TARGET'S" not in said
    written = first.input_ids[first.prompt_length :]
    assert tiny_tokenizer.decode(written, skip_special_tokens=True) in said


def test_drawn_text_depends_on_the_seed_and_on_nothing_else(
    prepare, tmp_path, file, rows_of, texts
):
    source = file("p.txt", *texts)
    options = ("--temperature", 1.0, "--top-p", 0.9, "--batch-size", 2)
    for out, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert prepare(source, *options, "--seed", seed, out=out).exit_code == 0
    a, b, c = (rows_of(tmp_path / out) for out in "abc")
    assert a == b != c


@pytest.fixture
def small_gpu(monkeypatch):
    """A function: from now on so many conversations at once are too many; a list of the tries."""
    write, tries = Writer.write, []

    def make(most):
        def writes(self, batch, first):
            tries.append(len(batch))
            if len(batch) > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB.")
            return write(self, batch, first)

        monkeypatch.setattr(Writer, "write", writes)
        return tries

    return make


def test_a_batch_that_the_memory_does_not_hold_is_written_in_parts(
    prepare, tmp_path, file, rows_of, texts, small_gpu
):
    source = file("p.txt", *texts, *texts, "def a():")
    assert prepare(source, "--batch-size", 5, out="whole").exit_code == 0
    tries = small_gpu(2)
    result = prepare(source, "--batch-size", 5)
    assert result.exit_code == 0
    assert tries == [5, 3, 2, 2, 1, 2]
    assert "does not hold 3 prompts at once: 2 from here on" in result.log
    assert rows_of(tmp_path / "data") == rows_of(tmp_path / "whole")


def test_equal_prompts_in_parts_of_a_batch_get_different_draws(
    prepare, tmp_path, file, rows_of, texts, small_gpu
):
    small_gpu(1)
    source = file("p.txt", *["def open_file(self):"] * 4)
    assert prepare(source, "--temperature", 2.0, "--batch-size", 4).exit_code == 0
    assert len({tuple(row.input_ids) for row in rows_of(tmp_path / "data")}) == 4


def test_memory_that_does_not_hold_one_prompt_is_said(prepare, tmp_path, file, texts, small_gpu):
    small_gpu(0)
    result = prepare(file("p.txt", *texts))
    assert result.exit_code == 1
    assert "--device cpu: its memory is full: CUDA out of memory" in result.log
    assert "Lower --max-new-tokens" in result.log
    assert [path.name for path in tmp_path.iterdir()] == ["p.txt"]


def test_what_cannot_be_answered_is_counted_with_its_lines(prepare, tmp_path, file):
    source = file("p.txt", "import os", "", "x " * 60, "class Path:", "  ")
    result = prepare(source, "--no-chat-template")
    assert result.exit_code == 0
    assert len(Completions(tmp_path / "data")) == 2
    assert "2 lines left out, without a user's text: line 2, line 5" in result.log
    assert "1 lines left out, prompt + --max-new-tokens is past --max-seq-len: line 3" in result.log


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("p.txt", b"", "no line in it"),
        ("p.jsonl", b"", "no line in it"),
        ("p.txt", b"fine\n\xff\xfe\n", "line 2 is not UTF-8"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": "b"', "line 2 is cut off or not JSON"),
        ("p.jsonl", b"[1]\n", "line 1 is a JSON list, not an object"),
        ("p.jsonl", b'{"text": "a"}\n', "line 1 has none of messages, conversations, prompt"),
        ("p.jsonl", b'{"messages": ["a"]}\n', "line 1 messages must be a text or a list"),
        ("p.jsonl", b'{"messages": [{"role": "user"}]}\n', "a user message has no text but None"),
        ("p.parquet", b"PAR1 no", "cannot read as Parquet"),
        ("p.jsonl", b'{"input_ids": [1, 2], "loss_mask": [1]}\n', "2 input_ids but 1 loss_mask"),
        ("p.jsonl", b'{"input_ids": "1 2", "loss_mask": [1]}\n', "must be a list of integers"),
        ("p.jsonl", b'{"input_ids": [1, 4000], "loss_mask": [1, 1]}\n', "line 1 has token id 4000"),
        (
            "p.jsonl",
            b'{"input_ids": [7], "loss_mask": [1]}\n',
            "not one of its rows can be trained",
        ),
        (
            "p.jsonl",
            b'{"input_ids": [70, 71], "loss_mask": [1, 1], "text": "something else"}\n',
            "but its text is 'something else'",
        ),
    ],
)
def test_a_foreign_or_broken_file_is_refused_and_nothing_is_left(
    prepare, tmp_path, name, content, says
):
    (tmp_path / name).write_bytes(content)
    result = prepare(tmp_path / name)
    assert result.exit_code == 1
    assert says in result.log
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_directory_that_exists_is_refused_before_anything_is_loaded(prepare, tmp_path, file):
    (tmp_path / "data").mkdir()
    result = prepare(file("p.txt", "a"))
    assert (result.exit_code, "exists already" in result.log) == (1, True)


def test_a_prompt_fits_if_a_whole_completion_does():
    prompter = Prompter(None, False, max_new_tokens=10, max_seq_len=16)
    assert [prompter.fits(range(n)) for n in (5, 6, 7)] == [True, True, False]

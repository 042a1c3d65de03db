"""Prompts from text, JSONL and tokenized completions."""

import json
from pathlib import Path

import pytest

from dflash.data.completions import Completion, write_completions
from dflash.errors import DataError
from dflash.promptsets import prompt_ids, read_prompts

TARGET = Path(__file__).parent / "fixtures" / "tiny-qwen3"


def read(path, tokenizer, limit=None, raw=False):
    return read_prompts(path, tokenizer, TARGET, 2048, limit=limit, raw=raw)


def texts(found, tokenizer):
    return [tokenizer.decode(one.input_ids) for one in found.documents]


def test_a_line_of_text_is_a_prompt(tmp_path, tiny_tokenizer):
    path = tmp_path / "code.txt"
    path.write_text("import os\n\ndef f(x):\nclass A:\n")
    found = read(path, tiny_tokenizer, raw=True)
    assert found.name == "code"
    assert texts(found, tiny_tokenizer) == ["import os", "def f(x):", "class A:"]
    assert [one.id for one in found.documents] == ["1", "3", "4"]
    assert all(one.prompt_length == len(one.input_ids) for one in found.documents)
    assert len(read(path, tiny_tokenizer, limit=2).documents) == 2


def test_text_goes_under_the_chat_template_unless_raw(tiny_tokenizer):
    asked = prompt_ids(tiny_tokenizer, "hello", raw=False)
    assert asked == prompt_ids(tiny_tokenizer, [{"role": "user", "content": "hello"}], raw=False)
    assert "<|im_start|>" in tiny_tokenizer.decode(asked)
    assert tiny_tokenizer.decode(prompt_ids(tiny_tokenizer, "hello", raw=True)) == "hello"


@pytest.mark.parametrize("key", ["conversations", "messages"])
def test_a_chat_is_cut_after_the_users_last_turn(tmp_path, tiny_tokenizer, key):
    turns = [("user", "one"), ("assistant", "two"), ("user", "three"), ("assistant", "four")]
    chat = [{"role": role, "content": text} for role, text in turns]
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({key: chat}) + "\n" + json.dumps({"prompt": "five"}) + "\n")
    first, second = texts(read(path, tiny_tokenizer), tiny_tokenizer)
    assert "three" in first
    assert "four" not in first
    assert "five" in second


@pytest.mark.parametrize(
    ("row", "raw", "expected"),
    [
        ({"prompt": "one", "messages": []}, True, "one"),
        ({"prompt": "one", "messages": [{"role": "user", "content": "two"}]}, True, "one"),
        ({"prompt": "one", "messages": [{"role": "user", "content": "two"}]}, False, "two"),
    ],
)
def test_a_row_may_have_its_prompt_twice(tmp_path, tiny_tokenizer, row, raw, expected):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps(row) + "\n")
    (one,) = read(path, tiny_tokenizer, raw=raw).documents
    assert list(one.input_ids) == prompt_ids(tiny_tokenizer, expected, raw=raw)


@pytest.mark.parametrize("messages", [[], [{"role": "system", "content": "x"}]])
def test_rows_in_which_nobody_asks_are_left_out(tmp_path, tiny_tokenizer, messages):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"messages": messages}) + "\n" + '{"prompt": "one"}\n')
    assert [one.id for one in read(path, tiny_tokenizer).documents] == ["2"]


@pytest.mark.parametrize("prompt", [[("role", "content")], [("from", "value")]])
def test_a_prompt_may_be_messages_of_either_form(tmp_path, tiny_tokenizer, prompt):
    ((role, content),) = prompt
    path = tmp_path / "chats.JSONL"
    path.write_text(json.dumps({"prompt": [{role: "user", content: "six"}]}) + "\n")
    assert texts(read(path, tiny_tokenizer), tiny_tokenizer) == [
        tiny_tokenizer.decode(prompt_ids(tiny_tokenizer, "six", raw=False))
    ]


def test_lines_end_where_editors_end_them(tmp_path, tiny_tokenizer):
    (tmp_path / "a.jsonl").write_text('{"prompt": "one\u2028two"}\n')
    (tmp_path / "a.txt").write_text("one\x0ctwo\nthree\n")
    assert len(read(tmp_path / "a.jsonl", tiny_tokenizer).documents) == 1
    assert len(read(tmp_path / "a.txt", tiny_tokenizer).documents) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "is cut off or not JSON"),
        ("[]", "is a JSON list, not an object"),
        ("3", "is a JSON int, not an object"),
        ('{"text": "x"}', "must be one of .*prompt"),
        ('{"messages": [3]}', "must be one of .*prompt"),
    ],
)
def test_a_line_that_is_no_prompt_is_named(tmp_path, tiny_tokenizer, line, message):
    path = tmp_path / "chats.jsonl"
    path.write_text(json.dumps({"prompt": "x"}) + "\n" + line + "\n")
    with pytest.raises(DataError, match=rf"chats\.jsonl: line 2 {message}"):
        read(path, tiny_tokenizer)


def test_completions_are_prompts_with_their_text(tmp_path, tiny_tokenizer):
    done = Completion("a", "s", [5, 6, 7, 8], [0, 0, 1, 1])
    write_completions(tmp_path / "data", [done], {})
    (one,) = read(tmp_path / "data", tiny_tokenizer).documents
    assert one == done
    assert one.prompt_length == 2


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([5, 6, 7], [1, 1, 1], "row 'a' starts without a prompt"),
        ([5, 2048], [0, 1], "the target's vocabulary ends at 2047"),
    ],
)
def test_completions_that_cannot_be_prompts(tmp_path, tiny_tokenizer, ids, mask, message):
    write_completions(tmp_path / "data", [Completion("a", "s", ids, mask)], {})
    with pytest.raises(DataError, match=message):
        read(tmp_path / "data", tiny_tokenizer)


def test_an_empty_file_and_one_that_is_not_text(tmp_path, tiny_tokenizer):
    (tmp_path / "a.txt").write_text("\n\n")
    with pytest.raises(DataError, match="no prompt in it"):
        read(tmp_path / "a.txt", tiny_tokenizer)
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="line 1 is not UTF-8"):
        read(tmp_path / "b.txt", tiny_tokenizer)
    (tmp_path / "c.json").write_text("[]")
    with pytest.raises(DataError, match="is neither text nor JSONL"):
        read(tmp_path / "c.json", tiny_tokenizer)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read(tmp_path / "d.txt", tiny_tokenizer)


def test_messages_that_the_template_refuses_are_told(tiny_tokenizer, monkeypatch):
    refuses = "{{ raise_exception('System role not supported') }}"
    monkeypatch.setattr(tiny_tokenizer, "chat_template", refuses)
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    with pytest.raises(DataError, match=r"messages of system, user, .* 'hello': System role not"):
        prompt_ids(tiny_tokenizer, messages, raw=False)


@pytest.mark.parametrize(("prompt", "message"), [("", "is empty"), ("a\udcff", "is not UTF-8")])
def test_a_prompt_without_a_token_or_that_is_no_text_is_refused(tiny_tokenizer, prompt, message):
    with pytest.raises(DataError, match=message):
        prompt_ids(tiny_tokenizer, prompt, raw=True)

"""Completions by the target: greedy, ids kept, ends kept, batches that change nothing."""

import json

import pytest
import torch
from transformers import GenerationConfig

from dflash.data.generate import chat_prompt, eos_token_ids, generate, meta

TEXTS = ("def main(argv):\n", "x", "class Path:\n    def exists(self):\n        ")


@pytest.fixture(scope="module")
def prompts(tiny_tokenizer):
    return [(f"p{i}", tiny_tokenizer(text)["input_ids"]) for i, text in enumerate(TEXTS)]


@pytest.fixture
def end_with(tiny_model, monkeypatch):
    """A function that makes the given tokens end a text."""
    return lambda ids: monkeypatch.setattr(tiny_model.generation_config, "eos_token_id", ids)


def written_by(model, tokenizer, prompts, max_new_tokens=16, batch_size=2):
    return list(
        generate(
            model,
            tokenizer,
            prompts,
            source="unit",
            max_new_tokens=max_new_tokens,
            batch_size=batch_size,
        )
    )


@torch.no_grad()
def greedy(model, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def free(tiny_model, prompts):
    """16 tokens after each prompt, one at a time: the oracle."""
    return [greedy(tiny_model, prompt, 16) for _, prompt in prompts]


def written_part(done):
    return done.input_ids[done.prompt_length :]


def test_completions_are_the_targets_greedy_text(tiny_model, tiny_tokenizer, prompts, free):
    done = written_by(tiny_model, tiny_tokenizer, prompts)
    assert [(c.id, c.source) for c in done] == [(name, "unit") for name, _ in prompts]
    for (_, prompt), text, one in zip(prompts, free, done, strict=True):
        assert one.input_ids == [*prompt, *text]
        assert one.loss_mask == [0] * len(prompt) + [1] * 16


def test_ragged_prompts_give_what_each_gives_alone(tiny_model, tiny_tokenizer, prompts):
    assert len({len(prompt) for _, prompt in prompts}) == 3
    together = written_by(tiny_model, tiny_tokenizer, prompts, batch_size=3)
    assert together == written_by(tiny_model, tiny_tokenizer, prompts, batch_size=1)


def test_a_hybrid_target_is_not_changed_by_padding_either(hybrid_model, tiny_tokenizer):
    prompts = [("a", [5, 6, 7, 8, 9, 10]), ("b", [11]), ("c", [12, 13, 14])]
    together = written_by(hybrid_model, tiny_tokenizer, prompts, batch_size=3)
    assert together == written_by(hybrid_model, tiny_tokenizer, prompts, batch_size=1)


def test_the_end_is_kept_and_supervised_and_padding_is_cut(
    tiny_model, tiny_tokenizer, prompts, free, end_with
):
    end = free[0][4]
    end_with([end, 2047])
    done = written_by(tiny_model, tiny_tokenizer, prompts, batch_size=3)
    for text, one in zip(free, done, strict=True):
        expected = text[: text.index(end) + 1] if end in text else text
        assert written_part(one) == expected
        assert sum(one.loss_mask) == len(expected)
    assert written_part(done[0])[-1] == end
    assert len({len(written_part(one)) for one in done}) > 1


def test_an_end_at_once_is_a_completion_of_one_token(
    tiny_model, tiny_tokenizer, prompts, free, end_with
):
    end = free[0][0]
    end_with(end)
    (done,) = written_by(tiny_model, tiny_tokenizer, prompts[:1])
    assert written_part(done) == [end]


def test_an_end_token_in_the_prompt_ends_nothing(
    tiny_model, tiny_tokenizer, prompts, free, end_with
):
    end_with(prompts[0][1][0])
    (done,) = written_by(tiny_model, tiny_tokenizer, prompts[:1], max_new_tokens=4)
    assert written_part(done) == free[0][:4]


@pytest.mark.parametrize(
    "setting",
    [
        {"repetition_penalty": 5.0},
        {"no_repeat_ngram_size": 1},
        {"do_sample": True, "temperature": 5.0},
        {"num_beams": 3},
        {"min_new_tokens": 16},
        {"suppress_tokens": list(range(1000))},
    ],
)
def test_the_models_own_generation_settings_do_not_bend_the_text(
    tiny_model, tiny_tokenizer, prompts, free, monkeypatch, setting
):
    """Replay takes the text for the target's argmax; Qwen2.5 ships a repetition penalty."""
    settings = GenerationConfig(eos_token_id=[2], **setting)
    monkeypatch.setattr(tiny_model, "generation_config", settings)
    done = written_by(tiny_model, tiny_tokenizer, prompts, batch_size=3)
    assert [written_part(one) for one in done] == free


def test_every_end_token_counts(tiny_model, tiny_tokenizer, end_with):
    end_with([2, 5])
    assert eos_token_ids(tiny_model, tiny_tokenizer) == [2, 5]
    end_with(7)
    assert eos_token_ids(tiny_model, tiny_tokenizer) == [7]
    end_with(None)
    assert eos_token_ids(tiny_model, tiny_tokenizer) == [tiny_tokenizer.eos_token_id]


def test_a_chat_prompt_ends_where_the_assistant_begins(tiny_tokenizer):
    ids = chat_prompt(tiny_tokenizer, "sort a list")
    assert all(isinstance(i, int) for i in ids)
    text = tiny_tokenizer.decode(ids)
    assert "sort a list" in text
    assert text.rstrip().endswith("assistant")
    assert ids.count(tiny_tokenizer.convert_tokens_to_ids("<|im_start|>")) == 2


def test_meta_names_the_target_and_its_tokenizer(tiny_target_dir, tmp_path):
    about = meta(tiny_target_dir, max_new_tokens=16)
    assert about["target"] == "tiny-qwen3"
    assert len(about["tokenizer_sha256"]) == 64
    assert about["generation"] == {"max_new_tokens": 16}
    assert json.dumps(about)
    assert meta(tmp_path)["tokenizer_sha256"] is None

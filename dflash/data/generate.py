"""Completions written by the target itself: greedy, batched, ids kept as generated."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from dflash.data.completions import Completion


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends a text, by the model's generation config or else by its tokenizer."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = tokenizer.eos_token_id
    return [ids] if isinstance(ids, int) else list(ids or [])


def chat_prompt(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of a user's message under the chat template, up to the assistant's turn."""
    return chat_ids(tokenizer, [{"role": "user", "content": text}])


def chat_ids(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]]) -> list[int]:
    """Token ids of a chat under the chat template, up to the assistant's next turn."""
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[tuple[str, list[int]]],
    *,
    source: str,
    max_new_tokens: int,
    batch_size: int,
) -> Iterator[Completion]:
    """Greedy completions of (id, token ids) prompts, in order, as they are done.

    The end-of-sequence token is kept and supervised; what a batch pads after it is cut.
    """
    ends = eos_token_ids(model, tokenizer)
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        rows = _generate_batch(model, [ids for _, ids in batch], ends, max_new_tokens)
        for (name, prompt), written in zip(batch, rows, strict=True):
            yield Completion(
                id=name,
                source=source,
                input_ids=[*prompt, *written],
                loss_mask=[0] * len(prompt) + [1] * len(written),
            )


@torch.no_grad()
def _generate_batch(
    model: PreTrainedModel, prompts: list[list[int]], ends: list[int], max_new_tokens: int
) -> Iterator[list[int]]:
    longest = max(map(len, prompts))
    pad = ends[0] if ends else 0
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
    greedy = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=pad,
    )
    with _own_settings_put_aside(model):
        out: torch.Tensor = model.generate(  # type: ignore[operator]  # a mixin mypy takes for a Tensor
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=greedy,
        )
    for row in out[:, longest:].tolist():
        stop = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        yield row[:stop]


@contextmanager
def _own_settings_put_aside(model: PreTrainedModel) -> Iterator[None]:
    """Within, `generate` has no settings of the model to fill gaps from.

    They bend the argmax (Qwen2.5 ships a repetition penalty), and replay takes what is written
    here for the target's argmax.
    """
    own, model.generation_config = model.generation_config, GenerationConfig()
    try:
        yield
    finally:
        model.generation_config = own


def meta(model_path: Path | str, **settings: Any) -> dict[str, Any]:
    """Contents of meta.json: the target, a hash of its tokenizer, how the text was generated."""
    tokenizer = Path(model_path) / "tokenizer.json"
    digest = hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.is_file() else None
    return {"target": Path(model_path).name, "tokenizer_sha256": digest, "generation": settings}

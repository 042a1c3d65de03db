"""Completions written by the target itself: batched, ids kept as generated."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from dflash.data.completions import Completion, tokenizer_digest
from dflash.errors import DataError

Message = dict[str, str]


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: temperature 0 is greedy; `seed` fixes each batch's draws."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def options(self) -> dict[str, Any]:
        """The same for `GenerationConfig`."""
        if self.temperature == 0:
            return {"do_sample": False}
        # top_k must be named: transformers would take the 50 likeliest only.
        sampled = {"temperature": self.temperature, "top_p": self.top_p, "top_k": 0}
        return {"do_sample": True, **sampled}


GREEDY = Sampling()


def eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends a text, by the model's generation config or else by its tokenizer."""
    ids = model.generation_config.eos_token_id
    if ids is None:
        ids = tokenizer.eos_token_id
    return [ids] if isinstance(ids, int) else list(ids or [])


def chat_prompt(tokenizer: PreTrainedTokenizerBase, said: str | Sequence[Message]) -> list[int]:
    """Token ids of a user's text, or of several messages, under the chat template.

    They end where the assistant's turn begins. Raises DataError where the template takes no such
    messages: many refuse a system's, or two of a user in a row.
    """
    messages = [{"role": "user", "content": said}] if isinstance(said, str) else list(said)
    try:
        rendered = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=False
        )
    except TemplateError as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise DataError(
            f"the target's chat template refuses messages of {roles}, of which the last is "
            f"{messages[-1]['content'][:40]!r}: {error}",
            remedy="Mend or delete that conversation, or give texts with --no-chat-template.",
        ) from error
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[tuple[str, list[int]]],
    *,
    source: str,
    max_new_tokens: int,
    batch_size: int,
    sampling: Sampling = GREEDY,
) -> Iterator[Completion]:
    """Completions of (id, token ids) prompts, in order, as they are done.

    The end-of-sequence token is kept and supervised; what a batch pads after it is cut.
    """
    ends = eos_token_ids(model, tokenizer)
    for start in range(0, len(prompts), batch_size):
        batch = prompts[start : start + batch_size]
        rows = _generate_batch(model, [ids for _, ids in batch], ends, max_new_tokens, sampling)
        for (name, prompt), written in zip(batch, rows, strict=True):
            yield Completion(
                id=name,
                source=source,
                input_ids=[*prompt, *written],
                loss_mask=[0] * len(prompt) + [1] * len(written),
            )


@torch.no_grad()
def _generate_batch(
    model: PreTrainedModel,
    prompts: list[list[int]],
    ends: list[int],
    max_new_tokens: int,
    sampling: Sampling,
) -> list[list[int]]:
    longest = max(map(len, prompts))
    pad = ends[0] if ends else 0
    ids = torch.tensor([[pad] * (longest - len(row)) + row for row in prompts])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in prompts])
    settings = GenerationConfig(
        max_new_tokens=max_new_tokens,
        eos_token_id=ends or None,
        pad_token_id=pad,
        **sampling.options(),
    )
    with _own_settings_put_aside(model), _own_draws(model.device, sampling.seed):
        out: torch.Tensor = model.generate(  # type: ignore[operator]  # a mixin mypy takes for a Tensor
            input_ids=ids.to(model.device),
            attention_mask=mask.to(model.device),
            generation_config=settings,
        )
    return [_until_end(row, ends) for row in out[:, longest:].tolist()]


def _until_end(row: list[int], ends: list[int]) -> list[int]:
    return row[: next((i + 1 for i, token in enumerate(row) if token in ends), len(row))]


@contextmanager
def _own_draws(device: torch.device, seed: int) -> Iterator[None]:
    """Within, the process-wide generators, all that `generate` draws from, stand at `seed`."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


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
    path = Path(model_path)
    return {
        "target": path.name,
        "tokenizer_sha256": tokenizer_digest(path),
        "generation": settings,
    }

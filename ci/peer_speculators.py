"""speculators' DFlash training step, as its own trainer makes it on one GPU."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from clock import working_dtype
from qwen3 import qwen3_config
from shapes import GAMMA, Contender, Shape
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.dflash.config import DFlashSpeculatorConfig
from speculators.models.dflash.core import DFlashDraftModel
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.optimizers import build_optimizers

VERIFIER = Path(__file__).parents[1] / "tests" / "fixtures" / "tiny-qwen3"
"""It reads the family of the target's final norm from a config; every Qwen3 is alike."""


def contender(shape: Shape, device: torch.device, name: str) -> Contender:
    """DFlashDraftModel as speculators' Trainer runs it: float32 weights under autocast.

    `speculators`: its defaults, Muon for matrices and D-PACE weights. `speculators-adamw`: AdamW
    and the paper's weights, as the others have.
    """
    recipe = name == "speculators"
    gpu = device.type == "cuda"
    model = draft_model(shape, device, attention=None if gpu else "eager")
    optimizers = build_optimizers(model, _Optimizer(recipe))
    losses = cross_entropy(fused=gpu)
    tokens = torch.randint(0, shape.vocabulary - 1, (1, shape.context_tokens), device=device)
    dtype = working_dtype(device)
    features = torch.randn(*tokens.shape, shape.captured * shape.hidden, device=device, dtype=dtype)
    last = features[..., : shape.hidden].contiguous()
    where = torch.arange(shape.context_tokens, device=device)[None]
    mask = torch.ones_like(tokens)

    def step() -> None:
        with torch.autocast("cuda", dtype) if gpu else nullcontext():
            _, loss, _ = model(
                hidden_states=features,
                input_ids=tokens,
                loss_mask=mask,
                verifier_last_hidden_states=last,
                document_ids=where // shape.tokens,
                position_ids=where % shape.tokens,
                loss_config=losses,
                gamma=GAMMA,
                max_anchors=shape.documents * shape.anchors,
                per_position_loss_weight="dpace" if recipe else "fixed-exp-decay",
            )
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()

    weights = "D-PACE" if recipe else "CE"
    return Contender(
        step,
        f"{weights}; float32 weights, embeddings and heads, autocast to {dtype}; "
        f"{'the whole forward compiled, FlexAttention, fused loss' if gpu else 'eager'}; "
        f"{' + '.join(type(optimizer).__name__ for optimizer in optimizers)}, not fused; the "
        "target's logits are made too, as labels; all logits kept; anchors drawn in the step, one "
        "draw over all documents",
    )


def cross_entropy(*, fused: bool) -> Any:
    """Its loss, as kernels that only a GPU runs or eager."""
    if fused:
        from speculators.losses import fused as kernels

        # The two share a list of tiles, and of the second one Dynamo of torch 2.11 refuses it:
        # "already tracked for mutation".
        kernels.loss_backward_kernel.configs = list(kernels.loss_forward_kernel.configs)
    return resolve_loss_config("ce", "fused" if fused else "eager")


class _Optimizer:
    """The part of speculators' TrainerConfig that its optimizers are built from: its defaults."""

    lr, weight_decay = 1e-3, 0.01
    muon_lr, muon_momentum, muon_weight_decay, muon_ns_steps = 1e-3, 0.95, 0.1, 5
    muon_adjust_lr_fn = "match_rms_adamw"

    def __init__(self, recipe: bool) -> None:
        self.optimizer = "muon" if recipe else "adamw"


def draft_model(shape: Shape, device: torch.device, attention: str | None) -> Any:
    """Its draft model with random tables. `attention`: None for its default, FlexAttention."""
    layer = qwen3_config(shape)
    layer._attn_implementation = attention
    config = DFlashSpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=shape.vocabulary,
        block_size=shape.block,
        aux_hidden_state_layer_ids=list(range(1, 1 + shape.captured)),
        mask_token_id=shape.vocabulary - 1,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=shape.block - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=str(VERIFIER), architectures=["Qwen3ForCausalLM"]),
        ),
    )
    with device:
        model = DFlashDraftModel(config)
    for table in (model.lm_head, model.verifier_lm_head, model.embed_tokens):
        torch.nn.init.normal_(table.weight, std=0.02)
    return model

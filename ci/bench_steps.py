"""One training step on the CPU, ours or that of speculators' model, with random weights.

    python bench_steps.py {ours,theirs} SHAPE_AS_JSON

prints its median seconds and what it adds to the process's memory. Run by bench_cpu.py.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

TARGET = Path(__file__).parents[1] / "tests" / "fixtures" / "tiny-qwen3"
REPEATS = 5


@dataclass(frozen=True)
class Shape:
    """One document of `tokens`, and a drafter over it."""

    tokens: int = 512
    anchors: int = 64
    block: int = 8
    hidden: int = 256
    layers: int = 2
    captured: int = 3
    vocabulary: int = 8192

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Token ids [T] and captured hidden states [T, F]."""
        random = torch.Generator().manual_seed(0)
        tokens_T = torch.randint(0, self.vocabulary - 1, (self.tokens,), generator=random)
        features = (self.tokens, self.captured * self.hidden)
        return tokens_T, torch.randn(features, generator=random)


def seconds(step: Callable[[], object]) -> float:
    """Median time of a step, after one that is not counted."""
    step()
    times = []
    for _ in range(REPEATS):
        started_s = time.perf_counter()
        step()
        times.append(time.perf_counter() - started_s)
    return statistics.median(times)


def reset_peak_kib() -> int:
    """Forget this process's peak memory; returns what it has now."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_kib()


def peak_kib() -> int:
    """The most memory that this process has had since."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def our_step(shape: Shape) -> Callable[[], object]:
    """Forward, loss, backward and AdamW, as a drafter thread does them."""
    from dflash.anchors import eligible_anchors, make_blocks, sample_anchors
    from dflash.asked import AskedSlots
    from dflash.drafter import build_drafter
    from dflash.gradients import Gradients
    from dflash.losses import Objective, block_losses
    from dflash.optim import apply_step, make_optimizer
    from dflash.sections import OptimizerConfig

    drafter = build_drafter(our_config(shape), seed=0, device=torch.device("cpu"))
    optimizer = make_optimizer(drafter, OptimizerConfig())
    head_VD = torch.randn(shape.vocabulary, shape.hidden) * 0.02
    tokens_T, features_TF = shape.inputs()
    document_T, position_T = torch.zeros_like(tokens_T), torch.arange(shape.tokens)
    mask_T = torch.ones_like(tokens_T, dtype=torch.bool)
    random = torch.Generator().manual_seed(0)

    def step() -> None:
        anchor_N = sample_anchors(
            eligible_anchors(mask_T, document_T),
            document_T,
            per_document=shape.anchors,
            in_all=shape.anchors,
            generator=random,
        )
        blocks = make_blocks(
            tokens_T,
            mask_T,
            document_T,
            anchor_N,
            block_size=shape.block,
            mask_token_id=shape.vocabulary - 1,
            gamma=4.0,
        )
        inputs_PD = head_VD[blocks.inputs_NB.flatten()]
        hidden_PD = drafter(inputs_PD, features_TF, document_T, position_T, anchor_N)
        main_PD, cap_PD, sums = block_losses(
            hidden_PD.detach(), head_VD, AskedSlots.of(blocks), Objective(0.0, 1.0, 0.0)
        )
        gradients = Gradients.zeros(drafter.parameters(), with_cap=False)
        gradients.add(hidden_PD, main_PD, cap_PD, list(drafter.parameters()))
        total, divisor = gradients.combined(sums, 0.0)
        apply_step(drafter, optimizer, total, divisor=divisor, lr=1e-4, clip=1.0, step=0)

    return step


def our_config(shape: Shape):
    """The drafter's configuration: heads of 64, as many for keys as for queries."""
    from dflash.drafter import DrafterConfig

    heads = shape.hidden // 64
    return DrafterConfig(
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_layers=shape.layers,
        num_heads=heads,
        num_key_value_heads=heads,
        head_dim=64,
        vocab_size=shape.vocabulary,
        rms_norm_eps=1e-6,
        rope_theta=1e4,
        max_positions=8192,
        block_size=shape.block,
        mask_token_id=shape.vocabulary - 1,
        target_layer_ids=tuple(range(1, 1 + shape.captured)),
        num_target_layers=12,
        sliding_window=0,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )


def their_step(shape: Shape) -> Callable[[], object]:
    """The same with the DFlash model of speculators, its eager cross entropy and torch's AdamW."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.dflash.config import DFlashSpeculatorConfig
    from speculators.models.dflash.core import DFlashDraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    heads = shape.hidden // 64
    layer = Qwen3Config(
        hidden_size=shape.hidden,
        intermediate_size=3 * shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=64,
        vocab_size=shape.vocabulary,
    )
    layer._attn_implementation = "eager"  # its default, flex attention, has no backward on the CPU
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
            verifier=VerifierConfig(name_or_path=str(TARGET), architectures=["Qwen3ForCausalLM"]),
        ),
    )
    model = DFlashDraftModel(config)
    for table in (model.lm_head, model.verifier_lm_head, model.embed_tokens):
        torch.nn.init.normal_(table.weight, std=0.02)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    tokens_T, features_TF = shape.inputs()
    last_TD = features_TF[:, : shape.hidden].contiguous()
    ones_1T = torch.ones(1, shape.tokens, dtype=torch.long)
    losses = resolve_loss_config("ce", "eager")

    def step() -> None:
        _, loss, _ = model(
            features_TF[None],
            tokens_T[None],
            ones_1T,
            last_TD[None],
            torch.zeros_like(ones_1T),
            loss_config=losses,
            max_anchors=shape.anchors,
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def one(who: str, shape: Shape) -> None:
    """In a process of its own: print seconds, what the steps added to the memory, the version."""
    step = our_step(shape) if who == "ours" else their_step(shape)
    before_kib = reset_peak_kib()
    found: dict = {"seconds": seconds(step)}
    found["peak_mib"] = (peak_kib() - before_kib) / 1024
    if who == "theirs":
        from importlib.metadata import version

        found["version"] = version("speculators")
    print(json.dumps(found))


if __name__ == "__main__":
    one(sys.argv[1], Shape(**json.loads(sys.argv[2])))

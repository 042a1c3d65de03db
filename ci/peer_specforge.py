"""SpecForge's DFlash training step, as its own trainer makes it on one GPU."""

import torch
from clock import working_dtype
from qwen3 import qwen3_config
from shapes import GAMMA, Contender, Shape
from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
from specforge.modeling.draft.dflash import DFlashDraftModel
from specforge.modeling.draft.dflash_kernels import load_liger_dflash_kernels
from specforge.optimizer import BF16Optimizer


def contender(shape: Shape, device: torch.device, name: str) -> Contender:
    """OnlineDFlashModel and BF16Optimizer, with the settings of SpecForge's own DFlash recipes.

    Its examples set gamma, clipping and learning rate; the rest are its defaults: FlexAttention,
    an objective that keeps no logits and makes them twice (128 anchors at once).
    """
    gpu = device.type == "cuda"
    attention = "flex_attention" if gpu else "sdpa"
    config = qwen3_config(
        shape,
        num_target_layers=36,
        block_size=shape.block,
        dflash_config={"target_layer_ids": list(range(1, 1 + shape.captured))},
    )
    config._attn_implementation = attention
    dtype = working_dtype(device)
    kernels = load_liger_dflash_kernels() if name == "specforge-liger" else None
    with device:
        draft = DFlashDraftModel(config, kernels)
        head = torch.nn.Linear(shape.hidden, shape.vocabulary, bias=False)
        embedding = torch.nn.Embedding(shape.vocabulary, shape.hidden)
    for table in (head, embedding):
        torch.nn.init.normal_(table.weight.requires_grad_(False), std=0.02)
    model = OnlineDFlashModel(
        draft,
        head,
        embedding,
        mask_token_id=shape.vocabulary - 1,
        block_size=shape.block,
        attention_backend=attention,
        num_anchors=shape.anchors,
        loss_decay_gamma=GAMMA,
    ).to(dtype)
    optimizer = BF16Optimizer(draft, lr=6e-4, max_grad_norm=1.0, total_steps=10_000)
    size = (shape.documents, shape.tokens)
    tokens = torch.randint(0, shape.vocabulary - 1, size, device=device)
    features = torch.randn(*size, shape.captured * shape.hidden, device=device, dtype=dtype)

    def step() -> None:
        loss, _, _ = model(tokens, features, torch.ones_like(tokens))
        loss.backward()
        optimizer.step()

    own = ", Liger's RMSNorm and SwiGLU" if kernels else ""
    compiled = ", the only part that is compiled, its mask made eager" if gpu else ""
    return Contender(
        step,
        f"CE; {dtype} weights with float32 masters (BF16Optimizer: AdamW, not fused); {attention}"
        f"{compiled}{own}; logits made twice, 128 anchors at once; a row per document; anchors "
        "drawn in the step, one draw per row",
    )

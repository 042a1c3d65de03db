"""Run by the Python of DFLASH_PEERS_PYTHON, which has other implementations of DFlash.

    python peer_forward.py z-lab|speculators CHECKPOINT INPUTS OUTPUT

INPUTS (safetensors): features_TF, inputs_PD, anchor_N; OUTPUT: hidden_PD.
    python peer_forward.py save-speculators OUT TARGET: a checkpoint written by speculators itself.
"""

import sys

import torch
from safetensors.torch import load_file, save_file


def load(kind, checkpoint):
    if kind == "z-lab":
        from dflash.model import DFlashDraftModel

        return DFlashDraftModel.from_pretrained(
            checkpoint, dtype=torch.float32, output_loading_info=True
        )
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig

    config = DFlashSpeculatorConfig.from_pretrained(checkpoint)
    config.transformer_layer_config._attn_implementation = "sdpa"
    return DFlashDraftModel.from_pretrained(
        checkpoint, config=config, dtype=torch.float32, output_loading_info=True
    )


def drafted(kind, model, inputs):
    """Every mask and every position is the package's own."""
    features_TF, inputs_PD, anchor_N = (
        inputs[name] for name in ("features_TF", "inputs_PD", "anchor_N")
    )
    anchors, size = anchor_N.tolist(), len(inputs_PD) // len(anchor_N)
    if kind == "z-lab":  # as it serves: one block at a time
        blocks = [
            model(
                target_hidden=features_TF[None, :anchor],
                noise_embedding=block_BD[None],
                position_ids=torch.arange(anchor + size)[None],
            )[0]
            for anchor, block_BD in zip(anchors, inputs_PD.split(size), strict=True)
        ]
        return torch.cat(blocks)
    # The part of its forward pass between the drawing of anchors and the loss.
    document_T = torch.zeros(1, len(features_TF), dtype=torch.long)
    position_P = (anchor_N[:, None] + torch.arange(size)).flatten()
    position_1K = torch.cat([torch.arange(len(features_TF)), position_P])[None]
    mask = model._create_attention_mask(document_T, len(features_TF), anchor_N, features_TF.device)
    context_TD = model.hidden_norm(model.fc(features_TF[None]))
    hidden_PD = inputs_PD[None]
    for layer in model.layers:
        hidden_PD = layer(
            hidden_states=hidden_PD,
            target_hidden=context_TD,
            attention_mask=mask,
            position_ids=position_1K,
            position_embeddings=model.rotary_emb(features_TF[None], position_1K),
            use_cache=False,
        )
    return model.norm(hidden_PD)[0]


def save_speculators(out, target):
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

    torch.manual_seed(0)
    model = DFlashDraftModel(
        DFlashSpeculatorConfig(
            transformer_layer_config=Qwen3Config(
                hidden_size=128,
                intermediate_size=96,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                vocab_size=2048,
                max_position_embeddings=1024,
                attn_implementation="sdpa",
            ),
            draft_vocab_size=2048,
            block_size=4,
            aux_hidden_state_layer_ids=[2, 4],
            mask_token_id=3,
            speculators_config=SpeculatorsConfig(
                algorithm="dflash",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=3)],
                default_proposal_method="greedy",
                verifier=VerifierConfig.from_pretrained(target),
            ),
        )
    )
    model.save_pretrained(out)


if __name__ == "__main__":
    kind, *paths = sys.argv[1:]
    if kind == "save-speculators":
        save_speculators(*paths)
    else:
        model, info = load(kind, paths[0])
        owned = {"embed_tokens", "lm_head", "verifier_lm_head", "verifier_norm"}
        missing = {name for name in info["missing_keys"] if name.split(".")[0] not in owned}
        assert not missing and not info["unexpected_keys"], info
        with torch.no_grad():
            hidden_PD = drafted(kind, model.eval(), load_file(paths[1]))
        save_file({"hidden_PD": hidden_PD.contiguous()}, paths[2])

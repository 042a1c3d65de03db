"""The frozen target: what is captured, what is skipped, and that documents do not meet."""

import json
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from dflash.anchors import Blocks
from dflash.batches import Batch, pack
from dflash.errors import ModelError
from dflash.target import Target, load_target
from dflash.target_files import load_text_config

CPU = torch.device("cpu")
LENGTHS = (3, 7, 12, 1)


def token_ids(count, vocabulary, seed=0):
    return torch.randint(vocabulary, (count,), generator=torch.Generator().manual_seed(seed))


def documents(vocabulary=2048):
    """(tokens_T, lengths) of documents of different lengths laid end to end."""
    return token_ids(sum(LENGTHS), vocabulary), LENGTHS


@pytest.fixture
def tiny(tiny_model):
    return Target(tiny_model, (1, 3))


def test_features_are_the_hidden_states_after_the_named_layers(tiny, tiny_model):
    tokens_T = token_ids(12, 2048)
    features_TF, final_TD = tiny.hidden(tokens_T, [12], final=True)
    with torch.no_grad():
        out = tiny_model(tokens_T[None], output_hidden_states=True)
    expected = torch.cat([out.hidden_states[2][0], out.hidden_states[4][0]], dim=-1)
    torch.testing.assert_close(features_TF, expected)
    torch.testing.assert_close(final_TD, out.hidden_states[-1][0])
    torch.testing.assert_close(final_TD @ tiny.head.head_VD.T, out.logits[0])


def test_the_last_layer_is_captured_before_the_final_norm(tiny_model):
    tokens_T = token_ids(9, 2048)
    features_TF, _ = Target(tiny_model, (5,)).hidden(tokens_T, [9], final=False)
    with torch.no_grad():
        after_norm_TD = tiny_model(tokens_T[None], output_hidden_states=True).hidden_states[-1][0]
    torch.testing.assert_close(tiny_model.model.norm(features_TF), after_norm_TD)
    assert (features_TF - after_norm_TD).abs().max() > 1.0


@pytest.mark.parametrize(("final", "last"), [(False, 3), (True, 5)])
def test_no_layer_runs_that_is_not_needed(tiny, final, last):
    ran = []
    watched = [*tiny.layers, tiny.model.lm_head]
    handles = [
        module.register_forward_pre_hook(lambda _module, _args, i=i: ran.append(i))
        for i, module in enumerate(watched)
    ]
    try:
        _, final_TD = tiny.hidden(token_ids(5, 2048), [5], final=final)
    finally:
        for handle in handles:
            handle.remove()
    assert ran == list(range(last + 1))
    assert (final_TD is not None) == final


def test_the_model_is_as_before_after_an_early_stop(tiny, tiny_model):
    tokens_T = token_ids(8, 2048)
    hooks = [len(layer._forward_hooks) for layer in tiny.layers]
    with torch.no_grad():
        before = tiny_model(tokens_T[None]).logits
        tiny.hidden(tokens_T, [8], final=False)
        assert tiny_model(tokens_T[None]).logits.equal(before)
    assert [len(layer._forward_hooks) for layer in tiny.layers] == hooks


def assert_together_equals_alone(target, vocabulary, **tolerance):
    tokens_T, lengths = documents(vocabulary)
    together = target.hidden(tokens_T, lengths, final=True)
    alone = [target.hidden(part, [len(part)], final=True) for part in tokens_T.split(lengths)]
    for i in range(2):
        expected = torch.cat([one[i] for one in alone])
        torch.testing.assert_close(together[i], expected, **tolerance)


def test_ragged_documents_together_give_what_each_gives_alone(tiny):
    assert_together_equals_alone(tiny, 2048, rtol=1e-4, atol=1e-5)


def test_documents_that_ascend_in_length_share_a_pass(tiny):
    tokens_T, lengths = documents()
    shapes = []

    def record(_layer, args, _named):
        shapes.append(tuple(args[0].shape[:2]))

    with tiny.layers[0].register_forward_pre_hook(record, with_kwargs=True):
        tiny.hidden(tokens_T, lengths, final=False)
    assert shapes == [(3, 12), (1, 1)]


def test_a_hybrid_target_too(hybrid_model):
    target = Target(hybrid_model, (0, 2, 3))
    assert_together_equals_alone(target, 64, rtol=1e-3, atol=1e-4)


def test_a_recurrent_state_does_not_carry_one_document_into_the_next(hybrid_model):
    target = Target(hybrid_model, (2,))
    tokens_T, first = token_ids(20, 64), 8
    changed_T = tokens_T.clone()
    changed_T[:first] = token_ids(first, 64, seed=1)

    def of_second(tokens_T, lengths):
        return target.hidden(tokens_T, lengths, final=False)[0][first:]

    lengths = (first, 20 - first)
    assert of_second(tokens_T, lengths).equal(of_second(changed_T, lengths))
    # The control: in one row the second document reads the state that the first one left.
    in_one_row = (of_second(tokens_T, [20]) - of_second(changed_T, [20])).abs()
    assert in_one_row.amax(1).min() > 1e-3


def test_a_filler_needs_no_forward_pass(tiny):
    tokens_T, _, lengths, document_T, position_T = pack([])
    blocks = Blocks(*[torch.empty(0, 4)] * 4)
    filler = Batch(3, 0, tokens_T, lengths, document_T, position_T, blocks)
    features = tiny.features(filler, soft_labels=True)
    assert (features.features_TF, features.teacher_TD, features.nbytes) == (None, None, 0)


def test_soft_labels_ask_for_the_last_hidden_state(tiny):
    tokens_T, _, lengths, document_T, position_T = pack([(token_ids(5, 2048), torch.ones(5) > 0)])
    blocks = Blocks(*[torch.empty(0, 4)] * 4)
    batch = Batch(0, 0, tokens_T, lengths, document_T, position_T, blocks)
    hard, soft = (tiny.features(batch, soft_labels=soft) for soft in (False, True))
    assert hard.teacher_TD is None
    assert soft.teacher_TD.shape == (5, 128)
    assert soft.features_TF.equal(hard.features_TF)
    assert soft.nbytes - hard.nbytes == 5 * 128 * 4


def test_copies_on_one_device_share_every_weight(tiny, tiny_model):
    copies = tiny.copies([CPU, CPU])
    for copy in copies:
        pairs = zip(copy.model.parameters(), tiny_model.parameters(), strict=True)
        assert all(a.data_ptr() == b.data_ptr() for a, b in pairs)
        pairs = zip(copy.model.buffers(), tiny_model.buffers(), strict=True)
        assert all(a.data_ptr() == b.data_ptr() for a, b in pairs)
        head = copy.head
        assert head.head_VD is head.embedding_VD
    assert copies[0].layers[1] is not copies[1].layers[1]


def test_a_capture_sees_its_own_copy_only(tiny):
    first, second = tiny.copies([CPU, CPU])
    ids = token_ids(4, 2048)[None]
    with torch.no_grad(), first.capturing() as mine, second.capturing() as theirs:
        first.model(ids)
        assert (len(mine), len(theirs)) == (2, 0)
    # The control: one target used twice at a time captures everything twice.
    with torch.no_grad(), first.capturing() as mine, first.capturing() as theirs:
        first.model(ids)
        assert (len(mine), len(theirs)) == (2, 2)


def test_copies_work_in_two_threads_at_once(tiny, tiny_switch_interval):
    tokens = [token_ids(6, 2048, seed) for seed in range(2)]
    expected = [tiny.hidden(t, [6], final=False)[0] for t in tokens]
    barrier, right = threading.Barrier(2), [0, 0]

    def work(rank, target):
        barrier.wait()
        for _ in range(20):
            got, _ = target.hidden(tokens[rank], [6], final=False)
            right[rank] += got.equal(expected[rank])

    threads = [
        threading.Thread(target=work, args=pair) for pair in enumerate(tiny.copies([CPU, CPU]))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [20, 20]


def test_nothing_of_the_target_is_trained(tiny):
    assert not any(p.requires_grad for p in tiny.model.parameters())
    assert not tiny.model.training
    assert not tiny.hidden(token_ids(3, 2048), [3], final=True)[1].requires_grad


def test_a_tied_head_stays_one_tensor_and_an_untied_one_stays_two(tiny, hybrid_model):
    tied = tiny.head.to(CPU, torch.bfloat16)
    assert tied.head_VD is tied.embedding_VD
    untied = Target(hybrid_model, (0,)).head
    assert not untied.head_VD.equal(untied.embedding_VD)
    moved = untied.to(CPU, torch.bfloat16)
    assert moved.head_VD.equal(untied.head_VD.bfloat16())
    assert moved.embedding_VD.equal(untied.embedding_VD.bfloat16())


def test_load_target_reads_a_local_directory(tiny_target_dir, tiny):
    loaded = load_target(str(tiny_target_dir), (1, 3), torch.float32, trust_remote_code=False)
    tokens_T = token_ids(5, 2048)
    got, expected = (t.hidden(tokens_T, [5], final=False)[0] for t in (loaded, tiny))
    assert got.equal(expected)


def test_a_loaded_target_attends_without_cudnn(tiny_target_dir):
    """Whose plans, one for each shape, take longer than the work."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    load_target(str(tiny_target_dir), (1, 3), torch.float32, trust_remote_code=False)
    assert not torch.backends.cuda.cudnn_sdp_enabled()


@pytest.fixture(scope="module")
def nested_hybrid_dir(tmp_path_factory, hybrid_model):
    """A checkpoint as Qwen3.5 and 3.6 have it: text and vision parts, the config nested."""
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 32,
    }
    text = hybrid_model.config.to_dict()
    torch.manual_seed(0)
    model = Qwen3_5ForConditionalGeneration(Qwen3_5Config(text_config=text, vision_config=vision))
    model.model.language_model.load_state_dict(hybrid_model.model.state_dict())
    model.lm_head.load_state_dict(hybrid_model.lm_head.state_dict())
    directory = tmp_path_factory.mktemp("nested")
    model.save_pretrained(directory)
    return directory


def test_a_nested_checkpoint_loads_as_its_text_model(nested_hybrid_dir, hybrid_model):
    config = json.loads((nested_hybrid_dir / "config.json").read_text())
    assert "hidden_size" not in config and config["text_config"]["hidden_size"] == 32
    assert load_text_config(str(nested_hybrid_dir), trust_remote_code=False).hidden_size == 32

    target = load_target(str(nested_hybrid_dir), (0, 3), torch.float32, trust_remote_code=False)
    tokens_T, lengths = documents(64)
    got = target.hidden(tokens_T, lengths, final=True)
    expected = Target(hybrid_model, (0, 3)).hidden(tokens_T, lengths, final=True)
    torch.testing.assert_close(got, expected)
    assert target.head.head_VD.equal(hybrid_model.lm_head.weight)


@pytest.mark.parametrize("ids", [(), (3, 1), (1, 1), (1, 6), (-1, 2)])
def test_layers_that_the_target_lacks_are_refused(tiny_model, ids):
    with pytest.raises(ModelError, match=r"--target-layer-ids .*, 0 to 5") as caught:
        Target(tiny_model, ids)
    assert "--target-layer-ids" in caught.value.remedy


def small_qwen3():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "head_dim": 4}
    return Qwen3ForCausalLM(
        Qwen3Config(vocab_size=16, num_attention_heads=2, num_key_value_heads=2, **sizes)
    )


def test_a_head_with_a_bias_is_refused():
    model = small_qwen3()
    model.lm_head = nn.Linear(8, 16, bias=True)
    with pytest.raises(ModelError, match="lm_head has a bias"):
        _ = Target(model, (0,)).head


def test_a_decoder_without_a_list_of_layers_is_refused():
    model = small_qwen3()
    model.model.layers = nn.ModuleList([*model.model.layers, nn.Identity()])
    with pytest.raises(ModelError, match="found no list of 2 decoder layers"):
        Target(model, (0,))


def weights_changed(tiny_target_dir, tmp_path, change):
    """A copy of the tiny target whose weights file was changed."""
    shutil.copytree(tiny_target_dir, tmp_path / "target")
    change(tmp_path / "target" / "model.safetensors")
    return str(tmp_path / "target")


def drop_a_weight(path):
    weights = load_file(path)
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, path, metadata={"format": "pt"})


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1000])


def widen_a_weight(path):
    weights = load_file(path)
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (widen_a_weight, "cannot be loaded: RuntimeError"),
        (drop_a_weight, r"no weight 'model\.layers\.2\.mlp\.up_proj\.weight' \(1 missing in all\)"),
        (truncate, "cannot be loaded"),
        (Path.unlink, "cannot be loaded: .*no file named model.safetensors"),
    ],
)
def test_a_target_without_all_its_weights_is_refused(tiny_target_dir, tmp_path, change, message):
    path = weights_changed(tiny_target_dir, tmp_path, change)
    with pytest.raises(ModelError, match=message):
        load_target(path, (1, 3), torch.float32, trust_remote_code=False)


def test_a_directory_without_a_config_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"--target-model .*: no config.json there"):
        load_text_config(str(tmp_path), trust_remote_code=False)

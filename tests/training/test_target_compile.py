"""Compiled target layers: the same features by two graphs, and a way back to plain ones."""

import logging

import pytest
import torch
from torch._dynamo.utils import counters

from dflash.config import TrainConfig
from dflash.target import Target, load_target
from dflash.target_compile import compile_layers
from dflash.trainer import train

LAYERS = (0, 2, 5)
SEVERAL = ([5, 7], [9, 3, 4], [12, 12, 30, 2], [40] * 2, [64] * 5)
ONE = ([8], [17], [64])


@pytest.fixture
def compiled(tiny_target_dir, torch_as_it_is):
    """(make a compiled target, the same one as it is).

    Loaded anew: transformers wraps the layers of a model that has once given its hidden states.
    """
    loaded = load_target(str(tiny_target_dir), LAYERS, torch.float32, trust_remote_code=False)
    plain, other = loaded.copies([torch.device("cpu")] * 2)

    def make(backend="aot_eager", allow_late=False):
        compile_layers(other, backend, longest=16, allow_late=allow_late, phase=lambda _text: None)
        return other

    return make, plain


def features(target, lengths):
    random = torch.Generator().manual_seed(sum(lengths))
    tokens_T = torch.randint(0, 2048, (sum(lengths),), generator=random)
    return target.hidden(tokens_T, lengths, final=True)


def graphs():
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_two_graphs_for_all_layers_and_sizes_give_the_same_features(compiled, backend):
    make, plain = compiled
    before = graphs()
    target = make(backend)
    assert graphs() == before + 2
    for lengths in (*SEVERAL, *ONE):
        torch.testing.assert_close(features(target, lengths), features(plain, lengths))
    assert graphs() == before + 2


@pytest.mark.gpu
def test_on_a_gpu_the_same_up_to_rounding(tiny_target_dir, torch_as_it_is):
    loaded = load_target(str(tiny_target_dir), LAYERS, torch.bfloat16, trust_remote_code=False)
    plain, target = loaded.copies([torch.device("cuda:0")] * 2)
    compile_layers(target, "inductor", longest=64, allow_late=False, phase=lambda _text: None)
    before = graphs()
    for lengths in (*SEVERAL, *ONE):
        for got, expected in zip(features(target, lengths), features(plain, lengths), strict=True):
            assert (got - expected).float().norm() < 0.02 * expected.float().norm()
    assert graphs() == before


def test_what_was_not_foreseen_takes_the_layers_back(compiled, caplog):
    """A micro-batch of documents of one token, which no run has, is a kind of its own."""
    make, plain = compiled
    target = make()
    torch.testing.assert_close(features(target, [1, 1]), features(plain, [1, 1]))
    said = [m for m in caplog.messages if m.startswith("a compile after the start")]
    assert len(said) == 1 and "(2, 1, 128)" in said[0] and "(128, 320)" not in said[0]
    assert said[0].endswith("the target's layers run as they are from here on")
    assert not any("forward" in vars(layer) for layer in target.layers)
    before = graphs()
    torch.testing.assert_close(features(target, [1]), features(plain, [1]))
    assert graphs() == before


def test_where_that_is_allowed_it_is_compiled(compiled, caplog):
    make, plain = compiled
    target = make(allow_late=True)
    before = graphs()
    torch.testing.assert_close(features(target, [1, 1]), features(plain, [1, 1]))
    assert graphs() == before + 1
    assert "a compile after the start, for tensors of shape" in caplog.text
    assert all("forward" in vars(layer) for layer in target.layers)


def test_drafters_that_compile_for_static_sizes_meanwhile_change_nothing(options, caplog):
    """See repro/df015_settings_of_a_call.py, which has the control."""
    caplog.set_level(logging.INFO)
    options["devices"] = {"compile": "aot_eager", "target-gpus": "cpu", "drafter-gpus": "cpu,cpu"}
    assert train(TrainConfig.from_dict(options)) == 0
    assert "compiled the target's layers in " in caplog.text
    assert "a compile after the start" not in caplog.text


def test_layers_that_cannot_be_compiled_run_as_they_are(compiled, caplog, monkeypatch):
    make, plain = compiled
    kind = type(plain.layers[0])
    real = kind.forward

    def breaks(self, *args, **named):
        torch._dynamo.graph_break()
        return real(self, *args, **named)

    monkeypatch.setattr(kind, "forward", breaks)
    target = make()
    assert "the target's layers cannot be compiled, and run as they are: " in caplog.text
    assert not any("forward" in vars(layer) for layer in target.layers)
    torch.testing.assert_close(features(target, [5, 7]), features(plain, [5, 7]))


def test_a_target_with_other_layers_too_is_left_as_it_is(hybrid_model, caplog):
    caplog.set_level(logging.INFO)
    target = Target(hybrid_model, (0, 3))
    compile_layers(target, "aot_eager", longest=16, allow_late=False, phase=lambda _text: None)
    assert "not compiled: they keep more than keys and values" in caplog.text
    assert not any("forward" in vars(layer) for layer in target.layers)

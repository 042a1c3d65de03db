"""Rows laid end to end, and batches that move whole."""

import dataclasses

import torch

from dflash.anchors import Blocks
from dflash.batches import Batch, TargetFeatures, pack

META = torch.device("meta")


def row(*ids):
    return torch.tensor(ids), torch.tensor([i % 2 == 0 for i in ids])


def test_rows_lie_end_to_end_and_positions_start_anew():
    tokens_T, mask_T, lengths, document_T, position_T = pack([row(4, 5, 6), row(7), row(8, 9)])
    assert tokens_T.tolist() == [4, 5, 6, 7, 8, 9]
    assert mask_T.tolist() == [True, False, True, False, True, False]
    assert lengths == (3, 1, 2)
    assert document_T.tolist() == [0, 0, 0, 1, 2, 2]
    assert position_T.tolist() == [0, 1, 2, 0, 0, 1]


def test_no_rows_are_empty_tensors_of_the_right_types():
    tokens_T, mask_T, lengths, document_T, position_T = pack([])
    assert lengths == ()
    assert all(len(t) == 0 for t in (tokens_T, mask_T, document_T, position_T))
    assert (tokens_T.dtype, mask_T.dtype) == (torch.int64, torch.bool)
    assert (document_T.dtype, position_T.dtype) == (torch.int64, torch.int64)


def tensors_of(value):
    """Every tensor in a tree of dataclasses."""
    if isinstance(value, torch.Tensor):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_of(getattr(value, field.name))


def test_everything_moves_and_the_rest_stays():
    tokens_T, _, lengths, document_T, position_T = pack([row(4, 5, 6)])
    blocks = Blocks(torch.tensor([0]), *[torch.zeros(1, 4)] * 3)
    batch = Batch(7, 2, tokens_T, lengths, document_T, position_T, blocks)
    features = TargetFeatures(batch, torch.zeros(3, 8), torch.zeros(3, 4))
    moved = features.received(META)

    assert len(list(tensors_of(moved))) == 3 + 4 + 2
    assert {t.device for t in tensors_of(moved)} == {META}
    assert (moved.batch.index, moved.batch.epoch, moved.batch.lengths) == (7, 2, (3,))
    assert features.nbytes == (3 * 8 + 3 * 4) * 4


def test_a_filler_moves_too():
    tokens_T, _, lengths, document_T, position_T = pack([])
    blocks = Blocks(*[torch.empty(0, 4)] * 4)
    batch = Batch(7, 2, tokens_T, lengths, document_T, position_T, blocks)
    moved = TargetFeatures(batch, None, None).received(META)
    assert batch.is_empty and moved.batch.is_empty
    assert (moved.features_TF, moved.teacher_TD, moved.nbytes) == (None, None, 0)

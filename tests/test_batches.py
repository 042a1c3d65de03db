"""Rows laid end to end, and batches that move whole."""

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


def test_features_move_and_the_batch_stays_on_the_host():
    tokens_T, _, lengths, document_T, position_T = pack([row(4, 5, 6)])
    blocks = Blocks(torch.tensor([0]), *[torch.zeros(1, 4)] * 3)
    batch = Batch(7, 2, tokens_T, lengths, document_T, position_T, blocks)
    features = TargetFeatures(batch, torch.zeros(3, 8), torch.zeros(3, 4))
    moved = features.received(META)

    assert moved.batch is batch
    assert (moved.features_TF.device, moved.teacher_TD.device) == (META, META)
    assert features.nbytes == (3 * 8 + 3 * 4) * 4


def test_a_filler_moves_too():
    tokens_T, _, lengths, document_T, position_T = pack([])
    blocks = Blocks(*[torch.empty(0, 4)] * 4)
    batch = Batch(7, 2, tokens_T, lengths, document_T, position_T, blocks)
    moved = TargetFeatures(batch, None, None).received(META)
    assert batch.is_empty and moved.batch.is_empty
    assert (moved.features_TF, moved.teacher_TD, moved.nbytes) == (None, None, 0)

"""Which slots have a loss, and which of the target's rows teach them."""

import torch

from dflash.anchors import Blocks
from dflash.asked import AskedSlots

# Two blocks of 4 at anchors 2 and 4 (of 3 and of 2 asked slots), and one that asks nothing.
ANCHORS = torch.tensor([2, 4, 7])
WEIGHTS = torch.tensor([[0.0, 1.0, 0.5, 0.25], [0.0, 1.0, 0.5, 0.0], [0.0, 0.0, 0.0, 0.0]])
LABELS = torch.tensor([[9, 11, 12, 13], [9, 21, 22, 23], [9, 9, 9, 9]])


def asked():
    return AskedSlots.of(Blocks(ANCHORS, LABELS, LABELS, WEIGHTS))


def test_slots_come_in_the_order_of_the_rows_they_learn_from():
    # Slot k at anchor a learns from row a + k - 1: 2, 3, 4 and 4, 5.
    one = asked()
    assert (one.shape, len(one)) == ((3, 4), 5)
    assert one.slot_S.tolist() == [1, 2, 3, 5, 6]
    assert one.label_S.tolist() == [11, 12, 13, 21, 22]
    assert one.weight_S.tolist() == [1.0, 0.5, 0.25, 1.0, 0.5]
    assert one.row_U.tolist() == [2, 3, 4, 5]
    assert one.rank_S.tolist() == [0, 1, 2, 2, 3]


def test_rows_of_a_part_overlap_where_the_part_ends_within_a_row():
    one = asked()
    assert [one.row_U[one.rows(part)].tolist() for part in (slice(0, 3), slice(3, 5))] == [
        [2, 3, 4],
        [4, 5],
    ]


def test_sizes_stay_known_on_the_host():
    moved = asked().to(torch.device("meta"))
    assert {t.device.type for t in (moved.slot_S, moved.label_S, moved.rank_S)} == {"meta"}
    assert moved.rows(slice(0, 5)) == slice(0, 4)

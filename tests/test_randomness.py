"""Draws are a function of the seed and of what is drawn."""

import itertools

import torch

from dflash.randomness import ANCHORS, NOISE, generator


def draw(*key):
    return torch.rand(4, generator=generator(*key))


def test_the_same_key_draws_the_same():
    assert draw(3, ANCHORS, 1, 7).equal(draw(3, ANCHORS, 1, 7))


def test_every_part_of_the_key_matters():
    keys = itertools.product((0, 1), (ANCHORS, NOISE), (0, 1), (0, 1))
    drawn = {tuple(draw(*key).tolist()) for key in keys}
    assert len(drawn) == 16


def test_parts_do_not_run_into_one_another():
    # A sum or a string of the parts would take these for one another.
    assert not draw(1, ANCHORS, 1, 11).equal(draw(1, ANCHORS, 11, 1))
    assert not draw(0, ANCHORS, 0, 1).equal(draw(1, ANCHORS, 0, 0))


def test_the_process_wide_generator_is_left_alone():
    before = torch.get_rng_state()
    draw(0, NOISE, 0, 0)
    assert torch.get_rng_state().equal(before)


def test_a_large_seed_is_legal():
    draw(2**40, ANCHORS, 10**6, 10**9)

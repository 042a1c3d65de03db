"""The bisection against an oracle that looks at every version."""

import itertools

import pytest

from diagnostics.probes.fxrace.bisection import Boundary, first_without

VERSIONS = ("2.9", "2.10", "2.11", "2.12", "2.13", "2.14")


def search(answers):
    """The boundary, and which versions were asked for."""
    asked = []

    def has(version):
        asked.append(version)
        return answers[VERSIONS.index(version)]

    return first_without(VERSIONS[: len(answers)], has), set(asked)


@pytest.mark.parametrize("count", range(2, 7))
def test_every_monotone_history_has_its_boundary(count):
    for gone in range(1, count):
        found, _ = search([index < gone for index in range(count)])
        assert found == Boundary(VERSIONS[gone - 1], VERSIONS[gone])


def test_whatever_is_named_was_measured_on_both_sides():
    """Over all histories: an answer is a real change, and its neighbours do not contradict it."""
    for answers in itertools.product((True, False, None), repeat=5):
        found, asked = search(answers)
        if not found.first_without:
            assert found.why
            continue
        low, high = VERSIONS.index(found.last_with), VERSIONS.index(found.first_without)
        assert (answers[low], answers[high], high) == (True, False, low + 1)
        assert {found.last_with, found.first_without} <= asked
        assert (answers[0], answers[-1]) == (True, False)
        assert low == 0 or answers[low - 1] is not False
        assert high == len(answers) - 1 or answers[high + 1] is not True


def test_what_comes_and_goes_at_the_boundary_is_no_boundary():
    found, _ = search([True, False, True, False])
    assert "comes and goes" in found.why


@pytest.mark.parametrize(
    ("answers", "why"),
    [
        ([], "0 version: it takes two"),
        ([True], "1 version: it takes two"),
        ([False, False], "the oldest, 2.9, does not have it"),
        ([None, False], "the oldest, 2.9, could not be measured"),
        ([True, True], "the newest, 2.10, has it"),
        ([True, None], "the newest, 2.10, could not be measured"),
        ([True, None, False], "between them 2.10 could not be measured"),
    ],
)
def test_why_it_cannot_be_told(answers, why):
    assert why in search(answers)[0].why


def test_a_version_that_cannot_be_measured_is_stepped_over():
    assert search([True, True, None, False, False])[0].why.startswith("2.10 has it, 2.12 does not")
    assert search([True, True, True, False, None, False])[0] == Boundary("2.11", "2.12")


def test_not_every_version_is_asked_for():
    versions = [str(index) for index in range(100)]
    asked = []
    found = first_without(versions, lambda one: asked.append(one) or int(one) < 37)
    assert found == Boundary("36", "37")
    assert len(set(asked)) <= 2 + 7 + 2  # both ends, log2 of 100, the boundary's neighbours

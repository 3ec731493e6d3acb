"""Tests that programs written for one device give the same numbers on several.

Weights, optimizer slots, history, evaluation and predictions are those of one device, within
1e-6 of the largest number of an array, or ten times what one unit in the last place of the initial
weights changes on one device. If a program cannot give these numbers, an error must say so.
"""

from __future__ import annotations

import re
import zlib

import numpy as np
import pytest

from tests.programs import page
from tests.programs.catalogue import CHOSEN, PROGRAMS
from tests.programs.registry import EQUAL, GIVEN_PLACES, PLACES
from tests.programs.running import ProgramPlaces, differences, excess
from tests.support.places import few

# If a perturbation of 6e-8 grows to more than this, it would hide errors of the same size.
MOST_SENSITIVE = 1e-3


# A value that is made for one replica must not be used by another one of the same process.
IN_ONE_PROCESS = (
    "gradient_through_two_steps",
    "gradient_through_a_stateless_call",
    "gradient_penalty_through_normalization",
)


def places_of(name: str) -> tuple[str, ...]:
    """Returns where a program runs in CI. The name decides, so another program changes nothing."""
    if GIVEN_PLACES:
        return GIVEN_PLACES
    if len(CHOSEN) == len(PROGRAMS):
        return PLACES[2:]
    is_of_replicas = name in IN_ONE_PROCESS or zlib.crc32(name.encode()) % 2
    return ("mirrored-3",) if is_of_replicas else ("workers-2",)


@pytest.mark.parametrize("name", CHOSEN)
def test_one_device_distinguishes_errors_from_rounding(left: ProgramPlaces, name: str) -> None:
    plain, perturbed = (found[name] for found in left["plain"])
    assert "error" not in plain, plain["error"]
    # Numbers that are not finite are equal wherever they come from.
    not_finite = [key for key, v in plain.items() if not np.isfinite(v.astype(float)).all()]
    assert not not_finite
    if PROGRAMS[name].expects == EQUAL and PROGRAMS[name].tolerance <= MOST_SENSITIVE:
        found = differences(perturbed, plain)
        assert max(found.values()) < MOST_SENSITIVE, max(found, key=lambda key: found[key])


@pytest.mark.parametrize(
    ("name", "place"),
    [(name, place) for name in CHOSEN for place in few(*places_of(name), of=PLACES)],
)
def test_a_program_is_the_same_or_refused(left: ProgramPlaces, name: str, place: str) -> None:
    wanted = PROGRAMS[name]
    plain, perturbed = (found[name] for found in left["plain"])
    first, *others = [found[name] for found in left[place]]
    if wanted.expects == EQUAL:
        assert "error" not in first, ": ".join(first["error"])
        # All workers have the same values, to the bit.
        for other in others:
            assert other.keys() == first.keys()
            assert all(np.array_equal(first[key], other[key], equal_nan=True) for key in first)
        ratio, words = excess(first, plain, [perturbed], wanted.tolerance)
        assert ratio <= 1, words
    elif "error" in first:
        for found in (first, *others):
            assert re.search(wanted.expects, str(found["error"][1])), ": ".join(found["error"])
    else:
        # A program that is usually refused may also be exact, for example on two replicas alone.
        ratio, words = excess(first, plain, [perturbed], wanted.tolerance)
        assert ratio <= 1, f"no error, but {words}"


def test_the_comparison_names_the_difference() -> None:
    plain = {"weight/0": np.array([1.0, 2.0]), "history/loss": np.array([0.5])}
    assert excess(plain, plain, [plain], 1e-6)[0] == 0
    wrong = {**plain, "history/loss": np.array([0.5005])}
    ratio, words = excess(wrong, plain, [plain], 1e-6)
    assert ratio == pytest.approx(1000)
    assert words.startswith("history/loss differs by 1.00e-03")
    near = {**plain, "history/loss": np.array([0.5001])}
    assert excess(wrong, plain, [near], 1e-6)[0] == pytest.approx(0.5)
    assert excess(wrong, plain, [plain, near], 1e-6)[0] == pytest.approx(0.5)
    assert excess({**wrong, "more": np.zeros(1)}, plain, [plain], 1e-6)[0] == np.inf
    with pytest.raises(AssertionError, match="something else"):
        excess(plain, plain, [wrong | {"more": np.zeros(1)}], 1e-6)


def test_there_is_a_program_of_each_kind() -> None:
    assert len(PROGRAMS) >= 40
    kinds = [program.kind for program in PROGRAMS.values()]
    assert len(set(kinds)) == len(kinds)
    assert all(program.like for program in PROGRAMS.values())


def test_the_page_lists_the_programs_of_each_public_example() -> None:
    written = page.PAGE.read_text()
    # If this fails, run `python -m tests.programs.page`.
    assert page.with_table(written) == written
    assert all(f"`{name}`" in written for name in PROGRAMS)

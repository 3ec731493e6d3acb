"""Tests which numbers count as different, and the messages for them."""

from __future__ import annotations

import numpy as np
import pytest

from tfmulti.training.verification.comparison import (
    PERTURBED_BY,
    Difference,
    Quantity,
    compare,
    draws_in_words,
    first_of,
    in_words,
    perturbed,
)

WEIGHT, LOSS = Quantity("weight", "w"), Quantity("log", "loss")
COUNT, QUEUE = Quantity("state", "count"), Quantity("state", "queue")
ONES = np.ones(3, np.float32)


def test_only_more_than_rounding_is_a_difference() -> None:
    there = np.array([1.0, 2.0, 3.0], np.float32)
    near = np.nextafter(there, np.float32(9))
    assert compare(WEIGHT, near, there, there, there - ONES).excess < 1
    assert compare(WEIGHT, there * np.float32(1.001), there, there, there - ONES).excess > 1


def test_a_small_update_of_a_large_weight_counts() -> None:
    """Half of an update of a thousandth is found, although the weight is nearly the same."""
    before = 1000 * ONES
    found = compare(WEIGHT, before + 0.5 * ONES, before + ONES, before + ONES, before)
    assert found.excess > 1
    assert found.ratio == pytest.approx(0.5)


def test_forty_times_the_effect_of_a_digit_is_allowed() -> None:
    moved = ONES + np.float32(0.01 * PERTURBED_BY)
    assert compare(LOSS, ONES + np.float32(0.39), ONES, moved).excess < 1
    assert compare(LOSS, ONES + np.float32(0.41), ONES, moved).excess > 1


def test_integers_and_nan_are_compared() -> None:
    whole = np.array([1, 2])
    assert compare(COUNT, whole, whole, whole, whole * 0).excess == 0
    assert compare(COUNT, whole + 1, whole, whole, whole * 0).excess == float("inf")
    nothing = np.array([np.nan, 1], np.float32)
    assert compare(LOSS, nothing, nothing, nothing).excess == 0
    one = np.array([1, 1], np.float32)
    assert compare(LOSS, one, nothing, nothing).excess == float("inf")


def test_another_shape_is_a_difference() -> None:
    assert compare(QUEUE, ONES, ONES[:2], ONES[:2], ONES[:2]).excess == float("inf")


def test_weights_are_moved_by_their_last_digits() -> None:
    rng = np.random.default_rng(0)
    value = np.array([0.5, -2.0, 3.0], np.float32)
    moved = perturbed(value, rng, 0.0)
    digits = np.abs(moved - value) / np.spacing(np.abs(value))
    assert (digits >= PERTURBED_BY / 2).all()
    assert (digits <= PERTURBED_BY * 2).all()
    coarse = perturbed(value, rng, 2.0**-8)
    assert np.abs(coarse / value - 1) == pytest.approx(np.full(3, 2.0**-8))


def test_the_worst_difference_of_the_first_kind_is_named() -> None:
    found = [
        Difference("log", "loss", 9.0, 1.0, 0, 0),
        Difference("weight", "a", 2.0, 1.0, 0, 0),
        Difference("weight", "b", 3.0, 1.0, 0, 0),
        Difference("weight", "c", 0.5, 1.0, 0, 0),
    ]
    first = first_of(found)
    assert first is not None
    assert first.name == "b"
    assert first_of(found[3:]) is None


@pytest.mark.parametrize(
    ("kind", "scale", "words"),
    [
        ("gradient", 2.0, "counts once for each"),
        ("gradient", 0.5, "looks like a sum over rows"),
        ("gradient", 0.9, "must be a mean over the rows"),
        ("update", None, "before it are the same"),
        ("layer", None, "depend on the other rows"),
        ("state", None, "its own rows only"),
        ("metric", None, "must be a sum over rows"),
        ("seed", None, "Draw as often"),
        ("log", None, "Return results of metrics"),
    ],
)
def test_a_message_says_what_to_do(kind: str, scale: float | None, words: str) -> None:
    found = Difference(kind, "x", 1.0, 1e-6, 3.0, 2.0, scale, scale, "train.py:7 (f(x))")
    message = in_words(found, replicas=2, steps=1)
    for part in (words, "3 where one device has 2", "train.py:7", "1e-06", "--noverify"):
        assert part in message
    assert "\n" not in message


def test_random_numbers_are_named_by_their_operations() -> None:
    message = draws_in_words(["RandomUniform"], "train.py:7 (tf.random.uniform([3]))")
    assert "(RandomUniform), in train.py:7" in message
    assert "Draw by keras.random" in message

"""Tests splits by slices or a fraction: seeded, disjoint, and without an index in memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.data.test_batch_plan import check_uniform
from tfmulti.data.arrays import ArraySource
from tfmulti.data.data_set import DataSet
from tfmulti.data.transforms.splits import parse_split, with_splits, with_validation
from tfmulti.errors import ConfigError, DataError


def data(rows: int = 100, **parts: int) -> DataSet:
    others: dict[str, Any] = {name: source(count) for name, count in parts.items()}
    return DataSet(source(rows), **others)


def source(rows: int) -> ArraySource:
    return ArraySource((np.arange(rows), np.arange(rows)))


def examples(part: Any) -> list[int]:
    values: list[int] = part.read(np.arange(len(part)))[0].tolist()
    return values


def split(rows: int, seed: int = 0, /, **splits: str | None) -> DataSet:
    slices = {"train": None, "validation": None, "test": None} | splits
    return with_splits(data(rows), slices, seed)


@pytest.mark.parametrize(
    ("text", "bounds"),
    [
        ("train", (0, 50)),
        ("train[:90%]", (0, 45)),
        ("train[90%:]", (45, 50)),
        ("train[-10%:]", (45, 50)),
        ("train[10:20]", (10, 20)),
        ("train[-5:]", (45, 50)),
        ("train[:500]", (0, 50)),
        ("train[33%:66%]", (16, 33)),
    ],
)
def test_slices_select_examples(text: str, bounds: tuple[int, int]) -> None:
    assert parse_split("training_split", text).bounds(50) == bounds


@given(rows=st.integers(2, 300), percent=st.integers(0, 100), seed=st.integers(0, 2**32))
def test_the_two_sides_of_a_bound_have_all_examples(rows: int, percent: int, seed: int) -> None:
    left = parse_split("training_split", f"train[:{percent}%]").bounds(rows)
    right = parse_split("validation_split", f"train[{percent}%:]").bounds(rows)
    assert left[1] == right[0]
    if 0 < left[1] < rows:
        both = split(rows, seed, train=f"train[:{percent}%]", validation=f"train[{percent}%:]")
        together = examples(both.train) + examples(both.validation)
        assert sorted(together) == list(range(rows))


@given(rows=st.integers(2, 300), fraction=st.floats(0.01, 0.99), seed=st.integers(0, 2**32))
def test_a_fraction_is_split_off(rows: int, fraction: float, seed: int) -> None:
    if not 0 < round(rows * fraction) < rows:
        return
    both = with_validation(data(rows), fraction, seed)
    assert len(both.validation) == round(rows * fraction)
    assert sorted(examples(both.train) + examples(both.validation)) == list(range(rows))


def test_a_fraction_that_takes_no_example() -> None:
    assert with_validation(data(), 0.0, seed=1).validation is None
    with pytest.raises(DataError, match="leaves one part empty"):
        with_validation(data(), 0.001, seed=1)


def test_the_seed_draws_the_split() -> None:
    one, other = (split(200, seed, train="train[:50%]") for seed in (1, 2))
    assert examples(one.train) != examples(other.train)
    assert examples(one.train) == examples(split(200, 1, train="train[:50%]").train)


def test_each_example_is_equally_likely_to_be_held_out() -> None:
    counts = np.zeros(40)
    for seed in range(1500):
        counts[examples(with_validation(data(40), 0.25, seed).validation)] += 1
    # The draws are without replacement, so the variance is 3/4 of that of independent draws.
    check_uniform(np.sqrt(4 / 3) * (counts - 375) + 375, 375, freedom=39)


def test_a_split_has_the_labels_and_origins_of_its_examples() -> None:
    both = split(50, 3, train="train[:80%]")
    assert both.train.labels().tolist() == examples(both.train)
    assert both.train.where(7) == f"example {examples(both.train)[7]}"
    nested = with_validation(both, 0.5, 0)
    assert set(examples(nested.train)) | set(examples(nested.validation)) == set(
        examples(both.train)
    )


@pytest.mark.parametrize(
    ("splits", "message"),
    [
        ({"train": "trian[:9%]"}, "--training_split trian.*did you mean 'train'"),
        ({"train": "train[:9%"}, "--training_split .* is not a split"),
        ({"train": "train[9]"}, "is not a split"),
        ({"train": "train[5:5]"}, r"train\[5:5\] is empty: 100 examples from 5 to 5"),
        ({"train": "train[60%:40%]"}, "is empty"),
        ({"validation": "test[:50%]"}, "the data has no test part. It has: train"),
        ({"validation": "train[90%:]"}, "overlap: both have 10 of the 100 train examples"),
        (
            {"train": "train[:90%]", "validation": "train[80%:]"},
            "--training_split .* and --validation_split .* overlap: both have 10",
        ),
        (
            {"train": "train[:80%]", "validation": "train[80%:]", "test": "train[95:]"},
            "--validation_split .* and --test_split .* overlap: both have 5",
        ),
    ],
)
def test_mistakes_in_splits(splits: dict[str, str], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message) as caught:
        split(100, 0, **splits)
    assert "\n" not in str(caught.value)


def test_batches_cannot_be_sliced() -> None:
    with pytest.raises(DataError, match="comes in whole batches"):
        with_splits(DataSet(object()), {"train": "train[:9%]"}, 0)


def test_a_part_may_come_from_another_part() -> None:
    unsplit = data(100, test=30)
    parts = with_splits(
        unsplit, {"train": "train", "validation": "test[:50%]", "test": "test[50%:]"}, 0
    )
    assert (len(parts.train), len(parts.validation), len(parts.test)) == (100, 15, 15)
    assert not set(examples(parts.validation)) & set(examples(parts.test))

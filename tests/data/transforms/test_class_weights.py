"""Tests the weights of examples by class."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tfmulti.data.arrays import ArraySource
from tfmulti.data.transforms.class_weights import Weighted, balanced, parse_class_weight
from tfmulti.errors import ConfigError, DataError

LABELS = np.array([0, 0, 0, 1, 2, 2])


def test_the_form_of_a_flag() -> None:
    assert parse_class_weight("balanced") is None
    assert parse_class_weight("0:1,3:2.5") == {0: 1.0, 3: 2.5}


@pytest.mark.parametrize(
    "text", ["", "balance", "0=1", "0:1,", "0:x", "-1:2", "0:-1", "0:nan", "1:inf"]
)
def test_other_forms_of_a_flag_are_errors(text: str) -> None:
    with pytest.raises(
        ConfigError, match=r"is no list of weights\. Write balanced, or CLASS:WEIGHT"
    ):
        parse_class_weight(text)


def test_balanced_classes_count_the_same() -> None:
    weights = balanced(LABELS, 5)
    assert weights == {0: 6 / 9, 1: 2.0, 2: 1.0}
    assert sum(weights[label] for label in LABELS.tolist()) == pytest.approx(6)
    with pytest.raises(DataError, match="not known without reading all of it"):
        balanced(None, 5)


@pytest.mark.parametrize("shape", [(6,), (6, 1)])
def test_each_example_has_its_class_weight(shape: tuple[int, ...]) -> None:
    source = Weighted(ArraySource((np.arange(6), LABELS.reshape(shape))), {1: 4.0, 0: 0.5})
    x, _, weight = source.read(np.array([3, 5, 0]))
    assert (x.tolist(), weight.tolist()) == ([3, 5, 0], [4.0, 1.0, 0.5])
    out = (np.empty(2, np.int64), np.empty((2, *shape[1:]), np.int64), np.empty(2, np.float32))
    source.read_into(np.array([3, 4]), 0, out)
    assert out[2].tolist() == [4.0, 1.0]
    assert source.specs[2] == ((), "float32")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((LABELS, LABELS, LABELS), "has weights of its own"),
        ((LABELS,), "needs data with one class label"),
        ((LABELS, LABELS / 2), "needs data with one class label"),
        ((LABELS, np.eye(6)), "needs data with one class label"),
    ],
)
def test_data_without_classes_is_an_error(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        Weighted(ArraySource(data), {0: 1.0})

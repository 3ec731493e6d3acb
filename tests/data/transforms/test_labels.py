"""Tests reading the labels of examples without their inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.records import write_records
from tfmulti.data.arrays import ArraySource
from tfmulti.data.formats.encoded import Decoder, EncodedSource
from tfmulti.data.formats.records import Records
from tfmulti.data.loader import cores
from tfmulti.data.source import Leaf, Source, SourceSlice
from tfmulti.data.transforms.augmentation import Augmented
from tfmulti.data.transforms.cache import InMemory
from tfmulti.data.transforms.class_weights import Weighted
from tfmulti.data.transforms.labels import read_labels
from tfmulti.errors import DataError

LEAVES = {"x": Leaf((4, 4, 1), "uint8"), "y": Leaf((1,), "uint8")}


def parse(records: Sequence[bytes], out: Mapping[str, np.ndarray]) -> None:
    """Returns the label that a record consists of. A record of 9 cannot be read."""
    assert set(out) == {"y"}, "more than the label was read"
    if b"9" in records:
        raise DataError("it is a 9")
    out["y"][:, 0] = [int(record) for record in records]


def source(folder: Path, text: str, classes: int | None = 7) -> EncodedSource:
    records = [letter.encode() for letter in text]
    write_records(folder / "a", records)
    decoder = Decoder(("x", "y"), LEAVES, parse, classes)
    return EncodedSource(Records([str(folder / "a")]), decoder)


class Backwards:
    def at(self, positions: np.ndarray) -> np.ndarray:
        return 4 - positions


def test_labels_are_read_alone(tmp_path: Path) -> None:
    train = source(tmp_path, "0123456" * 50)
    labels = read_labels(train)
    assert labels is not None
    assert (labels.values.dtype, labels.values.shape, labels.examples) == (np.int64, (350,), 350)
    assert np.array_equal(labels.values, np.arange(350) % 7)


def test_transforms_of_a_source_keep_the_labels(tmp_path: Path) -> None:
    train = source(tmp_path, "01234")
    part = SourceSlice(train, 1, 4, Backwards())
    for changed in (part, InMemory(part), Augmented(part, ("flip",), 0), Weighted(part, {0: 1.0})):
        labels = read_labels(changed)
        assert labels is not None
        assert labels.values.tolist() == [3, 2, 1]
    arrays = read_labels(ArraySource((np.zeros(3), np.array([2, 0, 1], np.uint8))))
    assert arrays is not None
    assert arrays.values.tolist() == [2, 0, 1]


def test_reading_labels_has_a_time_limit_and_the_order_of_the_plan(tmp_path: Path) -> None:
    train = source(tmp_path, "0123456" * 500)
    times = iter(range(100))
    labels = read_labels(
        train,
        lambda start, stop: 3499 - np.arange(start, stop),
        limit_s=2.5,
        clock=lambda: float(next(times)),
    )
    assert labels is not None
    assert labels.examples == len(labels.values) == 3 * 32 * cores()
    assert labels.values[:8].tolist() == [6, 5, 4, 3, 2, 1, 0, 6]


def test_one_block_is_read_even_without_time(tmp_path: Path) -> None:
    labels = read_labels(source(tmp_path, "0123456" * 500), limit_s=0)
    assert labels is not None
    assert labels.examples == 32 * cores()


def test_unreadable_labels_are_reported_or_left_out(tmp_path: Path) -> None:
    train = source(tmp_path, "0192")
    with pytest.raises(DataError, match=r"a, record 2: it is a 9\. Repair or remove it, or give"):
        read_labels(train)
    labels = read_labels(train, skip_bad=True)
    assert labels is not None
    assert (labels.values.tolist(), labels.examples) == ([0, 1, 2], 4)
    with pytest.raises(DataError, match=r"a, record 3: 'y' is 2, out of range 0\.\.1"):
        read_labels(SourceSlice(source(tmp_path, "0102", classes=2), 1, 4))


def test_labels_are_not_read_together_with_inputs(tmp_path: Path) -> None:
    assert read_labels(source(tmp_path, "0", classes=None)) is None

    class Own(Source):
        specs = (LEAVES["x"], LEAVES["y"])

        def __len__(self) -> int:
            return 3

        def read(self, indices: np.ndarray, epoch: int = 0) -> Any:
            raise AssertionError

    assert read_labels(Own()) is None

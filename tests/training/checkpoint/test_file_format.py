from __future__ import annotations

import collections
import errno
import re
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tfmulti.training.checkpoint import file_format, serialization
from tfmulti.training.checkpoint.file_format import Checkpoints, DamagedCheckpointError, Record

SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
)
KEYS = SCALARS | st.tuples(st.integers(), st.text()) | st.frozensets(st.integers())
PLAIN = st.recursive(
    SCALARS | st.sets(SCALARS),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text(), inner)
        | st.dictionaries(KEYS, inner)
    ),
    max_leaves=10,
)


def record(step: int = 7) -> Record:
    weights = np.arange(12, dtype=np.float32).reshape(3, 4)
    tree = {"weights": {"a": weights}, "best": [np.array(0.1, np.float32), -0.0], "name": "é"}
    return Record(step, tree)


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return same(list(left.items()), list(right.items()))
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, (set, frozenset)):
        return sorted(map(repr, left)) == sorted(map(repr, right))
    if isinstance(left, (np.ndarray, np.generic)):
        return (left.dtype, left.shape, left.tobytes()) == (
            right.dtype,
            right.shape,
            right.tobytes(),
        )
    return repr(left) == repr(right)


@given(tree=st.dictionaries(st.text(), PLAIN), step=st.integers(0, 10**12))
def test_a_record_comes_back_as_it_was(tree: dict[str, Any], step: int) -> None:
    found = file_format.from_bytes(file_format.to_bytes(Record(step, tree)))
    assert (found.step, same(found.tree, tree)) == (step, True)


def test_arrays_come_back_to_the_bit() -> None:
    assert same(file_format.from_bytes(file_format.to_bytes(record())).tree, record().tree)


@pytest.mark.parametrize(
    "name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4", ">f4", "float16", "complex64"]
)
def test_arrays_of_every_type_come_back(name: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, name, name))
    bits = np.arange(6, dtype=f"u{kind.itemsize}")
    tree = {"a": bits.view(kind).reshape(2, 3).T, "b": bits.view(kind)[1], "c": bits[:0].view(kind)}
    assert same(file_format.from_bytes(file_format.to_bytes(Record(1, tree))).tree, tree)


@given(value=PLAIN)
def test_a_copy_is_equal_and_shares_no_memory(value: Any) -> None:
    array = np.arange(3)
    held = serialization.copied({"a": [value, array]})
    assert same(held, {"a": [value, array]})
    assert not np.shares_memory(held["a"][1], array)


class Point(NamedTuple):
    x: int


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"a": [1, object()]}, "['a'][1] is a object"),
        ({3: {"b": Point(1)}}, "[3]['b'] is a Point"),
        ({Point(1): 2}, "the key Point(x=1) of it is a Point"),
        ({"a": collections.Counter()}, "['a'] is a Counter"),
        ({"a": np.array([None])}, "['a'] is a NumPy array of object"),
        ([{1, 1j}], "an item of [0] is a complex"),
    ],
)
def test_values_that_are_not_plain_are_named(value: Any, words: str) -> None:
    with pytest.raises(serialization.NotPlainError, match=re.escape(words)):
        serialization.copied(value)


def test_values_that_contain_themselves_are_named() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(serialization.NotPlainError, match="is a list that contains itself"):
        serialization.copied(value)


@settings(max_examples=300)
@given(st.data())
def test_a_flipped_bit_is_found_or_changes_nothing(data: st.DataObject) -> None:
    whole = file_format.to_bytes(record())
    bit = data.draw(st.integers(0, 8 * len(whole) - 1))
    damaged = bytearray(whole)
    damaged[bit // 8] ^= 1 << bit % 8
    try:
        found = file_format.from_bytes(bytes(damaged))
    except DamagedCheckpointError:
        return
    # The change may be in a field of zip that is never read, such as a date or a version.
    assert same(found.tree, record().tree)
    assert found.step == 7


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9, 0.999])
def test_a_file_that_is_cut_off_is_found(part: float) -> None:
    whole = file_format.to_bytes(record())
    with pytest.raises(DamagedCheckpointError, match="cut off or damaged"):
        file_format.from_bytes(whole[: int(part * len(whole))])


def test_the_newest_intact_checkpoint_is_found_and_damaged_ones_are_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "b", keep=3)
    assert checkpoints.newest() == (None, [])
    for step in (10, 20, 1_000_000_000):
        path = checkpoints.write(record(step))
    path.write_bytes(path.read_bytes()[:-40])
    found, wrong = checkpoints.newest()
    assert found is not None
    assert found.step == 20
    assert [words.partition(":")[0] for words in wrong] == [str(path)]


def test_the_given_number_of_checkpoints_is_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    (tmp_path / "notes.txt").write_text("not a checkpoint")
    for step in (1, 2, 3):
        checkpoints.write(record(step))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "notes.txt",
        "step-000000002.npz",
        "step-000000003.npz",
    ]


@pytest.mark.parametrize("fault", ["full", "other bytes"])
def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.write(record(1))
    real = Path.write_bytes

    def failing(self: Path, data: bytes) -> int:
        real(self, data[:-1])
        if fault == "full":
            raise OSError(errno.ENOSPC, "No space left on device")
        return len(data) - 1

    monkeypatch.setattr(Path, "write_bytes", failing)
    with pytest.raises(OSError if fault == "full" else DamagedCheckpointError):
        checkpoints.write(record(2))
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000001.npz"]

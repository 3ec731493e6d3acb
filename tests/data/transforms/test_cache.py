"""Tests that caches read each example once, are checked, and respect their limits."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.mounts import mounted, needs_root
from tests.support.sources import Counting
from tfmulti.data.arrays import ArraySource
from tfmulti.data.io.files import cache_folder
from tfmulti.data.source import SourceSlice
from tfmulti.data.transforms import cache
from tfmulti.data.transforms.cache import InMemory, OnDisk, cached
from tfmulti.errors import DataError


class Known(Counting):
    """A source with a fingerprint, whose examples are three numbers each."""

    def __init__(self, rows: int = 20, name: str = "a") -> None:
        super().__init__(rows)
        self.name = name
        ArraySource.__init__(
            self, (np.arange(rows * 3, dtype=np.float32).reshape(rows, 3), np.arange(rows))
        )

    def identity(self) -> str:
        return self.name

    def read(self, indices: Any, epoch: int = 0) -> Any:
        self.read_rows.update(np.asarray(indices).tolist())
        return ArraySource.read(self, indices, epoch)


def cached_source(kind: str, source: Known, folder: Path) -> Any:
    return InMemory(source) if kind == "memory" else OnDisk(source, folder)


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_each_example_is_read_once(kind: str, tmp_path: Path) -> None:
    source = Known()
    cache_ = cached_source(kind, source, tmp_path)
    for rows in ([3, 4], [4, 5, 3], [19, 0], [0, 19, 7], list(range(20)), list(range(20))):
        x, y = cache_.read(np.array(rows))
        assert y.tolist() == rows
        assert x[:, 0].tolist() == [3 * row for row in rows]
    assert set(source.read_rows.values()) == {1}
    assert len(source.read_rows) == 20


@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_many_threads_get_the_same_rows(kind: str, tmp_path: Path) -> None:
    cache_ = cached_source(kind, Known(200), tmp_path)
    wrong: list[Any] = []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(30):
            rows = rng.permutation(200)[:40]
            x, y = cache_.read(rows)
            if y.tolist() != rows.tolist() or not np.array_equal(x[:, 0], 3 * rows):
                wrong.append(rows)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_cached_files_are_found_again(tmp_path: Path) -> None:
    OnDisk(Known(), tmp_path).read(np.arange(20))
    again = Known()
    assert OnDisk(again, tmp_path).read(np.arange(20))[1].tolist() == list(range(20))
    assert not again.read_rows
    other = Known(name="changed")
    OnDisk(other, tmp_path).read(np.arange(3))
    assert len(other.read_rows) == 3


def test_damaged_rows_of_a_cache_are_read_again(tmp_path: Path) -> None:
    OnDisk(Known(), tmp_path).read(np.arange(20))
    (file,) = tmp_path.glob("*/0.bin")
    content = bytearray(file.read_bytes())
    content[12 * 7] ^= 1
    file.write_bytes(content)
    again = Known()
    x, _ = OnDisk(again, tmp_path).read(np.arange(20))
    assert dict(again.read_rows) == {7: 1}
    assert x[7].tolist() == [21, 22, 23]


def test_a_truncated_cache_file_is_replaced(tmp_path: Path) -> None:
    OnDisk(Known(), tmp_path).read(np.arange(20))
    (file,) = tmp_path.glob("*/0.bin")
    file.write_bytes(file.read_bytes()[:50])
    again = Known()
    assert OnDisk(again, tmp_path).read(np.arange(20))[0][19].tolist() == [57, 58, 59]


def test_too_little_memory_is_an_error() -> None:
    with pytest.raises(DataError, match=r"20 examples take 0.0 GB, and 0.0 GB .* --cache disk"):
        InMemory(Known(), free_bytes=100)
    assert cache.free_memory() > 1e6


def test_a_folder_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(
        DataError, match=r"--cache disk: .*file/.*: Not a directory. Set TFMULTI_CACHE"
    ):
        OnDisk(Known(), tmp_path / "file" / "below")


@needs_root
def test_a_disk_that_is_too_small_is_an_error_at_once(tmp_path: Path) -> None:
    """If the whole size were not reserved, a write to the mapped file would end the process."""
    with mounted(tmp_path, "256k"):
        # The cache needs 40 KB and the checksums.
        OnDisk(Known(2000, "small"), tmp_path).read(np.arange(2000))
        with pytest.raises(
            DataError, match=r"--cache disk: /.*: No space left on device\. Set TFMULTI"
        ):
            OnDisk(Known(20_000, "large"), tmp_path)
        again = Known(2000, "small")
        assert len(OnDisk(again, tmp_path).read(np.arange(2000))[1]) == 2000
        assert not again.read_rows


def test_text_is_cached_only_in_memory(tmp_path: Path) -> None:
    class Text(ArraySource):
        def identity(self) -> str:
            return "text"

    source = Text((np.array(["a", "bc", "d"]), np.arange(3)))
    assert InMemory(source).read(np.array([1, 1]))[0].tolist() == ["bc", "bc"]
    with pytest.raises(DataError, match="--cache disk takes examples of numbers"):
        OnDisk(source, tmp_path)


def test_data_that_needs_no_cache_is_not_cached() -> None:
    source = Counting(5)
    assert cached(source, "memory") is source


def test_slices_share_the_cache_of_the_whole(tmp_path: Path) -> None:
    source = Known()
    one = SourceSlice(source, 0, 12).changed(lambda s: OnDisk(s, tmp_path))
    one.read(np.arange(12))
    again = Known()
    SourceSlice(again, 10, 20).changed(lambda s: OnDisk(s, tmp_path)).read(np.arange(10))
    assert sorted(again.read_rows) == list(range(12, 20))


def test_the_cache_folder_is_in_the_home_folder_by_default() -> None:
    assert cache_folder({"TFMULTI_CACHE": "/x"}) == Path("/x")
    assert cache_folder({}) == Path("~/.cache/tfmulti").expanduser()

"""Caches examples after they were read once: in memory, or in files that outlive the run.

Each worker caches what it reads. The order of the examples is new in each epoch, so after a few
epochs a worker has cached nearly all examples. In memory the size of the data bounds the cache, and
an example that was not read takes no memory. On disk all workers of a machine share the files, and
so do later runs on the same data.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import psutil

from tfmulti.data.buffers import empty_rows
from tfmulti.data.io.files import cache_folder
from tfmulti.data.source import Leaf, OverSource, Source, leaves_of, map_nest
from tfmulti.errors import DataError

MEMORY, DISK = "memory", "disk"

# This bit is set in each checksum. So a checksum of 0 means that the example is not cached.
_IS_STORED = 1 << 32


class _Cached(OverSource):
    """A source whose examples are cached in arrays after they were read."""

    def __init__(self, source: Source) -> None:
        super().__init__(source)
        self._arrays: Any = None

    def read(self, indices: np.ndarray, epoch: int = 0) -> Any:
        out = empty_rows(self.specs, len(indices))
        self.read_into(indices, epoch, out)
        return out

    def read_into(self, indices: np.ndarray, epoch: int, out: Any) -> None:
        missing = self._load(indices, out)
        if not len(missing):
            return
        if len(missing) == len(indices):
            self.below.read_into(indices, epoch, out)
            self._store(indices, out)
            return
        rows = self.below.read(indices[missing], epoch)
        _put(rows, out, missing)
        self._store(indices[missing], rows)

    def _load(self, indices: np.ndarray, out: Any) -> np.ndarray:
        """Writes the cached examples into `out`, and returns the rows of `out` that are missing."""
        raise NotImplementedError

    def _store(self, indices: np.ndarray, rows: Any) -> None:
        """Caches the values of examples."""
        raise NotImplementedError


class InMemory(_Cached):
    """A source whose examples are cached in memory.

    Args:
        source: the examples.
        free_bytes: the memory that may be taken. None: the memory that is free.

    Attributes:
        most_bytes: the memory that all examples together take.

    Raises:
        DataError: the examples need more memory than is free.
    """

    def __init__(self, source: Source, free_bytes: int | None = None) -> None:
        super().__init__(source)
        self.most_bytes = sum(_bytes_of(leaf) for leaf in leaves_of(source.specs)) * len(source)
        free = free_memory() if free_bytes is None else free_bytes
        if self.most_bytes > free:
            needed_gb, free_gb = self.most_bytes / 1e9, free / 1e9
            raise DataError(
                f"--cache memory: {len(source):,} examples take {needed_gb:,.1f} GB, and "
                f"{free_gb:,.1f} GB of memory are free. Use --cache disk, or smaller examples."
            )
        self._arrays = empty_rows(source.specs, len(source))
        self._is_cached = np.zeros(len(source), bool)

    def _load(self, indices: np.ndarray, out: Any) -> np.ndarray:
        is_cached = self._is_cached[indices]
        if is_cached.all():
            # In its default mode NumPy would buffer the output.
            map_nest(
                lambda array, rows: np.take(array, indices, 0, rows, "clip"), self._arrays, out
            )
        else:
            _copy(self._arrays, indices, out, np.flatnonzero(is_cached))
        return np.flatnonzero(~is_cached)

    def _store(self, indices: np.ndarray, rows: Any) -> None:
        _put(rows, self._arrays, indices)
        # Another thread may read the rows as soon as they are marked, so this comes last.
        self._is_cached[indices] = True


class OnDisk(_Cached):
    """A source whose examples are cached in memory-mapped files, with a checksum for each example.

    Several processes may use the same files. A process that is killed while it writes an example
    leaves a checksum that does not match, and the example is read again.

    Args:
        source: the examples, which have an `identity`.
        folder: the folder in which each data set gets a folder of its own.

    Raises:
        DataError: the examples hold text, or the files cannot be made.
    """

    def __init__(self, source: Source, folder: Path) -> None:
        super().__init__(source)
        if any(leaf.dtype == "str" for leaf in leaves_of(source.specs)):
            raise DataError("--cache disk takes examples of numbers, not text. Use --cache memory.")
        identity = source.identity()
        assert identity is not None
        digest = hashlib.sha256(f"{identity}\n{source.specs}".encode()).hexdigest()[:32]
        self._folder = folder / digest
        count = len(source)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with open(self._folder / ".lock", "w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                numbers = iter(range(len(leaves_of(source.specs))))
                self._arrays = map_nest(
                    lambda leaf: self._file(f"{next(numbers)}", (count, *leaf.shape), leaf.dtype),
                    source.specs,
                )
                self._sums = self._file("sums", (count,), "uint64")
        except OSError as error:
            raise DataError(
                f"--cache disk: {self._folder}: {error.strerror or error}. Set TFMULTI_CACHE to a "
                "folder with space, or leave --cache out."
            ) from None

    def _file(self, name: str, shape: tuple[int, ...], dtype: str) -> np.memmap:
        """Returns a file of the folder, mapped into memory; makes it anew if its size is wrong."""
        path = self._folder / f"{name}.bin"
        size = max(1, int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize)
        if not path.exists() or path.stat().st_size != size:
            with open(path, "wb") as file:
                # The file gets all of its space at once. If the disk were full at a later write to
                # the mapped file, the signal SIGBUS would end the process without a message.
                os.posix_fallocate(file.fileno(), 0, size)
        return np.memmap(path, dtype, "r+", shape=shape)

    def _load(self, indices: np.ndarray, out: Any) -> np.ndarray:
        sums = self._sums[indices]
        stored = np.flatnonzero(sums)
        _copy(self._arrays, indices, out, stored)
        leaves = leaves_of(out)
        is_valid = np.zeros(len(indices), bool)
        for row in stored.tolist():
            is_valid[row] = _checksum(leaves, row) == int(sums[row])
        return np.flatnonzero(~is_valid)

    def _store(self, indices: np.ndarray, rows: Any) -> None:
        rows = map_nest(np.asarray, rows)
        _put(rows, self._arrays, indices)
        leaves = leaves_of(rows)
        self._sums[indices] = [_checksum(leaves, row) for row in range(len(indices))]


def cached(
    source: Source, kind: str, folder: Path | None = None, free_bytes: int | None = None
) -> Source:
    """Returns a source that caches its examples; a source that has nothing to cache stays as it is.

    Raises:
        DataError: the memory is too small, the files cannot be made, or they would have to hold
            text.
    """
    if source.identity() is None:
        return source
    if kind == MEMORY:
        return InMemory(source, free_bytes)
    return OnDisk(source, folder or cache_folder() / "examples")


def free_memory() -> int:
    """Returns the bytes of memory that are free, or that the system can make free."""
    return int(psutil.virtual_memory().available)


def _copy(arrays: Any, indices: np.ndarray, out: Any, rows: np.ndarray) -> None:
    """Copies the examples of some rows of `out` from the arrays of a cache."""

    def copy(array: np.ndarray, into: np.ndarray) -> None:
        into[rows] = array[indices[rows]]

    if len(rows):
        map_nest(copy, arrays, out)


def _put(values: Any, arrays: Any, rows: np.ndarray) -> None:
    """Writes values into some rows of arrays."""

    def put(value: Any, array: np.ndarray) -> None:
        array[rows] = value

    map_nest(put, values, arrays)


def _checksum(leaves: list[np.ndarray], row: int) -> int:
    """Returns a checksum of one row of all leaves; it is never 0."""
    value = 0
    for leaf in leaves:
        value = google_crc32c.extend(value, np.ascontiguousarray(leaf[row]).tobytes())
    return int(value) | _IS_STORED


def _bytes_of(leaf: Leaf) -> int:
    """Returns the bytes that a leaf of one example takes; for text it is a guess."""
    if leaf.dtype == "str":
        return 1000
    return int(np.prod(leaf.shape, dtype=np.int64)) * np.dtype(leaf.dtype).itemsize

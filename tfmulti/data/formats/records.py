"""The records of many TFRecord files as one list of byte strings, read in any order."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from tfmulti.data.formats.record_index import CUT_OFF, FOOTER, HEADER, check_data, index_of
from tfmulti.data.io.files import stamp_of
from tfmulti.data.io.open_files import OpenFiles
from tfmulti.errors import DataError

# The indices of this many files are made at a time, because remote files answer slowly.
_AT_ONCE = 8


class ByteStrings(Protocol):
    """Encoded examples with random access."""

    def __len__(self) -> int: ...

    def read(self, numbers: np.ndarray) -> list[bytes]:
        """Returns the examples with these numbers, in that order."""

    def where(self, number: int) -> str:
        """Returns the file and the record of an example, for messages."""

    def identity(self) -> str:
        """Returns a text that differs if the examples differ."""


class Records:
    """The records of TFRecord files, numbered from 0 over all files. Any thread may read.

    A file may hold any number of records, also none.

    Args:
        paths: the files.
        keep_damage: whether a damaged or cut-off place of a file is a record that cannot be read,
            instead of an error.
        packed: the GZIP files from which `paths` were unpacked, for messages.

    Raises:
        DataError: a file is missing, is not a TFRecord file, or is cut off or damaged, or there
            are no records in any file.
    """

    def __init__(
        self,
        paths: Sequence[str],
        *,
        keep_damage: bool = False,
        packed: Sequence[str] | None = None,
    ) -> None:
        self.paths, self._is_packed = list(paths), packed is not None
        self._names = self.paths if packed is None else list(packed)

        def make(path: str, name: str) -> np.ndarray:
            return index_of(path, keep_damage=keep_damage, name=name)

        with ThreadPoolExecutor(_AT_ONCE, "tfmulti-index") as pool:
            self._indices = list(pool.map(make, self.paths, self._names))
        self._ends = np.cumsum([len(rows) for rows in self._indices])
        self._open = OpenFiles()
        if not len(self):
            what = self._names[0] if len(self.paths) == 1 else f"all {len(self.paths)} files of it"
            raise DataError(f"there are no records in {what}. Give files that hold some.")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, numbers: np.ndarray) -> list[bytes]:
        """Returns the data of the records with these numbers, in that order.

        Raises:
            DataError: a checksum is wrong, or the file is cut off.
            OSError: a file cannot be read.
        """
        return [self._read_one(*self._place(int(number))) for number in numbers]

    def where(self, number: int) -> str:
        """Returns the file of a record, and its number in that file, from 0."""
        file, row = self._place(number)
        return f"{self._names[file]}, record {row}"

    def identity(self) -> str:
        """Returns the names, sizes and times of the files."""
        return "\n".join(f"{path} {stamp_of(path)}" for path in self.paths)

    def _place(self, number: int) -> tuple[int, int]:
        """Returns the index of the file of a record, and its number in that file."""
        file = int(np.searchsorted(self._ends, number, side="right"))
        return file, number - int(self._ends[file]) + len(self._indices[file])

    def _read_one(self, file: int, row: int) -> bytes:
        """Returns the data of one record; raises DataError if it is damaged."""
        offset, length = self._indices[file][row].tolist()
        if length < 0:
            raise DataError(_damage_words(self._indices[file], row, self._is_packed))
        found = self._open.get(self.paths[file]).read_at(offset, length + FOOTER)
        data = found[:length]
        if len(found) != length + FOOTER:
            raise DataError("the file has become shorter since it was opened")
        check_data(data, found[length:])
        return data


def _damage_words(rows: np.ndarray, row: int, is_packed: bool) -> str:
    """Returns why a damaged record of an index cannot be read."""
    start, damage = rows[row].tolist()
    if damage == CUT_OFF and is_packed:
        return (
            "the GZIP file is cut off or damaged in it; what follows, up to its end, counts as one "
            "record"
        )
    if damage == CUT_OFF:
        return "the file is cut off in it"
    lost = "what follows, up to the end of the file,"
    if row + 1 < len(rows):
        lost = f"what follows, {int(rows[row + 1, 0]) - HEADER - start:,} bytes up to the next one,"
    return f"the checksum of its length is wrong (the file is damaged); {lost} counts as one record"

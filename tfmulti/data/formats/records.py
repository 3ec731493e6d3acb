"""The records of many TFRecord files as one list of byte strings, read in any order."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import numpy as np

from tfmulti.data.formats.record_index import FOOTER, check_data, index_of
from tfmulti.data.io import files
from tfmulti.data.io.open_files import opener
from tfmulti.errors import DataError

# The indices of this many files are made at a time, because remote files answer slowly.
_INDEX_THREADS = 8


class ByteStrings(Protocol):
    """Encoded examples with random access."""

    def __len__(self) -> int: ...

    def read(self, numbers: np.ndarray) -> list[bytes]:
        """Returns the examples with these numbers, in that order.

        Raises:
            DataError: an example is damaged.
            OSError: a file cannot be read.
        """

    def where(self, number: int) -> str:
        """Returns the file and the record of an example, for messages."""

    def identity(self) -> str:
        """Returns a text that differs if the examples differ."""


class Records(ByteStrings):
    """The records of TFRecord files, numbered from 0 over all files. Any thread may read.

    A file may hold any number of records, also none.

    Args:
        paths: the files.

    Raises:
        DataError: a file is missing, is not a TFRecord file, or is cut off or damaged, or there
            are no records in any file.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = list(paths)
        with ThreadPoolExecutor(_INDEX_THREADS, "tfmulti-index") as thread_pool:
            self._indices = list(thread_pool.map(index_of, self.paths))
        self._ends = np.cumsum([len(rows) for rows in self._indices])
        self._open = opener()
        if not len(self):
            names = self.paths[0] if len(self.paths) == 1 else f"all {len(self.paths)} files of it"
            raise DataError(f"there are no records in {names}. Give files that hold some.")

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, numbers: np.ndarray) -> list[bytes]:
        return [self._read_one(*files.locate(self._ends, number)) for number in numbers.tolist()]

    def where(self, number: int) -> str:
        file, row = files.locate(self._ends, number)
        return f"{self.paths[file]}, record {row}"

    def identity(self) -> str:
        return files.identity_of(self.paths)

    def _read_one(self, file: int, row: int) -> bytes:
        """Returns the data of one record; raises DataError if it is damaged."""
        offset, length = self._indices[file][row].tolist()
        content = self._open(self.paths[file]).read_at(offset, length + FOOTER)
        data, footer = content[:length], content[length:]
        if len(footer) != FOOTER:
            raise DataError("the file has become shorter since it was opened")
        check_data(data, footer)
        return data

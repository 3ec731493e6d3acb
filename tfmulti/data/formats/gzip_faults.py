"""Finds the bad record in GZIP-compressed TFRecord files after a stream of them has failed.

TensorFlow's error tells of a bad record by its bytes alone. So the files are read again in Python,
one record after the other, up to the first one that cannot be read.
"""

from __future__ import annotations

import gzip
import struct
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from tfmulti.config.limited_reading import open_regular
from tfmulti.data.formats.encoded import Decoder
from tfmulti.data.formats.record_index import FOOTER, HEADER, check_data, is_header
from tfmulti.data.io.files import MOST_BYTES, as_os_error, gfile, is_remote

# For each stream the function that finds its fault.
_FINDERS: weakref.WeakKeyDictionary[Any, Callable[[], str | None]] = weakref.WeakKeyDictionary()


def remember(dataset: Any, paths: Sequence[str], decoder: Decoder) -> None:
    """Keeps the files and the decoder of a stream for `fault_of`, as long as the stream exists."""
    _FINDERS[dataset] = lambda: find_fault(paths, decoder)


def fault_of(dataset: Any) -> str | None:
    """Returns the first fault in the files of a stream, or None; it reads the files.

    It returns None for data that `remember` does not know.
    """
    find = _FINDERS.get(dataset)
    return None if find is None else find()


def find_fault(paths: Sequence[str], decoder: Decoder) -> str | None:
    """Returns the file, the record and the reason of the first fault, or None."""
    for path in paths:
        number = 0
        try:
            for record in _records(path):
                decoder.decode([record])
                number += 1
        except EOFError:
            return f"{path}, record {number}: the file is cut off in it"
        except (OSError, zlib.error, ValueError) as error:
            return f"{path}, record {number}: {error}"
    return None


def _records(path: str) -> Iterator[bytes]:
    """Yields the records of a file.

    Raises:
        EOFError: the file ends within a record.
        OSError: it is not a GZIP file, or it cannot be read.
        ValueError: a checksum is wrong, or a record is too large.
    """
    source: Any = gfile().GFile(path, "rb") if is_remote(path) else open_regular(path)
    with as_os_error(), source, gzip.GzipFile(fileobj=source) as file:
        while header := file.read(HEADER):
            if len(header) < HEADER:
                raise EOFError
            if not is_header(header):
                raise ValueError("the checksum of its length is wrong (the file is damaged)")
            yield _record(file, struct.unpack("<Q", header[:8])[0])


def _record(file: BinaryIO | gzip.GzipFile, length: int) -> bytes:
    """Returns the data of the next record, whose header was read; checks its checksum."""
    if length > MOST_BYTES:
        raise ValueError(f"it has {length:,} bytes, more than {MOST_BYTES:,}")
    data, footer = file.read(length), file.read(FOOTER)
    if len(data) < length or len(footer) < FOOTER:
        raise EOFError
    check_data(data, footer)
    return data

"""Which record of GZIP-compressed TFRecord files cannot be read: looked for where one could not."""

from __future__ import annotations

import gzip
import struct
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from tfmulti.data.formats.encoded import Decoder
from tfmulti.data.formats.record_index import FOOTER, HEADER, check_data, is_header
from tfmulti.data.io.files import MOST_BYTES, as_os_error, gfile, is_remote, open_regular

# Of each stream: what finds its fault. A Dataset of TensorFlow's tells of none but by its bytes.
_FINDERS: weakref.WeakKeyDictionary[Any, Callable[[], str | None]] = weakref.WeakKeyDictionary()


def remember(dataset: Any, paths: Sequence[str], decoder: Decoder) -> None:
    """Notes what a stream is made of, for `fault_of`."""
    _FINDERS[dataset] = lambda: find_fault(paths, decoder)


def fault_of(dataset: Any) -> str | None:
    """Returns the first fault of the files of a stream; reads them. None of other data."""
    find = _FINDERS.get(dataset)
    return None if find is None else find()


def find_fault(paths: Sequence[str], decoder: Decoder) -> str | None:
    """Returns file, record and reason of what cannot be read first, or None."""
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
        EOFError: it ends within one.
        OSError: it is no GZIP file, or cannot be read.
        ValueError: a checksum is wrong.
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
    if length > MOST_BYTES:
        raise ValueError(f"it has {length:,} bytes, more than {MOST_BYTES:,}")
    data, footer = file.read(length), file.read(FOOTER)
    if len(data) < length or len(footer) < FOOTER:
        raise EOFError
    check_data(data, footer)
    return data

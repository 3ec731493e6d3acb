"""The positions of the records of a TFRecord file, found once and stored beside the file.

A record is a header, the data and a footer. The header is the length of the data (8 bytes) and a
checksum of the length. The footer is a checksum of the data
(tensorflow/core/lib/io/record_writer.h). The index is made from the headers alone, one after the
other. A record larger than 4 KiB costs one read of 4 KiB.

The index is stored as a NumPy array, int64 [3 + n, 2]:

    row 0      the size and the modification time of the file
    row 1      n, the number of records, and a checksum of the rows below row 2
    row 2      the version of this format, and 0
    others     the offset and the length of the data of one record

An index that does not match its file is made again. A file whose records cannot all be found is an
error: its length fields are damaged, or it is cut off.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
from array import array
from collections.abc import Mapping
from pathlib import Path

import google_crc32c
import numpy as np

from tfmulti.data.formats.npy_format import array_of
from tfmulti.data.io.files import Stamp, cache_folder, is_remote, read_bytes, stamp_of
from tfmulti.data.io.open_files import File, open_file, write_atomically
from tfmulti.errors import DataError

# The bytes before and after the data of a record.
HEADER, FOOTER = 12, 4
_VERSION = 3
_BLOCK = 4096
_MASK, _WORD = 0xA282EAD8, 0xFFFFFFFF


def index_of(path: str, env: Mapping[str, str] = os.environ) -> np.ndarray:
    """Returns the offset and the length of the data of each record of a file, int64 [n, 2].

    Raises:
        DataError: the file is missing, is not a TFRecord file, or is cut off or damaged.
    """
    try:
        stamp = stamp_of(path)
        candidates = index_paths(path, env)
        for index_path in candidates:
            index = _read_index(index_path, stamp)
            if index is not None:
                return index
        rows = _walk(path, open_file(path), stamp.size)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}. Give a readable file.") from None
    # The folder of the file may not be writable, so the cache folder is the second choice.
    for index_path in candidates:
        if _write_index(index_path, stamp, rows):
            break
    return rows


def index_paths(path: str, env: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Returns the two possible paths of a file's index: beside it, and in the cache folder."""
    folder, name = os.path.split(path)
    absolute_path = path if is_remote(path) else os.path.abspath(path)
    path_digest = hashlib.sha256(absolute_path.encode()).hexdigest()[:16]
    ending = f"{name}.tfmulti-index.npy"
    return os.path.join(folder, f".{ending}"), str(cache_folder(env) / f"{path_digest}-{ending}")


def checksum(data: bytes) -> int:
    """Returns the checksum of TFRecord files: CRC-32C rotated right by 15 bits, plus a constant."""
    crc = google_crc32c.value(data)
    return int(((crc >> 15 | crc << 17) + _MASK) & _WORD)


def check_data(data: bytes, footer: bytes) -> None:
    """Checks the data of a record against its footer.

    Raises:
        DataError: the checksum differs.
    """
    if struct.unpack("<I", footer)[0] != checksum(data):
        raise DataError("the checksum is wrong (the file is damaged)")


def is_header(data: bytes) -> bool:
    """Returns whether 12 bytes are the length of a record and the checksum of it."""
    return len(data) == HEADER and struct.unpack("<I", data[8:])[0] == checksum(data[:8])


def _walk(path: str, file: File, size: int) -> np.ndarray:
    """Returns the index of a file, made from the headers of its records.

    Raises:
        DataError: the file is damaged or cut off.
    """
    positions, records, offset = array("q"), 0, 0
    block, start = b"", 0
    while offset < size:
        if not start <= offset <= start + len(block) - HEADER:
            block, start = file.read_at(offset, _BLOCK), offset
        header = block[offset - start : offset - start + HEADER]
        if not is_header(header):
            is_cut_off = records > 0 and len(header) < HEADER
            raise DataError(_damage_message(path, records, is_cut_off))
        length = int(struct.unpack("<Q", header[:8])[0])
        if HEADER + length + FOOTER > size - offset:
            raise DataError(_damage_message(path, records, True))
        positions.extend((offset + HEADER, length))
        records, offset = records + 1, offset + HEADER + length + FOOTER
    return np.array(positions, np.int64).reshape(-1, 2)


def _damage_message(path: str, record: int, is_cut_off: bool) -> str:
    """Returns the message about a damaged record."""
    if is_cut_off:
        message = f"{path} is cut off in record {record}, after {record} whole ones."
    elif record == 0:
        return (
            f"{path} is not a TFRecord file, or its first record is damaged. Give TFRecord files."
        )
    else:
        message = (
            f"{path}, record {record}: the checksum of its length is wrong, so what follows cannot "
            "be found (the file is damaged)."
        )
    return f"{message} Copy or write the file anew."


def _read_index(index_path: str, stamp: Stamp) -> np.ndarray | None:
    """Returns the index in a file, or None if it does not match the records' file."""
    try:
        table = array_of(read_bytes(index_path))
    except (OSError, ValueError):
        return None
    if table.dtype != np.int64 or table.ndim != 2 or table.shape[1] != 2 or len(table) < 3:
        return None
    rows: np.ndarray = table[3:]
    return rows if np.array_equal(table[:3], _heads(stamp, rows)) else None


def _heads(stamp: Stamp, rows: np.ndarray) -> np.ndarray:
    """Returns the first three rows of a stored index."""
    return np.array([stamp, (len(rows), checksum(rows.tobytes())), (_VERSION, 0)], np.int64)


def _write_index(index_path: str, stamp: Stamp, rows: np.ndarray) -> bool:
    """Writes an index to a file, and returns whether that was possible."""
    content = io.BytesIO()
    np.save(content, np.concatenate([_heads(stamp, rows), rows]), allow_pickle=False)
    try:
        if not is_remote(index_path):
            Path(index_path).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(index_path, content.getvalue())
    except OSError:
        return False
    return True

"""The positions of the records of a TFRecord file, found once and kept beside the file.

A record is a header, the data and a footer. The header is the length of the data (8 bytes) and a
checksum of the length. The footer is a checksum of the data
(tensorflow/core/lib/io/record_writer.h). The index is made from the headers alone, one after the
other. A record larger than 4 KiB costs one read of 4 KiB.

The index is kept as a NumPy array, int64 [3 + n, 2]:

    row 0      the size and the modification time of the file
    row 1      n, the number of records, and a checksum of the rows below row 2
    row 2      the version of this format, and 0
    others     the offset and the length of the data of one record

An index that does not match its file is made again.

An entry for a damaged place has `CUT_OFF` or `WRONG_LENGTH` in place of the length. Its offset is
that of the place where a header should be. All bytes up to the next possible header count as one
bad record.
"""

from __future__ import annotations

import functools
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
from tfmulti.data.io.open_files import File, open_file, write_whole
from tfmulti.errors import DataError

# The bytes before and after the data of a record.
HEADER, FOOTER = 12, 4
# They stand in place of the length of a damaged record.
CUT_OFF, WRONG_LENGTH = -1, -2
_VERSION = 2
_BLOCK, _MOST_SEARCHED = 4096, 1 << 20
_NEXT_STEP = (
    "Copy or write the file anew, or give --skip_bad_records N to leave out up to N such records."
)
_MASK, _WORD = 0xA282EAD8, 0xFFFFFFFF


def index_of(
    path: str,
    env: Mapping[str, str] = os.environ,
    *,
    keep_damage: bool = False,
    name: str | None = None,
) -> np.ndarray:
    """Returns the offset and the length of the data of each record of a file, int64 [n, 2].

    Args:
        path: the file.
        env: the environment, which may name the cache folder.
        keep_damage: whether a damaged place is an entry instead of an error. Its length is then
            `CUT_OFF` or `WRONG_LENGTH`.
        name: the name of the file in messages. None: its path.

    Raises:
        DataError: the file is missing, is not a TFRecord file, or is cut off or damaged. With
            `keep_damage`, damage is an error only if no header is found in the whole file.
    """
    name = path if name is None else name
    rows = _found(path, env, keep_damage, name)
    if not keep_damage:
        _check_whole(name, rows)
    return rows


def _found(path: str, env: Mapping[str, str], keep_damage: bool, name: str) -> np.ndarray:
    """Returns the kept index of a file, or makes and keeps one."""
    try:
        stamp = stamp_of(path)
        places = index_places(path, env)
        for place in places:
            kept = _kept(place, stamp)
            if kept is not None:
                return kept
        rows = _walk(name, open_file(path), stamp.size, keep_damage)
    except OSError as error:
        raise DataError(f"{name}: {error.strerror or error}. Give a readable file.") from None
    # The folder of the file may not be writable, so the cache folder is the second choice.
    for place in places:
        if _keep(place, stamp, rows):
            break
    return rows


def index_places(path: str, env: Mapping[str, str] = os.environ) -> tuple[str, str]:
    """Returns the two possible paths of a file's index: beside it, and in the cache folder."""
    folder, name = os.path.split(path)
    whole = path if is_remote(path) else os.path.abspath(path)
    known = hashlib.sha256(whole.encode()).hexdigest()[:16]
    ending = f"{name}.tfmulti-index.npy"
    return os.path.join(folder, f".{ending}"), str(cache_folder(env) / f"{known}-{ending}")


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


def _walk(name: str, file: File, size: int, keep_damage: bool) -> np.ndarray:
    """Returns the index of a file, made from the headers of its records.

    Without `keep_damage` the first damaged place raises DataError.
    """
    found, records, at = array("q"), 0, 0
    block, start = b"", 0
    while at < size:
        if not start <= at <= start + len(block) - HEADER:
            block, start = file.read_at(at, _BLOCK), at
        length = _length_of(block[at - start : at - start + HEADER], size - at, records)
        if length >= 0:
            found.extend((at + HEADER, length))
            end = at + HEADER + length + FOOTER
        else:
            end = size if length == CUT_OFF or not keep_damage else _search(file, at + 1, size)
            if not keep_damage or (records == 0 and length == WRONG_LENGTH and end == size):
                raise DataError(_damage_words(name, records, length))
            found.extend((at, length))
        records, at = records + 1, end
    return np.frombuffer(found, np.int64).reshape(-1, 2) if found else np.empty((0, 2), np.int64)


def _length_of(header: bytes, left: int, record: int) -> int:
    """Returns the length that a header gives, or `CUT_OFF` or `WRONG_LENGTH` if it is damaged.

    `left` is the number of bytes from the header to the end of the file.
    """
    if len(header) < HEADER:
        return CUT_OFF if record else WRONG_LENGTH
    if not is_header(header):
        return WRONG_LENGTH
    length = int(struct.unpack("<Q", header[:8])[0])
    return length if HEADER + length + FOOTER <= left else CUT_OFF


def _search(file: File, at: int, size: int) -> int:
    """Returns the offset of the next header whose record fits in the file, or `size` if none does.

    One byte in 2^32 of a damaged file looks like a header by chance, and far fewer of these give a
    length that fits.
    """
    step = _BLOCK
    while at + HEADER + FOOTER <= size:
        step = min(2 * step, _MOST_SEARCHED)
        block = file.read_at(at, step + HEADER - 1)
        found = _headers_in(block, size - at)
        if len(found):
            return at + int(found[0])
        at += step
    return size


def _headers_in(block: bytes, left: int) -> np.ndarray:
    """Returns the offsets in a block of all headers whose record fits in `left` bytes, int64."""
    count = len(block) - HEADER + 1
    if count < 1:
        return np.empty(0, np.int64)
    # Strides of 1 read a length and a checksum at each byte of the block, without a copy.
    lengths = np.ndarray(count, "<u8", block, strides=(1,))
    sums = np.ndarray(count, "<u4", block, 8, strides=(1,))
    room = left - HEADER - FOOTER - np.arange(count)
    places = np.flatnonzero(lengths <= np.maximum(room, 0).astype(np.uint64))
    places = places[room[places] >= 0]
    found: np.ndarray = places[checksums(lengths[places]) == sums[places]]
    return found


def checksums(lengths: np.ndarray) -> np.ndarray:
    """Returns the `checksum` of each length, uint32 [n]; the lengths are uint64 [n]."""
    crc = np.full(len(lengths), google_crc32c.value(bytes(8)), np.uint32)
    for table in _tables():
        # A byte of 0 changes nothing, so the higher bytes of short lengths need no look-up.
        if not lengths.any():
            break
        crc ^= table[lengths & np.uint64(0xFF)]
        lengths = lengths >> np.uint64(8)
    return (crc >> np.uint32(15) | crc << np.uint32(17)) + np.uint32(_MASK)


@functools.cache
def _tables() -> np.ndarray:
    """Returns how each value of each of 8 bytes changes their CRC-32C, uint32 [8, 256].

    The CRC of several changes is the exclusive or of their effects.
    """
    none = google_crc32c.value(bytes(8))
    rows = [[google_crc32c.value(_one(i, v)) ^ none for v in range(256)] for i in range(8)]
    return np.array(rows, np.uint32)


def _one(place: int, value: int) -> bytes:
    """Returns 8 bytes that are 0 except for one byte."""
    return bytes(place) + bytes([value]) + bytes(7 - place)


def _check_whole(name: str, rows: np.ndarray) -> None:
    """Raises DataError if an entry of an index is damaged."""
    damaged = np.flatnonzero(rows[:, 1] < 0)
    if len(damaged):
        first = int(damaged[0])
        raise DataError(_damage_words(name, first, int(rows[first, 1])))


def _damage_words(name: str, record: int, damage: int) -> str:
    """Returns the message about a damaged record."""
    if damage == CUT_OFF:
        return f"{name} is cut off in record {record}, after {record} whole ones. {_NEXT_STEP}"
    if record == 0:
        return f"{name} is no TFRecord file, or its first record is damaged. Give TFRecord files."
    return (
        f"{name}, record {record}: the checksum of its length is wrong, so what follows cannot be "
        f"found (the file is damaged). {_NEXT_STEP}"
    )


def _kept(place: str, stamp: Stamp) -> np.ndarray | None:
    """Returns the index that is kept at a place, or None if it does not match the file."""
    try:
        table = array_of(read_bytes(place))
    except (OSError, ValueError):
        return None
    if table.dtype != np.int64 or table.ndim != 2 or table.shape[1] != 2 or len(table) < 3:
        return None
    rows: np.ndarray = table[3:]
    return rows if np.array_equal(table[:3], _heads(stamp, rows)) else None


def _heads(stamp: Stamp, rows: np.ndarray) -> np.ndarray:
    """Returns the first three rows of a kept index."""
    return np.array([stamp, (len(rows), checksum(rows.tobytes())), (_VERSION, 0)], np.int64)


def _keep(place: str, stamp: Stamp, rows: np.ndarray) -> bool:
    """Writes an index to a place, and returns whether that was possible."""
    content = io.BytesIO()
    np.save(content, np.concatenate([_heads(stamp, rows), rows]), allow_pickle=False)
    try:
        if not is_remote(place):
            Path(place).parent.mkdir(parents=True, exist_ok=True)
        write_whole(place, content.getvalue())
    except OSError:
        return False
    return True

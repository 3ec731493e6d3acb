"""GZIP files that are unpacked once, into the cache folder, so that they can be read at any offset.

A damaged file is unpacked up to the damage. One more byte at the end then makes it look like a
TFRecord file that is cut off. A checksum that is wrong only at the end of the GZIP data does not
count as damage, because records have checksums of their own.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tfmulti.config.run_directory import replacing
from tfmulti.data.io.files import Stamp, cache_folder, is_remote, stamp_of
from tfmulti.data.io.open_files import File, open_file
from tfmulti.errors import DataError

# A GZIP file begins with these bytes.
GZIP = b"\x1f\x8b"
_BLOCK = 1 << 16
# This many files are unpacked at a time, because zlib releases Python's lock.
_AT_ONCE = 4
# The bytes at the end of GZIP data: a checksum and the length.
_TRAILER = 8
# One byte is shorter than the header of a record, so the file ends within a record.
_CUT_OFF = b"\0"


def folder_of(env: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder for unpacked files."""
    return cache_folder(env) / "unpacked"


def unpack(paths: Sequence[str], env: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the paths of the unpacked GZIP files; unpacks those that are not there yet.

    The workers of one machine share them, and so do later runs, until the GZIP file changes.

    Raises:
        DataError: a file cannot be read, or its content cannot be written.
    """
    with ThreadPoolExecutor(_AT_ONCE, "tfmulti-unpack") as pool:
        return list(pool.map(lambda path: _unpacked(path, folder_of(env)), paths))


def _unpacked(path: str, folder: Path) -> str:
    """Returns the path of one unpacked file."""
    try:
        stamp = stamp_of(path)
        file = open_file(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}. Give a readable file.") from None
    whole = path if is_remote(path) else os.path.abspath(path)
    known = hashlib.sha256(f"{whole} {stamp}".encode()).hexdigest()[:32]
    target = folder / f"{known}-{os.path.basename(path).removesuffix('.gz')}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / f".{known}.lock", "w") as lock:
            # One worker of the machine unpacks the file, and the others wait for it.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                with replacing(target) as partial, open(partial, "wb") as out:
                    for data in pieces(file, stamp):
                        out.write(data)
    except OSError as error:
        raise DataError(
            f"{path} cannot be unpacked to {folder}: {error.strerror or error}. Set TFMULTI_CACHE "
            "to a folder with space, gunzip the file, or leave --skip_bad_records out."
        ) from None
    return str(target)


def pieces(file: File, stamp: Stamp) -> Iterator[bytes]:
    """Yields the content of a GZIP file, and one byte more if it cannot be unpacked to its end.

    Args:
        file: the GZIP file.
        stamp: its size and modification time.

    Raises:
        OSError: the file cannot be read.
    """
    packed, at = _inflater(), 0
    while at < stamp.size and (block := file.read_at(at, _BLOCK)):
        at += len(block)
        while block:
            # A failed call returns nothing, so the block is then unpacked again byte by byte.
            before = packed.copy()
            try:
                yield packed.decompress(block)
            except zlib.error:
                found, left = _until_damage(before, block)
                yield found
                if left + stamp.size - at >= _TRAILER:
                    yield _CUT_OFF
                return
            # A file may have several GZIP members, and zeros may fill up its last block.
            block = packed.unused_data.lstrip(b"\0")
            if block:
                packed = _inflater()
    if stamp.size and not packed.eof:
        yield _CUT_OFF


def _inflater() -> Any:
    """Returns a decompressor of GZIP data."""
    return zlib.decompressobj(wbits=31)


def _until_damage(packed: Any, block: bytes) -> tuple[bytes, int]:
    """Returns what a block holds before its damage, and how many bytes remain from there on."""
    found = []
    for i in range(len(block)):
        try:
            found.append(packed.decompress(block[i : i + 1]))
        except zlib.error:
            return b"".join(found), len(block) - i
    raise AssertionError("the block is not damaged")

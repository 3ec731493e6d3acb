"""GZIP files unpacked once, into the cache folder: then they can be read at any place.

Of a file that is damaged as much is unpacked as can be, and what is missing shows as a file that
is cut off: it ends with one byte more. A wrong checksum at the end of the GZIP data alone is no
damage here, since records have checksums of their own.
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

GZIP = b"\x1f\x8b"  # how such a file begins
_BLOCK = 1 << 16
_AT_ONCE = 4  # files; zlib leaves Python's lock
_TRAILER = 8  # bytes at the end of GZIP data: checksum and length
_CUT_OFF = b"\0"  # less than the header of a record


def folder_of(env: Mapping[str, str] = os.environ) -> Path:
    """Returns where files are unpacked to."""
    return cache_folder(env) / "unpacked"


def unpack(paths: Sequence[str], env: Mapping[str, str] = os.environ) -> list[str]:
    """Returns the paths of what GZIP files hold; unpacks those that are not there yet.

    Workers of one machine share them, and so do later runs, until the file changes.

    Raises:
        DataError: one cannot be read, or not be written.
    """
    with ThreadPoolExecutor(_AT_ONCE, "tfmulti-unpack") as pool:
        return list(pool.map(lambda path: _unpacked(path, folder_of(env)), paths))


def _unpacked(path: str, folder: Path) -> str:
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
    """Yields what a GZIP file holds, with one byte more where that cannot be unpacked to its end.

    Raises:
        OSError: it cannot be read.
    """
    packed, at = _inflater(), 0
    while at < stamp.size and (block := file.read_at(at, _BLOCK)):
        at += len(block)
        while block:
            before = packed.copy()
            try:
                yield packed.decompress(block)
            except zlib.error:
                found, left = _until_damage(before, block)
                yield found
                if left + stamp.size - at >= _TRAILER:
                    yield _CUT_OFF
                return
            block = packed.unused_data.lstrip(b"\0")  # zeros may fill up its last block
            if block:
                packed = _inflater()
    if stamp.size and not packed.eof:
        yield _CUT_OFF


def _inflater() -> Any:
    return zlib.decompressobj(wbits=31)  # of GZIP data


def _until_damage(packed: Any, block: bytes) -> tuple[bytes, int]:
    """Returns what a block holds before it is damaged, and how many bytes come after that."""
    found = []
    for i in range(len(block)):
        try:
            found.append(packed.decompress(block[i : i + 1]))
        except zlib.error:
            return b"".join(found), len(block) - i
    raise AssertionError("the block is not damaged")

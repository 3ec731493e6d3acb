"""Reads files and numbers that other programs or other users wrote, with limits.

A path may lead to a named pipe, to a device, or to a file of any size, and a text may hold a number
with any number of digits.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import IO

_PIECE_BYTES = 1 << 20
# The longest number that `whole_number` accepts. It is far more than any count of processes.
_MOST_DIGITS = 9


def open_regular(path: str | os.PathLike[str]) -> IO[bytes]:
    """Returns a file of this machine, open for reading.

    Raises:
        OSError: the file cannot be opened, or is a named pipe or a device, which may have no end.
    """
    try:
        file = open(path, "rb", opener=_open_without_blocking)  # noqa: SIM115
    except ValueError:
        # Python refuses a path with a zero byte.
        raise FileNotFoundError(errno.ENOENT, "no such file", path) from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    return file


def read_small(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """Returns the content of a regular file of this machine.

    Args:
        path: the file.
        most_bytes: the largest size in bytes.

    Raises:
        OSError: the file cannot be read, is larger, or is a named pipe or a device.
    """
    with open_regular(path) as file:
        # A sparse file of any size takes no place on the disk, so the size is checked first.
        size = os.fstat(file.fileno()).st_size
        if size <= most_bytes:
            # Python takes memory for as many bytes as `read` is asked for.
            content = file.read(size + 1)
            # The size of a file in /proc or /sys is not known, and another file may have grown.
            while len(content) <= most_bytes and (piece := file.read(_PIECE_BYTES)):
                content += piece
            if len(content) <= most_bytes:
                return content
    raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", path)


def whole_number(text: str) -> int | None:
    """Returns the number that at most nine ASCII digits write, or None for any other text.

    >>> whole_number("12"), whole_number("²"), whole_number("9" * 5000), whole_number("-1")
    (12, None, None, None)
    """
    is_number = text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
    return int(text) if is_number else None


def _open_without_blocking(path: str, flags: int) -> int:
    """Opens a file; without the flag, opening a named pipe would wait for a writer."""
    return os.open(path, flags | os.O_NONBLOCK)

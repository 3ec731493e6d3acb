"""Files that are read at any offset, on this machine or in TensorFlow's file systems.

    LocalFile     a path: `pread`, which any number of threads may call at once
    RemoteFile    gs://…, s3://…, ram://…, file://…: `tf.io.gfile`, one thread at a time

TensorFlow is imported only when the first remote path is used.
"""

from __future__ import annotations

import functools
import os
import threading
import uuid
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from tfmulti.config.limited_reading import open_regular
from tfmulti.config.run_directory import replacing
from tfmulti.data.io.files import as_os_error, gfile, is_remote

# One source keeps at most this many files open.
MOST_OPEN = 64


class File(Protocol):
    """A file that is open for reading."""

    def read_at(self, offset: int, length: int) -> bytes:
        """Returns `length` bytes from `offset` on, or fewer at the end of the file."""


class LocalFile(File):
    """A file of this machine. It is closed when nothing refers to it."""

    def __init__(self, path: str) -> None:
        file = open_regular(path)
        self._path, self._descriptor = path, file.fileno()
        weakref.finalize(self, file.close)

    def read_at(self, offset: int, length: int) -> bytes:
        data = self._read(offset, length)
        # One call returns at most 2 GiB.
        while 0 < len(data) < length:
            more = self._read(offset + len(data), length - len(data))
            if not more:
                break
            data += more
        return data

    def _read(self, offset: int, length: int) -> bytes:
        """Calls `pread`, whose errors do not name the file."""
        try:
            return os.pread(self._descriptor, length, offset)
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._path) from None


class RemoteFile(File):
    """A file that `tf.io.gfile` reads. It has one position, so threads take turns."""

    def __init__(self, path: str) -> None:
        with as_os_error():
            self._file = gfile().GFile(path, "rb")
        self._turn = threading.Lock()

    def read_at(self, offset: int, length: int) -> bytes:
        with self._turn, as_os_error():
            self._file.seek(offset)
            data: bytes = self._file.read(length)
            return data


def open_file(path: str) -> File:
    """Returns a file that is open for reading.

    Raises:
        OSError: the file cannot be opened.
    """
    return RemoteFile(path) if is_remote(path) else LocalFile(path)


def opener(most: int = MOST_OPEN) -> Callable[[str], File]:
    """Returns a function like `open_file` that keeps open the files that were read last.

    At most `most` files stay open. A file that is dropped is closed when the threads that read it
    are done. Any thread may call the function.
    """
    return functools.lru_cache(most)(open_file)


def write_atomically(path: str, data: bytes) -> None:
    """Writes a complete file or none at all; several processes may write the same one.

    Raises:
        OSError: the file cannot be written.
    """
    if not is_remote(path):
        with replacing(Path(path)) as local:
            local.write_bytes(data)
        return
    folder, name = os.path.split(path)
    # Each writer has a partial file of its own, and renaming replaces the file at once.
    partial = os.path.join(folder, f".partial-{uuid.uuid4().hex}-{name}")
    remote = gfile()
    with as_os_error():
        with remote.GFile(partial, "wb") as file:
            file.write(data)
        remote.rename(partial, path, overwrite=True)

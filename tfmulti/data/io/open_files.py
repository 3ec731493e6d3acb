"""Files to read at any place: on this machine, or wherever TensorFlow's file systems reach.

    LocalFile     a path: `pread`, which any number of threads may call at once
    RemoteFile    gs://…, s3://…, ram://…, file://…: `tf.io.gfile`, one thread at a time

TensorFlow is imported when the first such path is used, and not before.
"""

from __future__ import annotations

import os
import threading
import uuid
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Protocol

from tfmulti.data.io.files import as_os_error, gfile, is_remote, open_regular

MOST_OPEN = 64  # files that one source keeps open


class File(Protocol):
    """A file that is open for reading."""

    def read_at(self, offset: int, length: int) -> bytes:
        """Returns the bytes from `offset` on; fewer than `length` at the end of the file."""


class LocalFile:
    """A file of this machine. It is closed when nobody holds it any more."""

    def __init__(self, path: str) -> None:
        file = open_regular(path)
        self._descriptor = file.fileno()
        weakref.finalize(self, file.close)

    def read_at(self, offset: int, length: int) -> bytes:
        data = os.pread(self._descriptor, length, offset)
        while 0 < len(data) < length:  # one call gives at most 2 GiB
            more = os.pread(self._descriptor, length - len(data), offset + len(data))
            if not more:
                break
            data += more
        return data


class RemoteFile:
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


class OpenFiles:
    """The files that were read last, kept open; at most `most` of them.

    A file that gives way is closed when the threads that read it are done.
    """

    def __init__(self, most: int = MOST_OPEN) -> None:
        self._most, self._files = most, OrderedDict[str, File]()
        self._change = threading.Lock()

    def __len__(self) -> int:
        return len(self._files)

    def get(self, path: str) -> File:
        """Returns the open file of a path.

        Raises:
            OSError: it cannot be opened.
        """
        with self._change:
            if path in self._files:
                self._files.move_to_end(path)
                return self._files[path]
        file = open_file(path)  # may take long: other files go on meanwhile
        with self._change:
            file = self._files.setdefault(path, file)
            while len(self._files) > self._most:
                self._files.popitem(last=False)
        return file


def open_file(path: str) -> File:
    """Returns a file to read.

    Raises:
        OSError: it cannot be opened.
    """
    return RemoteFile(path) if is_remote(path) else LocalFile(path)


def write_whole(path: str, data: bytes) -> None:
    """Writes a file whole or not at all; several processes may write the same one.

    Raises:
        OSError: it cannot be written.
    """
    folder, name = os.path.split(path)
    partial = os.path.join(folder, f".partial-{uuid.uuid4().hex}-{name}")
    if is_remote(path):
        remote = gfile()
        with as_os_error():
            with remote.GFile(partial, "wb") as file:
                file.write(data)
            remote.rename(partial, path, overwrite=True)
        return
    try:
        Path(partial).write_bytes(data)
        os.replace(partial, path)
    finally:
        Path(partial).unlink(missing_ok=True)

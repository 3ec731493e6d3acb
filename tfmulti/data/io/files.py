"""Files on this machine, and files in the stores that TensorFlow can open (`gs://…` and others).

A path with a scheme is read by `tf.io.gfile`, which imports TensorFlow. Any other path is read
without TensorFlow.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tfmulti.config.console import quiet_stderr
from tfmulti.config.limited_reading import open_regular, read_small
from tfmulti.errors import DataError

# A file that is one example has at most this many bytes.
MOST_BYTES = 1 << 30
# The largest file that describes a data set: some hundred bytes for each feature and each file.
MOST_DESCRIPTION_BYTES = 4 << 20
# The files with the memory limit of a container, in both versions of control groups.
CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_most_unpacked: int | None = None


class Stamp(NamedTuple):
    """The size in bytes and the modification time of a file, which change when it is rewritten."""

    size: int
    modified_ns: int


def is_remote(path: str) -> bool:
    """Returns whether a path has a scheme, such as `gs://bucket/file`."""
    return "://" in path


def join(folder: str, name: str) -> str:
    """Returns the path of a name in a folder."""
    return f"{folder.rstrip('/')}/{name}" if is_remote(folder) else os.path.join(folder, name)


def expanded(path: str) -> str:
    """Returns a path with `~` replaced by the home folder."""
    return path if is_remote(path) else os.path.expanduser(path)


def memory_bytes() -> int:
    """Returns the memory in bytes of this machine, or of its container if that has less."""
    limits = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    for path in CGROUP_LIMITS:
        # Without a limit there is no file, or the text `max`.
        with contextlib.suppress(OSError, ValueError):
            limits.append(int(read_small(path, 8192)))
    return min(limits)


def limit_unpacked(gigabytes: float | None) -> None:
    """Sets how many bytes the content of one file may take in memory; None: all memory."""
    global _most_unpacked
    _most_unpacked = None if gigabytes is None else int(gigabytes * 1e9)


def most_unpacked() -> int:
    """Returns how many bytes the content of one file may take in memory."""
    return memory_bytes() if _most_unpacked is None else _most_unpacked


def read_bytes(path: str, most_bytes: int | None = None) -> bytes:
    """Returns the content of a file.

    Args:
        path: the file.
        most_bytes: the largest size in bytes. None: there is no limit.

    Raises:
        OSError: the file cannot be read, is too large, or is a named pipe or a device.
    """
    if not is_remote(path) and most_bytes is not None:
        return read_small(path, most_bytes)
    if not is_remote(path):
        with open_regular(path) as local:
            return local.read()
    with as_os_error(), gfile().GFile(path, "rb") as file:
        content: bytes = file.read(-1 if most_bytes is None else most_bytes + 1)
    if most_bytes is not None and len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it has more than {most_bytes:,} bytes", path)
    return content


def stamp_of(path: str) -> Stamp:
    """Returns the size and the modification time of a file.

    Raises:
        OSError: there is no such file.
    """
    if is_remote(path):
        with as_os_error():
            status = gfile().stat(path)
        return Stamp(int(status.length), int(status.mtime_nsec))
    status = os.stat(path)
    return Stamp(status.st_size, status.st_mtime_ns)


def identity_of(paths: Sequence[str]) -> str:
    """Returns a text of the names, sizes and times of files, which changes if a file does."""
    return "\n".join(f"{path} {stamp_of(path)}" for path in paths)


def locate(ends: np.ndarray, number: int) -> tuple[int, int]:
    """Returns the file of an item that is numbered over all files, and its number in that file.

    `ends` has for each file the number of the item after its last one.

    >>> locate(np.array([3, 3, 5]), 4)
    (2, 1)
    """
    file = int(np.searchsorted(ends, number, side="right"))
    return file, number - (int(ends[file - 1]) if file else 0)


def is_folder(path: str) -> bool:
    """Returns whether there is a folder at a path."""
    return bool(gfile().isdir(path)) if is_remote(path) else os.path.isdir(path)


def in_folder(prefix: str, path: str) -> tuple[list[str], list[str]]:
    """Returns the names of the folders and of the files in a folder, sorted, without hidden ones.

    Raises:
        DataError: the folder does not exist or cannot be read; the message begins with `prefix`.
    """
    try:
        if not is_folder(path):
            problem = "is a file" if _exists(path) else "does not exist"
            raise DataError(f"{prefix}: {path} {problem}. Give the path of a folder.")
        if is_remote(path):
            entries = [name.rstrip("/") for name in gfile().listdir(path)]
            is_dir = {name: is_folder(join(path, name)) for name in entries}
        else:
            with os.scandir(path) as scanned:
                is_dir = {entry.name: entry.is_dir() for entry in scanned}
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{prefix}: {path}: {reason_of(error)}. Give a readable folder.") from None
    visible = sorted(name for name in is_dir if name and not name.startswith("."))
    return [n for n in visible if is_dir[n]], [n for n in visible if not is_dir[n]]


def below(prefix: str, path: str) -> Iterator[str]:
    """Yields the paths of all files in a folder and in the folders below it, without hidden ones.

    Raises:
        DataError: a folder cannot be read; the message begins with `prefix`.
    """
    folders, names = in_folder(prefix, path)
    yield from (join(path, name) for name in names)
    for name in folders:
        yield from below(prefix, join(path, name))


def matching(prefix: str, pattern: str, extensions: tuple[str, ...] = ("",)) -> list[str]:
    """Returns the sorted paths of the files that a pattern matches: a file, a glob or a folder.

    A folder stands for the files directly in it that have one of the extensions and are not hidden.

    Args:
        prefix: the start of messages, such as `--dataset csv:PATTERN`.
        pattern: the path of a file or a folder, or a glob.
        extensions: the endings of the files of a folder, in lower case, such as `.csv`.

    Raises:
        DataError: there is no such file, or the search fails.
    """
    pattern = expanded(pattern)
    try:
        if is_folder(pattern):
            paths = _with_extensions(prefix, pattern, extensions)
        else:
            paths = [pattern] if _exists(pattern) else _glob(pattern)
        for name in paths:
            if not is_remote(name) and os.path.exists(name) and not os.path.isfile(name):
                raise DataError(f"{prefix}: {name} is not a regular file. Remove it from there.")
    except DataError:
        raise
    except Exception as error:
        # TensorFlow's file systems raise many types of exceptions.
        raise DataError(f"{prefix}: {pattern}: {reason_of(error)}. Give another path.") from None
    if not paths:
        raise DataError(f"{prefix}: no file {pattern}. Give a file, a folder of files or a glob.")
    return paths


def _with_extensions(prefix: str, folder: str, extensions: tuple[str, ...]) -> list[str]:
    """Returns the files of a folder with an extension; raises DataError if none."""
    names = [n for n in in_folder(prefix, folder)[1] if n.lower().endswith(extensions)]
    if not names:
        ending = " that ends in " + " or ".join(extensions) if any(extensions) else ""
        raise DataError(
            f"{prefix}: the folder {folder} holds no file{ending}. "
            "Give a file, a folder of such files or a glob."
        )
    return [join(folder, name) for name in names]


def _glob(pattern: str) -> list[str]:
    """Returns the sorted files that a glob matches."""
    if not is_remote(pattern):
        return sorted(p for p in glob.glob(pattern, recursive=True) if os.path.isfile(p))
    paths = sorted(gfile().glob(pattern))
    return [p for p in paths if not os.path.basename(p).startswith(".") and not is_folder(p)]


def cache_folder(env: Mapping[str, str] = os.environ) -> Path:
    """Returns the folder for files that can be made again: $TFMULTI_CACHE or ~/.cache/tfmulti."""
    return Path(env.get("TFMULTI_CACHE") or "~/.cache/tfmulti").expanduser()


def _exists(path: str) -> bool:
    """Returns whether there is a file or a folder at a path."""
    return bool(gfile().exists(path)) if is_remote(path) else os.path.exists(path)


def gfile() -> Any:
    """Returns `tf.io.gfile`; imports TensorFlow if that has not been done."""
    return tensorflow().io.gfile


@contextlib.contextmanager
def as_os_error() -> Iterator[None]:
    """Turns errors of TensorFlow's file systems into `OSError` within its block."""
    tf = tensorflow()
    try:
        yield
    except tf.errors.NotFoundError:
        raise FileNotFoundError(errno.ENOENT, "no such file") from None
    except (tf.errors.UnavailableError, tf.errors.DeadlineExceededError) as error:
        # The storage does not answer, so other files cannot be read either.
        raise OSError(errno.ETIMEDOUT, " ".join(error.message.split())) from None
    except tf.errors.OpError as error:
        raise OSError(errno.EIO, " ".join(error.message.split())) from None


def tensorflow() -> Any:
    """Returns TensorFlow; imports it, without its start-up messages, if needed."""
    if "tensorflow" not in sys.modules:
        with quiet_stderr():
            importlib.import_module("tensorflow")
    return sys.modules["tensorflow"]


def reason_of(error: Exception) -> str:
    """Returns the reason of an error in one line, without a full stop."""
    reason = getattr(error, "strerror", None) or getattr(error, "message", None) or str(error)
    return " ".join(str(reason).split()).rstrip(".") or type(error).__name__

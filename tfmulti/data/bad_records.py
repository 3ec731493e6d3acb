"""Examples that cannot be read: which errors count as such, and how many may be left out.

A source raises `OSError` or `DataError` for an example that it cannot read. The reader then reads
the examples of that call one by one, to find the bad ones. An `OSError` that says that the whole
storage has failed (`is_of_storage`) is never taken for a bad example.

Examples that could not be read when the data was loaded are missing in every pass over the data,
and a pass may lose more while it reads. The training loop adds up both (`training.loop.loops`).
`check_lost` checks the losses of loading alone.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from tfmulti.config.reading import NEXT_STEP
from tfmulti.data.io import files
from tfmulti.errors import DataError

# A source raises one of these if a record cannot be read.
RECORD_FAULTS = (OSError, DataError)

# The system reports with these numbers that a disk or a server is away, or that this process has
# too many open files or too little memory.
_OF_STORAGE = {
    getattr(errno, name)
    for name in (
        *("ESTALE", "ENOTCONN", "ENODEV", "ENXIO", "EMFILE", "ENFILE", "ENOMEM", "ETIMEDOUT"),
        *("EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "ECONNREFUSED", "ECONNRESET"),
    )
}


def is_of_storage(error: Exception) -> bool:
    """Returns whether the storage has failed, and not just one record; later reads fail, too.

    A local file that is missing or cannot be read counts as the storage's error if its folder
    cannot be listed.
    """
    if not isinstance(error, OSError):
        return False
    name = error.filename
    if error.errno in (errno.ENOENT, errno.EIO) and isinstance(name, str) and "://" not in name:
        return not _can_be_listed(os.path.dirname(name) or ".")
    return error.errno in _OF_STORAGE


def _can_be_listed(folder: str) -> bool:
    """Returns whether the entries of a folder can be read."""
    try:
        with os.scandir(folder) as entries:
            next(entries, None)
        return True
    except OSError:
        return False


def reason_of(error: Exception) -> str:
    """Returns what an exception says as one sentence."""
    return f"{files.reason_of(error)}."


Result = TypeVar("Result")


def read_around_faults(
    read: Callable[[np.ndarray], Result],
    indices: np.ndarray,
    on_fault: Callable[[int, Exception], None],
) -> list[Result]:
    """Returns what `read` gives for all indices at once, or for each index if an example is bad.

    For each index that cannot be read, `on_fault` is called with the index and the error.
    """
    try:
        return [read(indices)]
    except RECORD_FAULTS:
        results = []
        for index in indices.tolist():
            try:
                results.append(read(np.array([index])))
            except RECORD_FAULTS as error:
                on_fault(index, error)
        return results


def check_lost(lost: Sequence[str], most: int) -> None:
    """Checks that at most `most` examples are left out.

    `lost` has one sentence for each of them: where it is, and why it cannot be read.

    Raises:
        DataError: more examples are left out; the message names the first of them.
    """
    if len(lost) <= most:
        return
    if not most:
        raise DataError(f"{lost[0]} {NEXT_STEP}")
    raise DataError(
        f"{len(lost):,} examples cannot be read, more than --skip_bad_records {most} allows; "
        f"the first is {lost[0]} Repair the data, or raise --skip_bad_records."
    )


@contextlib.contextmanager
def naming_the_first(lost: Sequence[str]) -> Iterator[None]:
    """Adds to a DataError from the context the first example that was left out before, if any.

    A left-out example may be the cause, such as the only row of a class. `lost` is as in
    `check_lost`.

    Raises:
        DataError: the context has raised it.
    """
    try:
        yield
    except DataError as error:
        if not lost:
            raise
        count = f"{len(lost):,} row{'s' if len(lost) > 1 else ''}"
        raise DataError(f"{error} {count} cannot be read; the first is {lost[0]}") from None

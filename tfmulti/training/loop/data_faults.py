"""Raises DataError with a clear reason for errors of TensorFlow that the data has caused.

A step that gets no data fails with an error of TensorFlow, whose words do not help the user. The
functions here raise the reason that the feed knows, or a message that tells what to do.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import tensorflow as tf

from tfmulti.data.formats.record_stream import SCOPE
from tfmulti.distribution.agreement import gather_bytes
from tfmulti.errors import DataError
from tfmulti.training.input.interface import Feed
from tfmulti.training.input.pipeline import DIFFERENT_ROWS, different_rows

# TensorFlow raises these errors if the content of the data is wrong.
FAULTS_OF_DATA = (tf.errors.InvalidArgumentError, tf.errors.DataLossError)


@contextlib.contextmanager
def data_faults_explained(feed: Feed) -> Iterator[None]:
    """Replaces an error of TensorFlow inside the context by its cause, if the data is the cause.

    Raises:
        DataError: the feed cannot read on, a file is damaged, or the parts of a batch have
            different numbers of rows.
        tf.errors.OpError: the error has another cause. It is raised as it is.
    """
    try:
        yield
    except (tf.errors.OpError, UnicodeDecodeError) as error:
        fault = (feed.reader and feed.reader.error) or _fault_behind(error, feed)
        if fault is None:
            raise
        raise fault from None


def fault_of_any(strategy: tf.distribute.Strategy, feed: Feed) -> DataError:
    """Returns why a worker cannot read the data, the same error on all workers.

    Every worker calls it: it is a collective. The error is that of the worker with the lowest rank
    among those that cannot read on.
    """
    fault = feed.reader and feed.reader.error
    messages = gather_bytes(strategy, None if fault is None else str(fault).encode())
    first = next(message for message in messages if message is not None)
    error: DataError = DataError(first.decode())
    return error


def _fault_behind(error: tf.errors.OpError | UnicodeDecodeError, feed: Feed) -> Exception | None:
    """Returns the fault of the data that has caused an error of a step, or None."""
    if isinstance(error, UnicodeDecodeError):
        # TensorFlow's message quotes the bytes of the record, and may not be UTF-8 text.
        return _fault_in_files(feed)
    if not isinstance(error, FAULTS_OF_DATA):
        return None
    is_damaged = isinstance(error, tf.errors.DataLossError)
    if DIFFERENT_ROWS in error.message:
        message = different_rows()
    else:
        in_files = is_damaged or f"{SCOPE}/" in error.message
        fault_in_file = _fault_in_files(feed) if in_files else None
        if fault_in_file is not None or not is_damaged:
            return fault_in_file
        first_line = error.message.partition("\n")[0]
        reason = re.sub(r"^.*Iterator::\S+ |\{\{.*?\}\}", "", first_line).strip(" .")
        message = f"a file of the data is damaged: {reason}. Find it, and copy it again."
    fault: Exception = DataError(message)
    return fault


def _fault_in_files(feed: Feed) -> Exception | None:
    """Returns the first fault in the files of a stream, or None. The files are read again."""
    fault = feed.data.fault_in_files()
    if fault is None:
        return None
    error: Exception = DataError(
        f"{fault}. Repair or remove it. A GZIP file is read as a stream, from which no record is "
        "left out: gunzip the files for --skip_bad_records."
    )
    return error

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
def told_by(feed: Feed) -> Iterator[None]:
    """Raises, for an error of TensorFlow inside the context, the reason that lies in the data.

    Args:
        feed: the feed from which the step inside takes its data.

    Raises:
        DataError: the feed cannot read on, a file is damaged, or the parts of a batch have
            different numbers of rows.
        tf.errors.OpError: the error has another reason. It is raised as it is.
    """
    try:
        yield
    except tf.errors.OpError as error:
        if feed.error is not None:
            raise feed.error from None
        if isinstance(error, FAULTS_OF_DATA):
            _raise_as_data_error(error, feed)
        raise
    except UnicodeDecodeError:
        # TensorFlow's message quotes the bytes of the record, and may not be UTF-8 text.
        _raise_fault(feed.find_fault())
        raise


def found_by_any(strategy: tf.distribute.Strategy, feed: Feed) -> DataError:
    """Returns why a worker cannot read the data, alike on all workers.

    Every worker calls it: it is a collective. If several workers cannot read on, the one with the
    lowest rank gives the reason.

    Args:
        strategy: the strategy of the run.
        feed: this worker's feed, which may have no error.
    """
    own = None if feed.error is None else str(feed.error).encode()
    reasons = [words for words in gather_bytes(strategy, own) if words is not None]
    error: DataError = DataError(reasons[0].decode())
    return error


def _raise_as_data_error(error: tf.errors.OpError, feed: Feed) -> None:
    """Raises DataError if an error's text tells that the data is wrong; returns otherwise."""
    if DIFFERENT_ROWS in error.message:
        raise DataError(different_rows()) from None
    first = error.message.partition("\n")[0]
    reason = re.sub(r"^.*Iterator::\S+ |\{\{.*?\}\}", "", first).strip(" .")
    is_damaged = isinstance(error, tf.errors.DataLossError)
    found = feed.find_fault() if is_damaged or f"{SCOPE}/" in error.message else None
    _raise_fault(found)
    if is_damaged:
        raise DataError(
            f"a file of the data is damaged: {reason}. Find it, and copy it anew."
        ) from None


def _raise_fault(found: str | None) -> None:
    """Raises DataError if a fault was found in the files of a stream; returns otherwise."""
    if found is not None:
        raise DataError(
            f"{found}. Repair or remove it. A GZIP file is read as a stream, from which no record "
            "is left out: gunzip the files for --skip_bad_records."
        ) from None

"""What is wrong with the data, where TensorFlow says it in its own words."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tfmulti.data.formats.record_stream import SCOPE
from tfmulti.distribution.broadcast import broadcast
from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import DataError
from tfmulti.training.input.feed import Feed
from tfmulti.training.input.pipeline import DIFFERENT_ROWS, different_rows
from tfmulti.training.step.votes import make_vote

FAULTS_OF_DATA = (tf.errors.InvalidArgumentError, tf.errors.DataLossError)


@contextlib.contextmanager
def told_by(feed: Feed) -> Iterator[None]:
    """Inside, a step that found no data raises the reason that its feed has for it."""
    try:
        yield
    except tf.errors.OpError as error:
        if feed.error is not None:
            raise feed.error from None
        if isinstance(error, FAULTS_OF_DATA):
            _raise_as_data_error(error, feed)
        raise


def found_by_any(strategy: tf.distribute.Strategy, feed: Feed) -> DataError:
    """Returns, alike on all workers, why one of them cannot read the data. All call it."""
    place = placement_of(strategy)
    words = None if feed.error is None else str(feed.error)
    known = [float(words is not None and rank == place.rank) for rank in range(place.workers)]
    rank = int(np.argmax(make_vote(strategy)(known)))  # the first of those that know
    told = broadcast(strategy, None if words is None else words.encode(), rank)
    assert told is not None
    error: DataError = DataError(told.decode())
    return error


def _raise_as_data_error(error: tf.errors.OpError, feed: Feed) -> None:
    """Raises DataError where the data is what is wrong, of which `tf.data` tells as text."""
    if DIFFERENT_ROWS in error.message:
        raise DataError(different_rows()) from None
    first = error.message.partition("\n")[0]
    reason = re.sub(r"^.*Iterator::\S+ |\{\{.*?\}\}", "", first).strip(" .")
    is_damaged = isinstance(error, tf.errors.DataLossError)
    found = feed.find_fault() if is_damaged or f"{SCOPE}/" in error.message else None
    if found is not None:
        raise DataError(
            f"{found}. Mend or remove it, or give --skip_bad_records N to leave out up to N such "
            "examples: the files are unpacked for that."
        ) from None
    if is_damaged:
        raise DataError(
            f"a file of the data is damaged: {reason}. Find it, and copy it anew."
        ) from None

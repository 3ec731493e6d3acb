"""Saves the position of a `tf.data` iterator, and sets another iterator of the Dataset to it.

The position is what `tf.train.Checkpoint` writes of the iterator. TensorFlow writes only the parts
that exist at that time. A shuffle that has given its last row does not exist any more, so the state
of its random generator is missing. The order of the next pass is drawn from that state. So a
position is whole only if it has the states of all parts that draw random numbers.

The functions below tell from the parts of a Dataset which positions are whole. A part is a Dataset
from which another Dataset was made, such as the one below a `repeat`. A part "draws" if it is a
shuffle or gives random numbers.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfmulti.keras_patches.datasets import kind_of, parts_of

# The limit of 64 MiB: a larger position, as of a long shuffle buffer, would make a checkpoint take
# too long.
MOST_BYTES = 1 << 26

# The files that TensorFlow writes of an iterator: their contents as uint8 arrays, by name.
Position = dict[str, np.ndarray]
# The position of a feed in a checkpoint.
State = dict[str, Any]

# The names of TensorFlow's files for `tf.train.Checkpoint.write("position")`.
_FILE = re.compile(r"position\.(index|data-\d{5}-of-\d{5})")

# Each part that draws saves two values with this word in their names.
_RANDOM_STATE = b"num_random_samples"
# The type name of a saved part, and the length of the names of its values (see `_names_in`).
_PART = re.compile(rb"\n\x14tensorflow::Iterator\x12([\x80-\xff]{0,4}[\x00-\x7f])")
# The kinds of Datasets that draw.
_DRAWING = ("_ShuffleDataset", "_RandomDataset")
# A cache keeps the first order. A repeat makes one iterator draw several orders. The order of a
# shuffle below another shuffle is drawn only when its first row is read.
_KEEPING, _REPEATING, _LATE = "CacheDataset", "_RepeatDataset", "_ShuffleDataset"
# A zip reads all of its parts at the same time, and not one after the other.
_AT_ONCE = "_ZipDataset"


def holds_all(dataset: tf.data.Dataset) -> bool:
    """Returns whether a position can hold the states of all parts that draw, while these exist.

    It cannot if a shuffle is below a cache, or in a Dataset that is combined from several Datasets
    by another operation than a zip.

    Args:
        dataset: the Dataset.
    """
    return not _has_drawing_below(dataset, _KEEPING)


def must_be_read(dataset: tf.data.Dataset) -> bool:
    """Returns whether the order of a pass depends on what was read in the passes before.

    That is so in three cases: one iterator draws several orders, an order is drawn only when its
    first row is read, or the first order is cached. Otherwise making the earlier iterators is
    enough to get the same order again.

    Args:
        dataset: the Dataset.
    """
    return _has_drawing_below(dataset, _KEEPING, _REPEATING, _LATE)


def draws_when_read(dataset: tf.data.Dataset) -> bool:
    """Returns whether some orders are drawn while an iterator is read, and not when it is made.

    Args:
        dataset: the Dataset.
    """
    return _has_drawing_below(dataset, _REPEATING, _LATE)


def reads_ahead(dataset: tf.data.Dataset) -> bool:
    """Returns whether the last operation of a Dataset reads ahead of the steps by itself.

    Args:
        dataset: the Dataset.
    """
    kind = kind_of(dataset)
    if kind == "_OptionsDataset":
        return all(map(reads_ahead, parts_of(dataset)))
    return kind == "_PrefetchDataset" or kind.startswith("_Parallel")


def _has_drawing_below(dataset: tf.data.Dataset, *kinds: str) -> bool:
    """Returns whether a part that draws is below one of these kinds, or in a combined Dataset.

    A combined Dataset is made from several Datasets by any operation but a zip.
    """
    kind, parts = kind_of(dataset), parts_of(dataset)
    if kind in kinds or (len(parts) > 1 and kind != _AT_ONCE):
        return any(map(_drawing, parts))
    return any(_has_drawing_below(part, *kinds) for part in parts)


def _drawing(dataset: tf.data.Dataset) -> int:
    """Returns how many parts of a Dataset draw, itself included."""
    below = sum(map(_drawing, parts_of(dataset)))
    return below + (kind_of(dataset) in _DRAWING)


def in_passes(dataset: tf.data.Dataset, *, unread: bool = False) -> tf.data.Dataset:
    """Returns a Dataset of all passes of a Dataset that ends: Optionals of its batches, endlessly.

    An Optional without a value ends each pass. So one iterator gives all passes, and its position
    holds the state from which the order of the next pass is drawn.

    Args:
        dataset: a Dataset that ends.
        unread: whether to make one more iterator of the Dataset after each pass, from which nothing
            is read.
    """
    optional = tf.experimental.Optional
    has_parts = type(dataset.element_spec) is tuple

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def wrapped(*batch: Any) -> tf.experimental.Optional:
        return optional.from_value(batch if has_parts else batch[0])

    end = tf.data.Dataset.from_tensors(optional.empty(dataset.element_spec))
    one_pass = dataset.map(wrapped, num_parallel_calls=1)
    if unread:
        # An iterator of this Dataset makes iterators of both Datasets that it chooses from. It
        # chooses the empty one, and ends.
        never_read = tf.data.Dataset.choose_from_datasets(
            [dataset.take(0), dataset], tf.data.Dataset.from_tensors(tf.constant(0, tf.int64))
        )
        one_pass = one_pass.concatenate(never_read.map(wrapped))
    return one_pass.concatenate(end).repeat()


def form_of(dataset: tf.data.Dataset) -> str:
    """Returns a text that two Datasets share if a position of one may fit the other.

    The text has TensorFlow's version, the form of the elements, and the kinds of all parts. It is
    compared first, because trying a position takes an iterator, and with it a seed of each shuffle.

    Args:
        dataset: the Dataset.
    """

    def kinds(part: tf.data.Dataset) -> list[Any]:
        return [kind_of(part), *map(kinds, parts_of(part))]

    return f"{tf.__version__} {dataset.element_spec} {kinds(dataset)}"


def random_states_of(dataset: tf.data.Dataset) -> int:
    """Returns what `random_states_in` returns for a whole position of a Dataset.

    Args:
        dataset: the Dataset.
    """
    return 2 * _drawing(dataset)


def random_states_in(position: Position) -> int:
    """Returns how many values of random states a position has; it is lower if a state is missing.

    Args:
        position: what `position_of` returned.
    """
    contents = [content.tobytes() for content in position.values()]
    return sum(
        content.count(_RANDOM_STATE, begin, end)
        for content in contents
        for begin, end in _names_in(content)
    )


def _names_in(content: bytes) -> Iterator[tuple[int, int]]:
    """Yields the begin and the end of the names of each part's values in a file of a position.

    The names are the field `metadata` of `VariantTensorDataProto` in
    tensorflow/core/framework/tensor.proto. The values themselves, which may hold any bytes, are not
    searched.
    """
    end = 0
    for begin in _PART.finditer(content):
        length, at = 0, begin.end()
        # This match is within the names of another part.
        if at < end:
            continue
        # Protocol buffers write a length in base 128, with the lowest digit first.
        for place, byte in enumerate(begin[1]):
            length |= (byte & 0x7F) << 7 * place
        end = min(at + length, len(content))
        yield at, end


def position_of(iterator: Any) -> Position | None:
    """Returns the position of an iterator with the content of its buffers, or None.

    It is None if the position has more than `MOST_BYTES`, or if TensorFlow cannot save it. That is
    so for a generator and for random numbers without a seed. The data must then be read again up to
    the position.

    Args:
        iterator: an iterator of a `tf.data.Dataset`.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            tf.train.Checkpoint(iterator=iterator).write(f"{folder}/position")
        except (tf.errors.OpError, ValueError, TypeError):
            return None
        files = sorted(Path(folder).iterdir())
        if sum(file.stat().st_size for file in files) > MOST_BYTES:
            return None
        return {file.name: np.frombuffer(file.read_bytes(), np.uint8) for file in files}


def has_known_names(position: Position) -> bool:
    """Returns whether all files of a position have names that TensorFlow gives.

    A position comes from a checkpoint, so its names must not be used as paths unchecked.

    Args:
        position: the position.
    """
    return all(_FILE.fullmatch(name) for name in position)


def set_position(iterator: Any, position: Position) -> bool:
    """Sets an iterator to a position, and returns whether TensorFlow has accepted it.

    Args:
        iterator: an iterator of the same Dataset, or of one that is made alike.
        position: what `position_of` returned.
    """
    if not has_known_names(position):
        return False
    with tempfile.TemporaryDirectory() as folder:
        for name, content in position.items():
            Path(folder, name).write_bytes(content.tobytes())
        try:
            found = tf.train.Checkpoint(iterator=iterator).read(f"{folder}/position")
            found.assert_existing_objects_matched()
        except (tf.errors.OpError, ValueError, TypeError, AssertionError):
            return False
    return True

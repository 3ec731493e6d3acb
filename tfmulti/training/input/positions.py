"""Saves the position of a `tf.data` iterator, and sets another iterator of the Dataset to it.

The position is what `tf.train.Checkpoint` writes of the iterator. TensorFlow writes only the parts
that exist at that time. A shuffle that has given its last row does not exist any more, so the state
of its random generator is missing. The order of the next pass is drawn from that state. So a
position is whole only if it has the states of all parts that draw random numbers.

A part is a Dataset from which another Dataset was made, such as the one below a `repeat`. A part
"draws" if it is a shuffle or gives random numbers.
"""

from __future__ import annotations

import re
import tempfile
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

# The names of TensorFlow's files for `tf.train.Checkpoint.write("position")`.
_FILE = re.compile(r"position\.(index|data-\d{5}-of-\d{5})")

# Of each part that draws, TensorFlow saves the state of the random generator under this name. The
# bytes before it are of the message `VariantTensorDataProto`, so no text of the data is counted.
_RANDOM_STATE = re.compile(
    rb"\n\x14tensorflow::Iterator\x12[\x80-\xff]{0,4}[\x00-\x7f]"
    rb"Iterator::[ -?A-~]*@@[ -?A-~]*epoch_num_random_samples"
)
# The kinds of Datasets that draw.
_DRAWING = ("_ShuffleDataset", "_RandomDataset")
# A cache keeps the first order. A repeat makes one iterator draw several orders. The order of a
# shuffle below another shuffle is drawn only when its first row is read.
_DRAWN_LATER = ("CacheDataset", "_RepeatDataset", "_ShuffleDataset")
# A zip reads all of its parts at the same time, and not one after the other.
_AT_ONCE = "_ZipDataset"


def must_be_read(dataset: tf.data.Dataset) -> bool:
    """Returns whether the order of a pass depends on what was read in the passes before.

    That is so if a part that draws is below a cache, a repeat or another shuffle, or in a Dataset
    that is made from several Datasets by any operation but a zip. Otherwise making the earlier
    iterators is enough to get the same order again.

    Args:
        dataset: the Dataset.
    """
    kind, parts = kind_of(dataset), parts_of(dataset)
    if kind in _DRAWN_LATER or (len(parts) > 1 and kind != _AT_ONCE):
        return any(map(_drawing, parts))
    return any(map(must_be_read, parts))


def reads_ahead(dataset: tf.data.Dataset) -> bool:
    """Returns whether the last operation of a Dataset reads ahead of the steps by itself.

    Args:
        dataset: the Dataset.
    """
    kind = kind_of(dataset)
    if kind == "_OptionsDataset":
        return all(map(reads_ahead, parts_of(dataset)))
    return kind == "_PrefetchDataset" or kind.startswith("_Parallel")


def _drawing(dataset: tf.data.Dataset) -> int:
    """Returns how many parts of a Dataset draw, itself included."""
    below = sum(map(_drawing, parts_of(dataset)))
    return below + (kind_of(dataset) in _DRAWING)


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


def is_whole(position: Position, dataset: tf.data.Dataset) -> bool:
    """Returns whether a position has the random states of all parts of its Dataset that draw.

    Args:
        position: what `position_of` returned.
        dataset: the Dataset of the iterator.
    """
    states = (_RANDOM_STATE.findall(content.tobytes()) for content in position.values())
    return sum(map(len, states)) == _drawing(dataset)


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

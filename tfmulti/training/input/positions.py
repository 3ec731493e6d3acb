"""Saves the position of a `tf.data` iterator, and makes another iterator of the Dataset there.

The position is what `tf.train.Checkpoint` writes of the iterator
(https://www.tensorflow.org/guide/data#iterator_checkpointing). There are two ways to resume:

1. If the position is complete, another iterator continues there at once (`iterator_at`).
2. Otherwise the iterators of all earlier passes are made again, which draws the same orders. Then
   the present pass is read again from its start.

A part is a Dataset from which another Dataset was made, such as the one below a `repeat`. A part
"draws" if it is a shuffle or gives random numbers. A position is complete if it has the random
state of each part that draws (`is_complete`). TensorFlow does not save a shuffle that has given its
last row, although the order of the next pass is drawn from its state.

Some Datasets draw an order only while they are read. So in the second way the batches of their
earlier passes are read, too (`must_be_read`). All other Datasets need not read them.

Both cases must stay. Without `is_complete` a run that resumes near the end of a pass has other
orders afterwards, and without `must_be_read` each resume would read all earlier passes.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tfmulti.errors import ResumeError
from tfmulti.keras_patches.datasets import kind_of, parts_of

# The limit of 64 MiB. A larger position, as of a long shuffle buffer, would make checkpoints slow.
MOST_BYTES = 1 << 26

# The files that TensorFlow writes of an iterator: their contents as uint8 arrays, by name.
Position = dict[str, np.ndarray]

# The names of TensorFlow's files for `tf.train.Checkpoint.write("position")`.
_FILE = re.compile(r"position\.(index|data-\d{5}-of-\d{5})")

# TensorFlow raises these errors for an iterator that it cannot save, or a file that it cannot read.
_ERRORS = (tf.errors.OpError, ValueError, TypeError)

# TensorFlow saves the random state of each part that draws under this name. The bytes before the
# name belong to the message `VariantTensorDataProto`, so a text of the data is not counted, unless
# it has these bytes, too.
_RANDOM_STATE = re.compile(
    rb"\n\x14tensorflow::Iterator\x12[\x80-\xff]{0,4}[\x00-\x7f]"
    rb"Iterator::[ -?A-~]*@@[ -?A-~]*epoch_num_random_samples"
)
# The kinds of Datasets that draw.
_DRAWING = ("_ShuffleDataset", "_RandomDataset")
# A cache keeps the first order. A repeat makes one iterator draw several orders. If a shuffle is
# below another shuffle, its order is drawn when the first row is read.
_DRAWN_LATER = ("CacheDataset", "_RepeatDataset", "_ShuffleDataset")
# A zip reads all of its parts at the same time, and not one after the other.
_AT_ONCE = "_ZipDataset"


def must_be_read(dataset: tf.data.Dataset) -> bool:
    """Returns whether the order of a pass depends on what was read in the passes before.

    The order depends on that if a part that draws is below a cache, a repeat or another shuffle, or
    if an operation other than a zip makes one Dataset from several, of which one draws.
    """
    kind, parts = kind_of(dataset), parts_of(dataset)
    if kind in _DRAWN_LATER or (len(parts) > 1 and kind != _AT_ONCE):
        return any(map(_count_drawing, parts))
    return any(map(must_be_read, parts))


def reads_ahead(dataset: tf.data.Dataset) -> bool:
    """Returns whether the last operation of a Dataset reads ahead of the steps by itself."""
    kind = kind_of(dataset)
    if kind == "_OptionsDataset":
        return all(map(reads_ahead, parts_of(dataset)))
    return kind == "_PrefetchDataset" or kind.startswith("_Parallel")


def _count_drawing(dataset: tf.data.Dataset) -> int:
    """Returns how many parts of a Dataset draw, itself included."""
    below = sum(map(_count_drawing, parts_of(dataset)))
    return below + (kind_of(dataset) in _DRAWING)


def form_of(dataset: tf.data.Dataset) -> str:
    """Returns a text that is the same for two Datasets if a position of one may fit the other.

    The text has TensorFlow's version, the form of the elements, and the kinds of all parts. It is
    compared first, because trying a position needs an iterator, which draws a seed of each shuffle.
    """

    def kinds(part: tf.data.Dataset) -> list[Any]:
        return [kind_of(part), *map(kinds, parts_of(part))]

    return f"{tf.__version__} {dataset.element_spec} {kinds(dataset)}"


def is_complete(position: Position, dataset: tf.data.Dataset) -> bool:
    """Returns whether a position has the random states of all parts of its Dataset that draw."""
    states = (_RANDOM_STATE.findall(content.tobytes()) for content in position.values())
    return sum(map(len, states)) == _count_drawing(dataset)


def position_of(iterator: Any) -> Position | None:
    """Returns the position of a Dataset's iterator, with the content of its buffers, or None.

    It is None if the position has more than `MOST_BYTES`, or if TensorFlow cannot save it.
    TensorFlow cannot save the position of a generator, or of random numbers without a seed.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            tf.train.Checkpoint(iterator=iterator).write(f"{folder}/position")
        except _ERRORS:
            return None
        files = sorted(Path(folder).iterdir())
        if sum(file.stat().st_size for file in files) > MOST_BYTES:
            return None
        return {file.name: np.frombuffer(file.read_bytes(), np.uint8) for file in files}


def iterator_at(position: Position, dataset: tf.data.Dataset) -> Any:
    """Returns an iterator of a Dataset at a position, or None if the position has other files.

    The names of the files come from a checkpoint. They are checked first, so none of them is used
    as a path to another folder.

    Raises:
        ResumeError: TensorFlow does not accept the position. The iterator that was tried has drawn
            a seed of each shuffle, so the pass cannot be read again instead.
    """
    if not position or not all(_FILE.fullmatch(name) for name in position):
        return None
    iterator = iter(dataset)
    with tempfile.TemporaryDirectory() as folder:
        for name, content in position.items():
            Path(folder, name).write_bytes(content.tobytes())
        try:
            status = tf.train.Checkpoint(iterator=iterator).read(f"{folder}/position")
            status.assert_existing_objects_matched()
        except (*_ERRORS, AssertionError):
            raise ResumeError(
                "TensorFlow cannot restore the position in the data of the newest checkpoint. "
                "Remove that file: the run goes on from the checkpoint before it."
            ) from None
    return iterator

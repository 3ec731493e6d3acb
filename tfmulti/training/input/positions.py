"""Where a tf.data iterator is, as a value that can be put into another of the same Dataset.

TensorFlow saves what is there: a shuffle that has given its last row is not any more, and what
the order of the next pass is drawn by is lost with it. So a position counts only where all that
draws is in it.
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

MOST_BYTES = (
    1 << 26
)  # 64 MB: of a larger one (a long shuffle buffer) a checkpoint would take too long

Position = dict[str, np.ndarray]  # bytes: what TensorFlow writes of it: file name -> content
State = dict[str, Any]  # what a checkpoint holds of a feed

_FILE = re.compile(r"position\.(index|data-\d{5}-of-\d{5})")

_RANDOM_STATE = b"num_random_samples"  # in the names of what is saved of all that draws: twice
_PART = re.compile(rb"\n\x14tensorflow::Iterator\x12([\x80-\xff]{0,4}[\x00-\x7f])")
_DRAWING = ("_ShuffleDataset", "_RandomDataset")
_KEEPING, _REPEATING, _LATE = "CacheDataset", "_RepeatDataset", "_ShuffleDataset"
_AT_ONCE = "_ZipDataset"


def holds_all(dataset: tf.data.Dataset) -> bool:
    """Whether all that a dataset is shuffled by is in its iterator's position, while it is there.

    Not where what is shuffled is cached, or follows or is followed by other data.
    """
    return not _has_drawing_below(dataset, _KEEPING)


def must_be_read(dataset: tf.data.Dataset) -> bool:
    """Whether a pass is what it is by what was read in those before: not by an iterator alone.

    So it is where one iterator draws several orders, or one only when its first row is read
    (below another shuffle), or where the first one's is cached.
    """
    return _has_drawing_below(dataset, _KEEPING, _REPEATING, _LATE)


def draws_when_read(dataset: tf.data.Dataset) -> bool:
    """Whether some orders are drawn while an iterator is read, and not when it is made."""
    return _has_drawing_below(dataset, _REPEATING, _LATE)


def reads_ahead(dataset: tf.data.Dataset) -> bool:
    """Whether what a dataset ends in reads ahead of who takes from it."""
    kind = kind_of(dataset)
    if kind == "_OptionsDataset":
        return all(map(reads_ahead, parts_of(dataset)))
    return kind == "_PrefetchDataset" or kind.startswith("_Parallel")


def _has_drawing_below(dataset: tf.data.Dataset, *kinds: str) -> bool:
    """Whether a shuffle is below one of these kinds, or where datasets follow each other."""
    kind, parts = kind_of(dataset), parts_of(dataset)
    if kind in kinds or (len(parts) > 1 and kind != _AT_ONCE):
        return any(map(_drawing, parts))
    return any(_has_drawing_below(part, *kinds) for part in parts)


def _drawing(dataset: tf.data.Dataset) -> int:
    """Returns how many parts of a dataset draw."""
    below = sum(map(_drawing, parts_of(dataset)))
    return below + (kind_of(dataset) in _DRAWING)


def in_passes(dataset: tf.data.Dataset, *, unread: bool = False) -> tf.data.Dataset:
    """Returns the passes of a dataset that ends, one after the other, as Optionals.

    One without a value ends each pass. So one iterator gives all of them, and its position holds
    what the order of the next pass is drawn by. With `unread` an iterator of the dataset is made
    after each pass, from which nothing is read.
    """
    optional = tf.experimental.Optional
    has_parts = type(dataset.element_spec) is tuple

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def wrapped(*batch: Any) -> tf.experimental.Optional:
        return optional.from_value(batch if has_parts else batch[0])

    end = tf.data.Dataset.from_tensors(optional.empty(dataset.element_spec))
    one_pass = dataset.map(wrapped, num_parallel_calls=1)
    if unread:
        # An iterator of this makes those of both datasets, and ends with the empty one.
        never_read = tf.data.Dataset.choose_from_datasets(
            [dataset.take(0), dataset], tf.data.Dataset.from_tensors(tf.constant(0, tf.int64))
        )
        one_pass = one_pass.concatenate(never_read.map(wrapped))
    return one_pass.concatenate(end).repeat()


def form_of(dataset: tf.data.Dataset) -> str:
    """Returns what an iterator's position fits: how the dataset is made, by which TensorFlow.

    To try another's in vain takes an iterator, and with it a seed of each shuffle.
    """

    def kinds(part: tf.data.Dataset) -> list[Any]:
        return [kind_of(part), *map(kinds, parts_of(part))]

    return f"{tf.__version__} {dataset.element_spec} {kinds(dataset)}"


def random_states_of(dataset: tf.data.Dataset) -> int:
    """Returns what `random_states_in` finds where the state of all that draws is there."""
    return 2 * _drawing(dataset)


def random_states_in(position: Position) -> int:
    """Returns a number that is lower where the state of something that draws is missing."""
    contents = [content.tobytes() for content in position.values()]
    return sum(
        content.count(_RANDOM_STATE, begin, end)
        for content in contents
        for begin, end in _names_in(content)
    )


def _names_in(content: bytes) -> Iterator[tuple[int, int]]:
    """Yields where a file has the names of each part of a dataset, without its values.

    They are the metadata of tensorflow/core/framework/tensor.proto's VariantTensorDataProto.
    """
    end = 0
    for begin in _PART.finditer(content):
        length, at = 0, begin.end()
        if at < end:
            continue  # within other names
        for place, byte in enumerate(begin[1]):  # a number in base 128, its lowest digit first
            length |= (byte & 0x7F) << 7 * place
        end = min(at + length, len(content))
        yield at, end


def position_of(iterator: Any) -> Position | None:
    """Returns where an iterator is, what it holds in buffers included.

    None where TensorFlow cannot tell (a generator, random numbers that are no function of a
    seed) or where it is too large: then the data must be read again up to there.
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
    """Whether a position, which comes from a file, has TensorFlow's names alone."""
    return all(_FILE.fullmatch(name) for name in position)


def set_position(iterator: Any, position: Position) -> bool:
    """Puts a new iterator where another one was; returns whether it could be."""
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

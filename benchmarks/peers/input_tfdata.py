"""tf.data's side of `benchmarks.input`, as TensorFlow's and Keras' guides write it."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from benchmarks.input_data import BATCHES, IMAGES, ROWS, TARGET, arrays_of
from benchmarks.peers.input_measure import measure
from benchmarks.peers.input_step import rows_of_next


def dataset_of(task: str, folder: str, arrays: Any) -> tf.data.Dataset:
    batch = BATCHES[task]
    if task == "arrays":
        dataset = tf.data.Dataset.from_tensor_slices(arrays)
        return dataset.shuffle(10_000, seed=1).batch(batch).prefetch(tf.data.AUTOTUNE)
    if task == "images":
        return keras.utils.image_dataset_from_directory(
            f"{folder}/images", batch_size=batch, image_size=TARGET, seed=1, verbose=False
        ).prefetch(tf.data.AUTOTUNE)

    def parse(record: tf.Tensor) -> Any:
        form = {
            "image": tf.io.FixedLenFeature([], tf.string),
            "label": tf.io.FixedLenFeature([], tf.int64),
        }
        example = tf.io.parse_single_example(record, form)
        image = tf.image.resize(tf.io.decode_jpeg(example["image"], channels=3), TARGET)
        return image, example["label"]

    files = tf.data.Dataset.list_files(f"{folder}/records/train-*", seed=1)
    records = files.interleave(tf.data.TFRecordDataset, num_parallel_calls=tf.data.AUTOTUNE)
    shuffled = records.shuffle(1_000, seed=1)
    decoded = shuffled.map(parse, num_parallel_calls=tf.data.AUTOTUNE)
    return decoded.batch(batch).prefetch(tf.data.AUTOTUNE)


def main(task: str, folder: str) -> None:
    arrays = arrays_of(task, folder)

    def begin() -> Iterator[int]:
        iterator = iter(dataset_of(task, folder, arrays).repeat())
        while True:
            yield int(rows_of_next(iterator)[0])

    def resume() -> Callable[[], Any]:
        """Restores a checkpoint of the iterator, as TensorFlow's guide describes."""
        iterator = iter(dataset_of(task, folder, arrays))
        rows = ROWS if task == "arrays" else IMAGES
        for _ in range(int(0.9 * -(-rows // BATCHES[task]))):
            next(iterator)
        prefix = tf.train.Checkpoint(iterator=iterator).write(f"{tempfile.mkdtemp()}/it")

        def take() -> Any:
            again = iter(dataset_of(task, folder, arrays))
            tf.train.Checkpoint(iterator=again).read(prefix)
            return rows_of_next(again)

        return take

    measure(begin, resume=resume)


if __name__ == "__main__":
    main(*sys.argv[1:])

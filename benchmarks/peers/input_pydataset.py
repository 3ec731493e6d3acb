"""Keras' PyDataset in `benchmarks.input`, read as `fit` reads it, by two threads."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from benchmarks.input_data import BATCHES, TARGET, arrays_of
from benchmarks.peers.input_measure import measure
from benchmarks.peers.input_step import rows_of_next
from tfmulti.keras_patches.datasets import batches_of


class Batches(keras.utils.PyDataset):
    """Batches that `read` returns for their rows. Each epoch is shuffled anew."""

    def __init__(self, rows: int, batch: int, read: Callable[[np.ndarray], Any]) -> None:
        super().__init__(workers=2, use_multiprocessing=False)
        self.batch, self.read = batch, read
        self.random = np.random.default_rng(1)
        self.order = self.random.permutation(rows)

    def __len__(self) -> int:
        return -(-len(self.order) // self.batch)

    def __getitem__(self, index: int) -> Any:
        return self.read(self.order[index * self.batch : (index + 1) * self.batch])

    def on_epoch_end(self) -> None:
        self.order = self.random.permutation(self.order)


def batches(task: str, folder: str, arrays: Any) -> Batches:
    if task == "arrays":
        x, y = arrays
        return Batches(len(x), BATCHES[task], lambda rows: (x[rows], y[rows]))
    paths = sorted(Path(folder, "images").glob("*/*.jpg"))
    names = sorted({path.parent.name for path in paths})

    def read(rows: np.ndarray) -> Any:
        images = [keras.utils.load_img(paths[i], target_size=TARGET) for i in rows]
        labels = [names.index(paths[i].parent.name) for i in rows]
        return np.stack([np.asarray(image) for image in images]), np.array(labels, np.int32)

    return Batches(len(paths), BATCHES[task], read)


def main(task: str, folder: str) -> None:
    arrays = arrays_of(task, folder)

    def begin() -> Iterator[int]:
        adapter = batches_of(batches(task, folder, arrays), None)
        dataset = adapter.get_tf_dataset()
        while True:
            adapter.on_epoch_begin()
            iterator = iter(dataset)
            for _ in range(adapter.num_batches):
                yield int(rows_of_next(iterator)[0])
            adapter.on_epoch_end()

    measure(begin)


if __name__ == "__main__":
    main(*sys.argv[1:])

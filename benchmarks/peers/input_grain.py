"""grain in `benchmarks.input`: MapDataset with two threads; images by OpenCV."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cv2
import grain
import numpy as np

from benchmarks.input_data import BATCHES, TARGET, arrays_of
from benchmarks.peers.input_measure import measure


class Rows:
    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.y[index]


class Files:
    def __init__(self, folder: Path) -> None:
        self.paths = sorted(folder.glob("*/*.jpg"))
        names = sorted({path.parent.name for path in self.paths})
        self.labels = [names.index(path.parent.name) for path in self.paths]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Any:
        return self.paths[index].read_bytes(), self.labels[index]


def decode(item: Any) -> Any:
    data, label = item
    image = cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB)
    return cv2.resize(image, TARGET[::-1]), np.int32(label)


def dataset_of(task: str, folder: str, arrays: Any) -> Any:
    source = Rows(*arrays) if task == "arrays" else Files(Path(folder, "images"))
    dataset = grain.MapDataset.source(source).shuffle(seed=1).repeat()
    if task != "arrays":
        dataset = dataset.map(decode)
    # Data in memory needs no threads: with them it took longer.
    threads, ahead = (0, 0) if task == "arrays" else (2, 2 * BATCHES[task])
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)
    return dataset.to_iter_dataset(options).batch(BATCHES[task])


def main(task: str, folder: str) -> None:
    cv2.setNumThreads(1)
    arrays = arrays_of(task, folder)

    def begin() -> Iterator[int]:
        for x, _ in dataset_of(task, folder, arrays):
            yield len(x)

    def resume() -> Callable[[], Any]:
        iterator = iter(dataset_of(task, folder, arrays))
        rows = len(arrays[0]) if task == "arrays" else 2_000
        for _ in range(int(0.9 * -(-rows // BATCHES[task]))):
            next(iterator)
        state = iterator.get_state()

        def take() -> Any:
            again = iter(dataset_of(task, folder, arrays))
            again.set_state(state)
            return next(again)

        return take

    measure(begin, resume=resume)


if __name__ == "__main__":
    main(*sys.argv[1:])

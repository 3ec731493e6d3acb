"""Only reads, decodes and resizes the images of `benchmarks.input`: no side can be faster."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np

from benchmarks.input_data import TARGET
from benchmarks.peers.input_measure import measure


def main(task: str, folder: str) -> None:
    cv2.setNumThreads(1)
    paths = sorted(Path(folder, "images").glob("*/*.jpg"))

    def decode(path: Path) -> None:
        image = cv2.imdecode(np.frombuffer(path.read_bytes(), np.uint8), cv2.IMREAD_COLOR_RGB)
        cv2.resize(image, TARGET[::-1])

    def begin() -> Iterator[int]:
        with ThreadPoolExecutor(2) as pool:
            while True:
                for start in range(0, len(paths), 64):
                    batch = paths[start : start + 64]
                    list(pool.map(decode, batch))
                    yield len(batch)

    measure(begin)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""PyTorch's DataLoader in `benchmarks.input`, as its guides write it."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.input_data import BATCHES, TARGET, arrays_of
from benchmarks.peers.input_measure import measure


def loader_of(task: str, folder: str, arrays: Any) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    # Worker processes would only send arrays that are in memory.
    if task == "arrays":
        return DataLoader(TensorDataset(*arrays), BATCHES[task], shuffle=True, generator=generator)
    from torchvision import datasets, transforms

    steps = [transforms.Resize(TARGET), transforms.PILToTensor()]
    images = datasets.ImageFolder(f"{folder}/images", transforms.Compose(steps))
    return DataLoader(
        images,
        BATCHES[task],
        shuffle=True,
        generator=generator,
        num_workers=2,
        persistent_workers=True,
    )


def main(task: str, folder: str) -> None:
    torch.set_num_threads(1)
    arrays = [torch.from_numpy(array) for array in arrays_of(task, folder) or ()]

    def begin() -> Iterator[int]:
        loader = loader_of(task, folder, arrays)
        while True:
            for x, _ in loader:
                yield len(x)

    def resume() -> Callable[[], Any]:
        """A DataLoader has no position, so the earlier batches are read and dropped."""

        def take() -> Any:
            loader = loader_of(task, folder, arrays)
            return next(itertools.islice(loader, int(0.9 * len(loader)), None))

        return take

    measure(begin, resume=resume)


if __name__ == "__main__":
    main(*sys.argv[1:])

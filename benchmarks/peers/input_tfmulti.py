"""tfmulti's side of `benchmarks.input`: its own stream, as `fit` reads it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.input_data import BATCHES, TARGET, arrays_of
from benchmarks.peers.input_measure import measure
from benchmarks.peers.input_step import rows_of_next
from tfmulti.config.fit_config import FitConfig
from tfmulti.data.arrays import ArraySource
from tfmulti.data.batch_plan import BatchPlan
from tfmulti.distribution.strategies import Placement
from tfmulti.run.validation import load_data
from tfmulti.training.input.prefetcher import Prefetcher, prefetcher_of


def source_of(task: str, folder: str) -> Any:
    arrays = arrays_of(task, folder)
    if arrays is not None:
        return ArraySource(arrays)
    height, width = TARGET
    dataset = {
        "images": f"images:{folder}/images,size={height}x{width}",
        "tfrecord": f"tfrecord:{folder}/records",
    }[task]
    config = FitConfig(dataset=dataset, validation_fraction=0.0, global_batch_size=1)
    data = load_data(config)
    assert data is not None
    return data.train


def main(task: str, folder: str) -> None:
    streams: list[Prefetcher] = []
    arrays = source_of(task, folder) if task == "arrays" else None

    def stream(first_step: float = 0.0) -> Prefetcher:
        # The time of finding the files counts.
        source = arrays or source_of(task, folder)
        plan = BatchPlan(len(source), BATCHES[task], seed=1)
        streams.append(
            prefetcher_of(source, plan, Placement(0, 1, 1), int(first_step * plan.steps_per_epoch))
        )
        return streams[-1]

    def begin() -> Iterator[int]:
        outlet = stream().queue
        while True:
            yield int(rows_of_next(outlet)[0])

    def end() -> None:
        streams.pop().close()

    measure(begin, end, lambda: lambda: rows_of_next(stream(0.9).queue))
    end()


if __name__ == "__main__":
    main(*sys.argv[1:])

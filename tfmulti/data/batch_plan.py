"""The batch plan: which examples each global batch holds, and which of them each worker reads.

Let B be the global batch size, and π the permutation of (seed, epoch), from `permutation`. Row i of
global batch k of an epoch is the example π(k·B + i). `sharding` divides the rows among the
replicas. The examples of a step are thus a function of (seed, epoch, step). They are computed when
they are needed, in microseconds and constant memory, with NumPy alone. So the position in the data
is one number, the step, and a run can resume at any step at once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from tfmulti.data import sharding
from tfmulti.data.hashing import key_of
from tfmulti.data.permutation import Permutation


@dataclass(frozen=True)
class WorkerPart:
    """The rows [begin, end) of a global batch of `rows` rows that one worker reads.

    `slices` has one entry `(first, last, counts)` for each replica of the worker: the replica
    reads the rows [first, last) of the global batch. A replica without rows of its own reads one
    row, and its `counts` is False.
    """

    step: int
    epoch: int
    rows: int
    begin: int
    end: int
    slices: tuple[tuple[int, int, bool], ...]


@dataclass(frozen=True)
class BatchPlan:
    """The global batches of `examples` examples over all epochs.

    The last global batch of an epoch may be smaller than `global_batch_size`. If `seed` is None,
    every epoch has the order of the data; otherwise each epoch has an order of its own.
    """

    examples: int
    global_batch_size: int
    seed: int | None = None

    @property
    def steps_per_epoch(self) -> int:
        """The number of global batches in one epoch."""
        return sharding.steps_per_epoch(self.examples, self.global_batch_size)

    @property
    def is_even(self) -> bool:
        """Whether all global batches have the same number of rows."""
        return self.examples % self.global_batch_size == 0

    def part(self, step: int, first_replica: int, local_replicas: int, replicas: int) -> WorkerPart:
        """Returns the rows that a worker reads in a step.

        Args:
            step: the step, counted from the start of the run over all epochs.
            first_replica: the index of the worker's first replica, counted over all workers.
            local_replicas: the number of replicas of the worker.
            replicas: the number of replicas of all workers.

        >>> BatchPlan(30, 30).part(0, first_replica=6, local_replicas=2, replicas=8).slices
        ((24, 27, True), (27, 30, True))
        """
        epoch, in_epoch = divmod(step, self.steps_per_epoch)
        first, last = sharding.batch_bounds(in_epoch, self.examples, self.global_batch_size)
        rows, slices = last - first, []
        for replica in range(first_replica, first_replica + local_replicas):
            start, stop = sharding.slice_bounds(rows, replicas, replica)
            slices.append((*sharding.rows_to_read(start, stop, rows), stop > start))
        begin, end = min(s[0] for s in slices), max(s[1] for s in slices)
        return WorkerPart(step, epoch, rows, begin, end, tuple(slices))

    def examples_of(self, part: WorkerPart) -> np.ndarray:
        """Returns the indices of the examples of a worker's part, int64 [end - begin]."""
        first = part.step % self.steps_per_epoch * self.global_batch_size
        return self.examples_at(part.epoch, first + part.begin, first + part.end)

    def examples_at(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Returns the indices of the examples at positions [start, stop) of an epoch, int64."""
        positions = np.arange(start, stop, dtype=np.int64)
        if self.seed is None:
            return positions
        return _order(self.examples, self.seed, epoch).at(positions)


@functools.lru_cache(maxsize=4)
def _order(examples: int, seed: int, epoch: int) -> Permutation:
    """Returns the shuffled order of an epoch."""
    return Permutation(examples, key_of(seed, epoch))

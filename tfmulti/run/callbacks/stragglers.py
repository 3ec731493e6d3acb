"""Names the worker for which the others wait in every step, while the run goes on.

The workers compare their times at the end of each epoch, and within an epoch every half minute. The
comparison needs all workers after the same step. So a worker that wants one within an epoch votes
for it in a step, and all workers compare once a step has counted the vote.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tfmulti.distribution.agreement import gather
from tfmulti.distribution.connections import made_channel
from tfmulti.distribution.strategies import placement_of
from tfmulti.run.callbacks.scalars import WritesScalars
from tfmulti.run.straggler import COMPUTING, DATA, NETWORK, Straggler, straggler_of
from tfmulti.training.state.trainer_state import state_of

# Fewer seconds or executions are not enough for a comparison.
_LEAST_S, _LEAST_EXECUTIONS = 1.0, 10
# How often the workers compare their times within an epoch.
EVERY_S = 30.0
# TensorBoard shows numbers, so a cause is its position here.
_CAUSES = ("", COMPUTING, DATA, NETWORK)


class Stragglers(WritesScalars):
    """Finds out for which worker the others wait, each half minute and at the end of each epoch.

    Every worker must have it, because the workers compare their times by a collective. The figures
    need tfmulti's own collectives, so there are none on GPUs, where NCCL connects the workers.

    Args:
        folder: the folder in which the chief writes `straggler/worker`, `straggler/slowdown` and
            `straggler/cause` for TensorBoard, or None.
        say: prints a line.
        every_s: how often the workers compare their times within an epoch, in seconds.
        clock: returns seconds.

    Attributes:
        straggler: what stood out in the last comparison of enough steps, or None.
        others_share: the share of the time of all steps in which this worker waited for messages of
            other workers, or None if it is not known.
    """

    def __init__(
        self,
        folder: Path | None,
        say: Callable[[str, str], None],
        *,
        every_s: float = EVERY_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(folder)
        self.straggler: Straggler | None = None
        self.others_share: float | None = None
        self._all_s = self._all_waited_s = 0.0
        self._say = say
        self._printed: tuple[str, int | None] | None = None
        # The waits for others, by the rank of the worker whose message was the last one.
        self._waits_s = self._before_s = np.zeros(0)
        self._executions = 0
        self._every_s, self._clock = every_s, clock
        self._compared_s = clock()
        # The figures of this worker in the epoch, up to the last comparison.
        self._before: tuple[float, ...] = ()

    def on_train_begin(self, logs: Any = None) -> None:
        """Takes the connections to the other workers, if there are any yet."""
        self._channel = made_channel(placement_of(self.model.distribute_strategy))
        self._is_traced = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begins to count."""
        workers = placement_of(self.model.distribute_strategy).workers
        self._waits_s, self._executions = np.zeros(workers), 0
        self._before, self._compared_s = (0.0,) * (3 + workers), self._clock()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Notes how long this worker has waited for others before the execution."""
        if self._channel is not None:
            self._before_s = self._channel.waited_s.copy()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Counts how long the execution has waited for others."""
        if self._channel is None:
            # The first execution connects the workers.
            self._channel = made_channel(placement_of(self.model.distribute_strategy))
        elif self._is_traced:
            self._waits_s += self._channel.waited_s - self._before_s
            self._executions += 1
        # The first execution is traced, and does not count in the times of the steps either.
        self._is_traced = True
        state = state_of(self.model)
        if state.compares:
            # All workers have counted the same votes, so all of them come here.
            figures = self._figures()
            since = [now - before for now, before in zip(figures, self._before, strict=True)]
            self._before, self._compared_s = figures, self._clock()
            self._compare(since)
        elif self._clock() - self._compared_s > self._every_s:
            state.wants_comparison = True

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Compares the workers by the whole epoch, and writes the figures for TensorBoard."""
        if placement_of(self.model.distribute_strategy).workers == 1:
            return
        figures = self._figures()
        self._all_s += figures[0]
        self._all_waited_s += float(self._waits_s.sum())
        if self._channel is not None and self._all_s:
            self.others_share = min(1.0, self._all_waited_s / self._all_s)
        if self._compare(figures):
            worker = None if self.straggler is None else self.straggler.worker
            scalars = {
                "straggler/worker": -1 if worker is None else worker,
                "straggler/slowdown": self.straggler.slowdown if self.straggler else 1.0,
                "straggler/cause": _CAUSES.index(self.straggler.cause if self.straggler else ""),
            }
            self.write_scalars(epoch, scalars)

    def _figures(self) -> tuple[float, ...]:
        """Returns this worker's figures of the epoch so far.

        They are the seconds of the steps, the seconds in which these waited for data, the number of
        executions, and the seconds in which they waited for each worker.
        """
        times = state_of(self.model).epoch
        return times.seconds, times.own_waited_s, float(self._executions), *self._waits_s.tolist()

    def _compare(self, figures: Sequence[float]) -> bool:
        """Compares the workers, and prints a line if another worker stands out than before.

        Every worker calls it after the same step, with its `_figures`. The result says whether
        there were enough steps for a comparison.
        """
        placement = placement_of(self.model.distribute_strategy)
        if placement.workers == 1:
            return False
        # Workers gather whole numbers.
        millionths = gather(self.model.distribute_strategy, [round(1e6 * x) for x in figures])
        seconds, for_data, executions, *columns = (
            [x / 1e6 for x in column] for column in zip(*millionths, strict=True)
        )
        by_worker = list(zip(*columns, strict=True))
        for_others = [sum(waits) for waits in by_worker]
        if min(seconds) < _LEAST_S or min(executions) < _LEAST_EXECUTIONS or not any(for_others):
            return False
        self.straggler = straggler_of(seconds, for_data, for_others, placement.addresses, by_worker)
        now = (self.straggler.cause, self.straggler.worker) if self.straggler else None
        if self.straggler is not None and now != self._printed:
            self._say("straggler", self.straggler.words())
        self._printed = now
        return True

    def as_dict(self) -> dict[str, Any] | None:
        """Returns what stood out in the last epoch, for report.json."""
        return None if self.straggler is None else dataclasses.asdict(self.straggler)

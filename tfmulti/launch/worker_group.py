"""All workers of one attempt, on whatever machines they run."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

from tfmulti.launch.machine import Machine, Unreachable
from tfmulti.launch.membership import Placement, ranks_of
from tfmulti.launch.workers import StartRequest, WorkerStatus

T = TypeVar("T")


class WorkerGroup:
    """The workers of an attempt. A context: whatever happens, none is left at its end.

    Args:
        machines: by name, all that the placement names.
        lost: is told of a machine that does not answer any more, and why.
    """

    def __init__(
        self,
        machines: Mapping[str, Machine],
        placement: Placement,
        lost: Callable[[str, str], None],
    ) -> None:
        self.placement = placement
        self.places = ranks_of(placement)
        self.addresses: list[str] = []
        self.lost: dict[str, str] = {}
        self.lost_s = 0.0
        self._machines = {name: machines[name] for name, _ in placement}
        self._when_lost = lost
        self._last: dict[int, WorkerStatus] = {}
        self._orders: dict[str, list[StartRequest]] = {}

    def __enter__(self) -> WorkerGroup:
        return self

    def __exit__(self, *error: object) -> None:
        self._on_each(lambda machine: machine.kill())

    def start(
        self,
        run_id: str,
        attempt: int,
        saved: Mapping[str, int],
        folder: Callable[[int], Path],
    ) -> None:
        """Starts all workers at once; see `StartRequest` for what they are told."""
        counts = dict(self.placement)
        found = self._on_each(lambda machine: machine.reserve(counts[machine.name]))
        if self.lost:
            return
        self.addresses = [address for name, _ in self.placement for address in found[name]]
        gpus = min(self._machines[name].gpus // count for name, count in self.placement)
        for rank, (name, local, count) in self.places.items():
            order = StartRequest(
                rank,
                local,
                count,
                tuple(self.addresses),
                run_id,
                attempt,
                str(folder(rank)),
                gpus,
                dict(saved),
            )
            self._orders.setdefault(name, []).append(order)
        self._on_each(lambda machine: machine.start(self._orders[machine.name]))

    def look(self) -> list[WorkerStatus]:
        """Returns what was seen last of each worker, by rank.

        Those of machines that do not answer any more are as they were: see `lost`.
        """
        for looks in self._on_each(lambda machine: machine.look()).values():
            self._last.update((seen.rank, seen) for seen in looks)
        return [self._last[rank] for rank in sorted(self._last)]

    def within_reach(self, seen: WorkerStatus) -> bool:
        """Whether a worker's machine answers."""
        return self.places[seen.rank][0] not in self.lost

    def running(self) -> list[WorkerStatus]:
        """Returns the workers within reach that have not ended."""
        return [seen for seen in self.look() if seen.runs and self.within_reach(seen)]

    def prepare(self) -> None:
        """Makes processes ready for another attempt."""
        self._on_each(lambda machine: machine.prepare(self._orders[machine.name]))

    def silent(self) -> list[int]:
        """Returns the ranks that do not listen, as the chief's machine sees it."""
        chief = self.placement[0][0]
        found = self._on_each(
            lambda machine: machine.silent(self.addresses) if machine.name == chief else []
        )
        return found.get(chief, [])

    def stacks(self) -> dict[int, str]:
        """Returns the Python stacks of all workers that run, by rank."""
        found = self._on_each(lambda machine: machine.stacks())
        return {rank: text for stacks in found.values() for rank, text in sorted(stacks.items())}

    def end(self, grace_s: float) -> None:
        """Asks all workers to stop and gives them that time to save; what is left is killed."""
        self._on_each(lambda machine: machine.stop())
        deadline = time.monotonic() + grace_s
        while self.running() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._on_each(lambda machine: machine.kill())

    def _on_each(self, act: Callable[[Machine], T]) -> dict[str, T]:
        found = {}
        for name, machine in self._machines.items():
            if name in self.lost:
                continue
            try:
                found[name] = act(machine)
            except Unreachable as error:
                self.lost[name] = str(error)
                self.lost_s = self.lost_s or time.monotonic()
                self._when_lost(name, str(error))
        return found

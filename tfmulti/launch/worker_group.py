"""Starts, watches and ends all workers of one attempt, on all its machines."""

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
    """The workers of one attempt. It is a context that kills all of them at its end.

    A machine that stops answering is noted in `lost`, and is not asked again.

    Attributes:
        locations: for each rank, its host, its local rank, and the number of workers on that host.
        addresses: the address of each worker, by rank; empty before `start`.
        lost: for each host that has stopped answering, why.
        lost_s: when the first of them was noticed, in seconds of the launcher's clock.

    Args:
        machines: the machines by name, with at least those of the placement.
        placement: the hosts and the number of workers on each.
        lost: is called with the name of a machine that has stopped answering, and why.
    """

    def __init__(
        self,
        machines: Mapping[str, Machine],
        placement: Placement,
        lost: Callable[[str, str], None],
    ) -> None:
        self.placement = placement
        self.locations = ranks_of(placement)
        self.addresses: list[str] = []
        self.lost: dict[str, str] = {}
        self.lost_s = 0.0
        self._machines = {name: machines[name] for name, _ in placement}
        self._on_lost = lost
        self._last: dict[int, WorkerStatus] = {}
        self._requests: dict[str, list[StartRequest]] = {}

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
        """Starts all workers, or none if a machine stops answering before.

        Args:
            run_id: names the job, the same on all machines.
            attempt: the number of the attempt.
            saved: for each folder of checkpoints, the step of the newest one.
            folder: returns the folder of a worker's files, by rank.
        """
        counts = dict(self.placement)
        addresses_by_host = self._on_each(lambda machine: machine.reserve(counts[machine.name]))
        if self.lost:
            return
        self.addresses = [
            address for name, _ in self.placement for address in addresses_by_host[name]
        ]
        # MultiWorkerMirroredStrategy needs the same number of devices on every worker.
        gpus = min(self._machines[name].gpus // count for name, count in self.placement)
        for rank, (name, local, count) in self.locations.items():
            request = StartRequest(
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
            self._requests.setdefault(name, []).append(request)
        self._on_each(lambda machine: machine.start(self._requests[machine.name]))

    def statuses(self) -> list[WorkerStatus]:
        """Returns the last known status of each worker, ordered by rank.

        The status of a worker on a machine that has stopped answering is the last one received.
        """
        for statuses_of_machine in self._on_each(lambda machine: machine.statuses()).values():
            self._last.update((status.rank, status) for status in statuses_of_machine)
        return [self._last[rank] for rank in sorted(self._last)]

    def running(self) -> list[WorkerStatus]:
        """Returns the workers that have not ended, on machines that answer."""
        return [
            status
            for status in self.statuses()
            if status.runs and self.locations[status.rank][0] not in self.lost
        ]

    def prepare(self) -> None:
        """Starts standby processes for another attempt, on all machines."""
        self._on_each(lambda machine: machine.prepare(self._requests[machine.name]))

    def silent(self) -> list[int]:
        """Returns the ranks of the workers that, seen from the chief's machine, do not listen."""
        chief = self.placement[0][0]
        silent_by_host = self._on_each(
            lambda machine: machine.silent(self.addresses) if machine.name == chief else []
        )
        return silent_by_host.get(chief, [])

    def stacks(self) -> dict[int, str]:
        """Returns the Python stacks of all running workers, by rank."""
        stacks_by_host = self._on_each(lambda machine: machine.stacks())
        return {
            rank: text
            for stacks in stacks_by_host.values()
            for rank, text in sorted(stacks.items())
        }

    def end(self, grace_s: float) -> None:
        """Asks all workers to stop, waits up to `grace_s` while they save, and kills the rest."""
        self._on_each(lambda machine: machine.stop())
        deadline = time.monotonic() + grace_s
        while self.running() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._on_each(lambda machine: machine.kill())

    def _on_each(self, act: Callable[[Machine], T]) -> dict[str, T]:
        """Returns the result of `act` for each machine that answers, by name; notes the others."""
        results = {}
        for name, machine in self._machines.items():
            if name in self.lost:
                continue
            try:
                results[name] = act(machine)
            except Unreachable as error:
                self.lost[name] = str(error)
                self.lost_s = self.lost_s or time.monotonic()
                self._on_lost(name, str(error))
        return results

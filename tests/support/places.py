"""Runs test functions in separate processes, at the places of training.

A place is `one_device`, `mirrored-N` (N replicas in one process) or `workers-N` (N processes of
one replica). At `plain` Keras runs alone, without tfmulti.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from tests.support.processes import ONE_THREAD, at_a_time, run, run_workers

ONE_DEVICE = "one_device"
# MirroredStrategy with one replica, as on a machine with one GPU.
ONE_REPLICA = "mirrored-1"
ONE_WORKER = "workers-1"
TWO_REPLICAS, TWO_WORKERS, THREE_WORKERS = "mirrored-2", "workers-2", "workers-3"
SEVERAL = (TWO_REPLICAS, TWO_WORKERS)
EVERYWHERE = (ONE_DEVICE, *SEVERAL)
# With EXACTNESS_EVERYWHERE=1, before a release, each behaviour and case runs at all of its places.
BEFORE_RELEASE = os.environ.get("EXACTNESS_EVERYWHERE") == "1"


def few(*places: str, of: tuple[str, ...]) -> tuple[str, ...]:
    """Returns these places, or all of them before a release.

    They are the places of a behaviour in CI. Two workers take the time of two processes, so that
    only what processes, sockets and each worker's data could change runs there each time.
    """
    assert set(places) <= set(of)
    return of if BEFORE_RELEASE else places


def run_at(place: str, argv: Sequence[str], logs: Path, *, limit_s: float) -> None:
    """Runs Python with these arguments in one process, or in each worker of the place.

    Raises:
        AssertionError: a process failed or was too slow; the message holds the ends of the logs.
    """
    if place.startswith("workers"):
        run_workers(argv, workers_at(place), logs, limit_s=limit_s, env=ONE_THREAD)
    else:
        done = run(argv, logs, limit_s=limit_s, env=ONE_THREAD)
        assert done.returncode == 0, done.stderr[-6000:]


def workers_at(place: str) -> int:
    """Returns the number of processes of a place."""
    kind, _, count = place.partition("-")
    return int(count) if kind == "workers" else 1


class Places:
    """The results of named functions at each place: a dictionary by name for each worker.

    The first access starts the processes of all places. Places of several workers run one after
    the other and the other places after them, so that two cores are busy and no more.
    """

    def __init__(self, folder: Path, wanted: Iterable[tuple[str, str]]) -> None:
        """Takes the wanted pairs of a place and a name."""
        self._folder = folder
        self._names: dict[str, list[str]] = {}
        for place, name in dict.fromkeys(wanted):
            self._names.setdefault(place, []).append(name)
        self._futures: dict[str, Future[Any]] = {}
        self._workers = ThreadPoolExecutor(1)
        self._replicas = ThreadPoolExecutor(at_a_time())
        self._lock = threading.Lock()

    def __getitem__(self, place: str) -> list[dict[str, Any]]:
        with self._lock:
            if not self._futures:
                self._start()
        return self._futures[place].result()

    def _start(self) -> None:
        places = sorted(self._names, key=lambda p: int(p.partition("-")[2] or 1), reverse=True)
        several = [place for place in places if place.startswith("workers")]
        for place in several:
            self._futures[place] = self._workers.submit(self._run, place)
        for place in places:
            if place not in several:
                self._futures[place] = self._replicas.submit(self._after, several, place)

    def _after(self, others: list[str], place: str) -> list[dict[str, Any]]:
        wait([self._futures[other] for other in others])
        return self._run(place)

    def _run(self, place: str) -> list[dict[str, Any]]:
        raise NotImplementedError

    def close(self) -> None:
        for pool in (self._workers, self._replicas):
            pool.shutdown(cancel_futures=True)

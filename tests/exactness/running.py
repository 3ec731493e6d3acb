"""Runs the cases at each place once, in the background."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import numpy as np

from tests.support.cases import CASES, EVERYWHERE
from tests.support.processes import ONE_THREAD, at_a_time, run, run_workers

LIMIT_S = 2400 if EVERYWHERE else 600  # of one place; the longest takes 200 s on two cores

Arrays = dict[str, dict[str, np.ndarray]]


class Places:
    """What the cases left at each place: case -> name -> array, an entry a worker.

    All runs start when the first is asked for: those of several workers one after the other,
    then the others, so that two cores are busy and no more.
    """

    def __init__(self, folder: Path, wanted: Iterable[tuple[str, str]]) -> None:
        self._folder = folder
        self._cases: dict[str, list[str]] = {}
        for place, case in wanted:
            self._cases.setdefault(place, []).append(case)
        self._futures: dict[str, Future[list[Arrays]]] = {}
        self._workers = ThreadPoolExecutor(1)
        self._replicas = ThreadPoolExecutor(at_a_time())
        self._lock = threading.Lock()

    def __getitem__(self, place: str) -> list[Arrays]:
        with self._lock:
            if not self._futures:
                self._start()
        return self._futures[place].result()

    def _start(self) -> None:
        names = sorted(self._cases, key=lambda name: int(name.partition("-")[2] or 1), reverse=True)
        several = [name for name in names if name.startswith("workers")]
        for name in several:
            self._futures[name] = self._workers.submit(self._run, name)
        for name in names:
            if name not in several:
                self._futures[name] = self._replicas.submit(self._after, several, name)

    def _after(self, others: list[str], place: str) -> list[Arrays]:
        wait([self._futures[name] for name in others])
        return self._run(place)

    def close(self) -> None:
        for pool in (self._workers, self._replicas):
            pool.shutdown(cancel_futures=True)

    def _run(self, place: str) -> list[Arrays]:
        folder = self._folder / place
        names = [name for name in CASES if name in self._cases[place]]
        argv = ["-m", "tests.support.cases", str(folder / "out_RANK.npz"), place, "|".join(names)]
        kind, _, count = place.partition("-")
        if kind == "workers":
            run_workers(argv, int(count), folder, limit_s=LIMIT_S, env=ONE_THREAD)
        else:
            done = run(argv, folder, limit_s=LIMIT_S, env=ONE_THREAD)
            assert done.returncode == 0, done.stderr[-6000:]
        return [_by_case(file) for file in sorted(folder.glob("out_*.npz"))]


def _by_case(file: Path) -> Arrays:
    found: Arrays = {}
    with np.load(file) as archive:
        for name in archive.files:
            case, _, part = name.partition("|")
            found.setdefault(case, {})[part] = archive[name]
    return found

"""Runs the cases at each place once, in the background, two places at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from tests.support.cases import CASES
from tests.support.processes import run, run_workers

LIMIT_S = 600  # of one place; the longest takes 200 s on two cores, beside another

Arrays = dict[str, dict[str, np.ndarray]]


class Places:
    """What the cases left at each place: case -> name -> array, an entry a worker.

    All runs start when the first is asked for; the longest first, two at a time.
    """

    def __init__(self, folder: Path, wanted: Iterable[tuple[str, str]]) -> None:
        self._folder = folder
        self._cases: dict[str, list[str]] = {}
        for place, case in wanted:
            self._cases.setdefault(place, []).append(case)
        self._futures: dict[str, Future[list[Arrays]]] = {}
        self._pool = ThreadPoolExecutor(2)
        self._lock = threading.Lock()

    def __getitem__(self, place: str) -> list[Arrays]:
        with self._lock:
            if not self._futures:
                for name in sorted(self._cases, key=_how_long, reverse=True):
                    self._futures[name] = self._pool.submit(self._run, name)
        return self._futures[place].result()

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _run(self, place: str) -> list[Arrays]:
        folder = self._folder / place
        names = [name for name in CASES if name in self._cases[place]]
        argv = ["-m", "tests.support.cases", str(folder / "out_RANK.npz"), place, "|".join(names)]
        kind, _, count = place.partition("-")
        if kind == "workers":
            run_workers(argv, int(count), folder, limit_s=LIMIT_S)
        else:
            done = run(argv, folder, limit_s=LIMIT_S)
            assert done.returncode == 0, done.stderr[-6000:]
        return [_by_case(file) for file in sorted(folder.glob("out_*.npz"))]


def _how_long(place: str) -> int:
    kind, _, count = place.partition("-")
    return int(count or 1) * (2 if kind == "workers" else 1)


def _by_case(file: Path) -> Arrays:
    found: Arrays = {}
    with np.load(file) as archive:
        for name in archive.files:
            case, _, part = name.partition("|")
            found.setdefault(case, {})[part] = archive[name]
    return found

"""Sources that count and hold back reads, and the replicas of a worker that reads them."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from tfmulti.data.arrays import ArraySource

# Only a test that fails waits for so long.
LIMIT_S = 20


@dataclass(frozen=True)
class WorkerReplicas:
    """The replicas of one worker: by default of the only worker, with one replica."""

    rank: int = 0
    workers: int = 1
    local_replicas: int = 1

    @property
    def first_replica(self) -> int:
        return self.rank * self.local_replicas

    @property
    def replicas(self) -> int:
        return self.workers * self.local_replicas


class Counting(ArraySource):
    """Numbers 0 … n-1; counts how often each was read, and cannot read some."""

    def __init__(self, rows: int, bad: tuple[int, ...] = ()) -> None:
        super().__init__((np.arange(rows, dtype=np.int64),))
        self.read_rows: Counter[int] = Counter()
        self.calls: list[int] = []
        self.bad = bad
        self._lock = threading.Lock()

    def read_into(self, indices: np.ndarray, epoch: int, out: Any) -> None:
        if set(self.bad) & set(indices.tolist()):
            raise OSError(5, "Input/output error")
        with self._lock:
            self.read_rows.update(indices.tolist())
            self.calls.append(len(indices))
        super().read_into(indices, epoch, out)

    def read(self, indices: Any, epoch: int = 0) -> Any:
        if set(self.bad) & set(np.asarray(indices).tolist()):
            raise OSError(5, "Input/output error")
        return super().read(indices, epoch)

    def where(self, index: int) -> str:
        return f"file, record {index}"


class Gated(Counting):
    """Each of its reads releases `begun`, and waits for `go`."""

    def __init__(self, rows: int) -> None:
        super().__init__(rows)
        self.begun, self.go = threading.Semaphore(0), threading.Event()

    def read_into(self, indices: np.ndarray, epoch: int, out: Any) -> None:
        self.begun.release()
        self.go.wait(LIMIT_S)
        self.go.set()
        super().read_into(indices, epoch, out)

    def wait_for(self, reads: int) -> None:
        """Waits until so many reads have begun."""
        assert all(self.begun.acquire(timeout=LIMIT_S) for _ in range(reads))

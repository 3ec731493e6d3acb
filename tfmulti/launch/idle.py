"""Since when process groups use no core: what tells a worker that waits from one that works."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

SAMPLE_S = 1.0
BUSY_SHARE = 0.02  # of one core; a TensorFlow process that waits in a collective uses 0.002
_TICKS_A_S = os.sysconf("SC_CLK_TCK")

Use = dict[int, tuple[float, bool]]  # process group -> seconds of cores so far, waits for a disk


def cores_used() -> Use:
    """Returns what each process group of this machine has used, from /proc."""
    used: Use = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        group = int(fields[2])
        seconds, waits = used.get(group, (0.0, False))
        seconds += (int(fields[11]) + int(fields[12])) / _TICKS_A_S
        used[group] = (seconds, waits or fields[0] == "D")
    return used


class Idle:
    """Samples once a second how much process groups use."""

    def __init__(
        self,
        look: Callable[[], Use] = cores_used,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look, self._clock = look, clock
        self._sampled_s = float("-inf")
        self._used: Use = {}
        self._since: dict[int, float] = {}

    def since(self, group: int) -> float:
        """Returns since when a process group uses no core; now, if it does or is new."""
        now = self._clock()
        if now - self._sampled_s >= SAMPLE_S:
            self._sample(now)
        return self._since.get(group, now)

    def _sample(self, now: float) -> None:
        used = self._look()
        since = {}
        for group, (seconds, waits) in used.items():
            before = self._used.get(group, (0.0, False))[0]
            works = seconds - before > BUSY_SHARE * (now - self._sampled_s)
            known = group in self._used and not works and not waits
            since[group] = self._since.get(group, now) if known else now
        self._used, self._since, self._sampled_s = used, since, now

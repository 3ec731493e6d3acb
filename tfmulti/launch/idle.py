"""Since when process groups do nothing: what tells a worker that waits from one that works."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SAMPLE_S = 1.0
BUSY_SHARE = 0.02  # of one core; a TensorFlow process that waits in a collective uses 0.002
_TICKS_A_S = os.sysconf("SC_CLK_TCK")

# A process may wait this long for a disk without a byte: it writes back what it has written. One
# that waits longer, for a file server that is gone, does nothing.
DISK_S = 120.0


class Use(NamedTuple):
    """What a process group has used since its start."""

    core_s: float = 0.0
    disk_bytes: int = 0  # read and written
    waits_for_disk: bool = False


def used_by_groups() -> dict[int, Use]:
    """Returns what each process group of this machine has used, from /proc."""
    groups: dict[int, Use] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        group = int(fields[2])
        before = groups.get(group, Use())
        groups[group] = Use(
            before.core_s + (int(fields[11]) + int(fields[12])) / _TICKS_A_S,
            before.disk_bytes + _disk_bytes(entry),
            before.waits_for_disk or fields[0] == "D",
        )
    return groups


def _disk_bytes(entry: Path) -> int:
    try:
        lines = (entry / "io").read_text().splitlines()
    except OSError:  # of another user
        return 0
    counts = dict(line.split(": ") for line in lines)
    return int(counts["read_bytes"]) + int(counts["write_bytes"])


class Idle:
    """Samples once a second how much process groups use."""

    def __init__(
        self,
        look: Callable[[], dict[int, Use]] = used_by_groups,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look, self._clock = look, clock
        self._sampled_s = float("-inf")
        self._used: dict[int, Use] = {}
        self._moved: dict[int, float] = {}  # when bytes last went to or from a disk
        self._since: dict[int, float] = {}

    def since(self, group: int) -> float:
        """Returns since when a process group does nothing; now, if it works or is new."""
        now = self._clock()
        if now - self._sampled_s >= SAMPLE_S:
            self._sample(now)
        return self._since.get(group, now)

    def _sample(self, now: float) -> None:
        used = self._look()
        moved, since = {}, {}
        for group, use in used.items():
            before = self._used.get(group)
            same = before is not None and use.disk_bytes == before.disk_bytes
            moved[group] = self._moved.get(group, now) if same else now
            works = (
                before is None
                or use.core_s - before.core_s > BUSY_SHARE * (now - self._sampled_s)
                or (use.waits_for_disk and now - moved[group] < DISK_S)
            )
            since[group] = now if works else self._since.get(group, now)
        self._used, self._moved, self._since, self._sampled_s = used, moved, since, now

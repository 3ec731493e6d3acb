"""Measures how long a process group has been idle, which shows whether a worker waits or works.

A process group works if it uses more than 2 % of one core. On a busy machine a process may get no
core although it needs one, so a group works, too, if its main threads wait for cores half of the
time. It also counts as working while one of its processes waits for a disk, unless no byte has
moved for two minutes. The figures come from /proc.

A process group that polls for something that never comes works by this measure. So the class also
measures since when a group is still: it may use cores, but reads and writes no byte of a disk, and
takes no more memory.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SAMPLE_S = 1.0

# The share of one core above which a group works. A TensorFlow process that waits in a collective
# uses 0.002.
BUSY_SHARE = 0.02
# The share of the time above which a group works that waits for a core. A process that sleeps and
# looks again and again has less, also on a busy machine.
QUEUED_SHARE = 0.5
# A longer time between two samples counts as this: this process got no core either, or the machine
# was paused, so the groups could use none for most of the time.
_LONGEST_S = 5.0
_TICKS_A_S = os.sysconf("SC_CLK_TCK")

# A group that takes this part more memory than ever before is not still.
_GROWTH = 1.01

# A process may wait this long for a disk while no byte moves, because the system still writes back
# its earlier data. A process that waits longer, for a file server that is gone, is idle.
DISK_S = 120.0


class Use(NamedTuple):
    """What the processes of a group have used since their start.

    Attributes:
        core_s: the seconds of cores.
        disk_bytes: the bytes read from and written to disks.
        waits_for_disk: whether a process waits for a disk at this moment.
        memory_pages: the pages of memory in use at this moment.
        queued_s: the seconds that the main threads have waited for a core.
    """

    core_s: float = 0.0
    disk_bytes: int = 0
    waits_for_disk: bool = False
    memory_pages: int = 0
    queued_s: float = 0.0


def used_by_groups() -> dict[int, Use]:
    """Returns what each process group of this machine has used, by the number of the group."""
    groups: dict[int, Use] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdecimal():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            # The process has ended.
            continue
        group = int(fields[2])
        before = groups.get(group, Use())
        groups[group] = Use(
            before.core_s + (int(fields[11]) + int(fields[12])) / _TICKS_A_S,
            before.disk_bytes + _disk_bytes(entry),
            before.waits_for_disk or fields[0] == "D",
            before.memory_pages + int(fields[21]),
            before.queued_s + _queued_s(entry),
        )
    return groups


def _disk_bytes(entry: Path) -> int:
    """Returns the bytes that a process has read from and written to disks."""
    try:
        lines = (entry / "io").read_text().splitlines()
    except OSError:
        # The process belongs to another user.
        return 0
    counts = dict(line.split(": ") for line in lines)
    return int(counts["read_bytes"]) + int(counts["write_bytes"])


def _queued_s(entry: Path) -> float:
    """Returns how long the main thread of a process has waited for a core, or 0 if unknown."""
    try:
        return int((entry / "schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError):
        # The process has ended, or this kernel does not tell it.
        return 0.0


class Idle:
    """Knows since when process groups are idle, from at most one sample a second.

    Args:
        measure: returns what each process group has used, by the number of the group.
        clock: returns seconds.
    """

    def __init__(
        self,
        measure: Callable[[], dict[int, Use]] = used_by_groups,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._measure, self._clock = measure, clock
        self._sampled_s = float("-inf")
        self._used: dict[int, Use] = {}
        # When bytes last went to or from a disk.
        self._moved: dict[int, float] = {}
        # The most pages of memory, and when they last became more.
        self._grown: dict[int, tuple[int, float]] = {}
        self._since: dict[int, float] = {}

    def since(self, group: int) -> float:
        """Returns since when a process group is idle, in seconds of the clock.

        The result is the time of the call if the group is not known yet. For a group that works
        it is the time of the last sample.

        Args:
            group: the number of the process group.
        """
        now = self._now()
        return self._since.get(group, now)

    def still_since(self, group: int) -> float:
        """Returns since when a process group is still, in seconds of the clock.

        The result is the time of the call if the group is not known yet.

        Args:
            group: the number of the process group.
        """
        now = self._now()
        return max(self._moved.get(group, now), self._grown.get(group, (0, now))[1])

    def _now(self) -> float:
        """Returns the time, after another sample if the last one is old."""
        now = self._clock()
        if now - self._sampled_s >= SAMPLE_S:
            self._sample(now)
        return now

    def _sample(self, now: float) -> None:
        """Compares what all groups have used with the sample before."""
        try:
            used = self._measure()
        except OSError:
            # This process can open no more files. Meanwhile every group counts as working.
            used = {}
        moved, grown, since = {}, {}, {}
        for group, use in used.items():
            before = self._used.get(group)
            same = before is not None and use.disk_bytes == before.disk_bytes
            moved[group] = self._moved.get(group, now) if same else now
            most, grown_s = self._grown.get(group, (0, now))
            grows = use.memory_pages > _GROWTH * most
            grown[group] = (use.memory_pages, now) if grows else (most, grown_s)
            passed_s = min(now - self._sampled_s, _LONGEST_S)
            works = (
                before is None
                or use.core_s - before.core_s > BUSY_SHARE * passed_s
                or use.queued_s - before.queued_s > QUEUED_SHARE * passed_s
                or (use.waits_for_disk and now - moved[group] < DISK_S)
            )
            since[group] = now if works else self._since.get(group, now)
        self._used, self._moved, self._grown = used, moved, grown
        self._since, self._sampled_s = since, now

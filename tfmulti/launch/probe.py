"""Reports to a container engine whether a worker is alive, by its heartbeat file.

    python -m tfmulti.launch.probe started    exit code 0 once training has begun
    python -m tfmulti.launch.probe alive      exit code 1 if a step takes far too long

The environment variable TFMULTI_PROGRESS_FILE names the file, for the worker and for the probe.
Both must read the same clock, as the processes of one container do.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tfmulti.errors import EXIT_DONE, EXIT_FAILED, EXIT_USER
from tfmulti.launch.heartbeat import PROGRESS_FILE, TRAINING, HeartbeatRecord, read_progress
from tfmulti.launch.policy import StepTiming, stalled

# A step may take this long, and at least five times as long as the longest step before.
STALL_S = 600.0


def is_alive(heartbeat: HeartbeatRecord | None, now_s: float) -> bool:
    """Returns whether a worker is alive: it has not begun, or no step takes far too long.

    Only the duration of a step of a known kind can be judged, as `policy.stalled` does.

    Args:
        heartbeat: the last heartbeat of the worker. None: it has not begun.
        now_s: the time, in seconds of `time.monotonic`.

    >>> is_alive(HeartbeatRecord(7, TRAINING, since_s=0.0, longest_s=200.0), now_s=900.0)
    True
    >>> is_alive(HeartbeatRecord(7, TRAINING, since_s=0.0, longest_s=200.0), now_s=1001.0)
    False
    """
    if heartbeat is None:
        return True
    step = StepTiming(
        heartbeat.phase == TRAINING, heartbeat.since_s, heartbeat.longest_s, idle_since_s=now_s
    )
    return not stalled([step], now_s, STALL_S)


def main(argv: Sequence[str] | None = None, env: Mapping[str, str] = os.environ) -> int:
    """Runs the command and returns its exit code.

    Args:
        argv: the arguments. None: those of this process.
        env: the environment, which names the file.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments not in (["started"], ["alive"]) or PROGRESS_FILE not in env:
        print(f"tfmulti: give started or alive, and set {PROGRESS_FILE}.", file=sys.stderr)
        return EXIT_USER
    heartbeat = read_progress(Path(env[PROGRESS_FILE]))
    is_true = (
        heartbeat is not None if arguments == ["started"] else is_alive(heartbeat, time.monotonic())
    )
    return EXIT_DONE if is_true else EXIT_FAILED


if __name__ == "__main__":
    sys.exit(main())

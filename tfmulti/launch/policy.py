"""What the launcher does after an attempt: a pure function of what happened.

An attempt is one start of the whole job. MultiWorkerMirroredStrategy cannot take a worker
back, so when one fails all are ended and started again, and resume from their checkpoint.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from tfmulti.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_TERMINATED, EXIT_USER

FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0
ASKED_TO_STOP = (EXIT_TERMINATED, EXIT_INTERRUPTED)  # exit codes of who saved and ended
NOBODY_WAITS = 20  # times as long, until a job is stalled of which no worker is in a step


@dataclass(frozen=True)
class Failure:
    """Why one worker did not end well.

    `exit_code` is its own, or 128 + the number of the signal that ended it. `found_s` is when
    it was noticed (or written down by the worker itself), in seconds of one clock for all. It
    `follows` from another one where it says that another worker was lost. It was `notice` that
    ended it where the worker itself, and not all of them, was asked to stop.
    """

    rank: int
    what: str
    exit_code: int
    found_s: float
    step: int | None = None
    traceback: str = ""
    last_line: str = ""
    follows: bool = False
    notice: bool = False


@dataclass(frozen=True)
class Attempt:
    """How an attempt ended: `failures` is empty where all workers ended well.

    `step` is the furthest that a worker told; None where none told one.
    """

    failures: tuple[Failure, ...]
    step: int | None = None

    @property
    def cause(self) -> Failure:
        """The earliest failure that does not follow from another one; a notice is before all."""
        return min(self.failures, key=lambda f: (not f.notice, f.follows, f.found_s))


@dataclass(frozen=True)
class Budget:
    """How often the job may still be started again.

    `used` counts the restarts since the job last moved on, `furthest` is the step it reached.
    """

    max_restarts: int
    used: int = 0
    furthest: int = -1


@dataclass(frozen=True)
class Restart:
    """Start all workers again after `delay_s`, with this budget left."""

    delay_s: float
    budget: Budget


@dataclass(frozen=True)
class Stop:
    """End the job with an exit code, and say why where that is not plain."""

    exit_code: int
    why: str = ""


def next_action(attempt: Attempt, budget: Budget) -> Restart | Stop:
    """Returns what to do after an attempt.

    A user's mistake (exit code 2) and Ctrl-C are never answered by a restart. The first restart
    after the job moved on is at once, the following ones wait 1, 2, 4, … seconds.

    >>> crash = Failure(rank=1, what="exited with 1", exit_code=1, found_s=5.0)
    >>> next_action(Attempt((crash,), step=90), Budget(max_restarts=3, used=2, furthest=40))
    Restart(delay_s=0.0, budget=Budget(max_restarts=3, used=1, furthest=90))
    >>> next_action(Attempt((crash,), step=40), Budget(max_restarts=3, used=3, furthest=40))
    Stop(exit_code=1, why='3 restarts without progress are used up (--max-restarts 3)')
    """
    if not attempt.failures:
        return Stop(EXIT_DONE)
    code = attempt.cause.exit_code
    if code == EXIT_USER:
        return Stop(code, "a mistake in what was asked for is not tried again")
    if code == EXIT_INTERRUPTED:
        return Stop(code, "it was interrupted")
    furthest = max(budget.furthest, -1 if attempt.step is None else attempt.step)
    used = 0 if furthest > budget.furthest else budget.used
    if used >= budget.max_restarts:
        plural = "" if budget.max_restarts == 1 else "s"
        return Stop(
            code,
            f"{budget.max_restarts} restart{plural} without progress are used up "
            f"(--max-restarts {budget.max_restarts})"
            if budget.max_restarts
            else "",
        )
    delay = 0.0 if used == 0 else min(FIRST_DELAY_S * 2 ** (used - 1), LONGEST_DELAY_S)
    return Restart(delay, Budget(budget.max_restarts, used + 1, furthest))


# What TensorFlow raises in a worker whose peer is gone.
LOST_A_WORKER = ("UnavailableError", "AbortedError", "CancelledError", "DeadlineExceededError")


def words_of_exit(returncode: int) -> tuple[str, int]:
    """Returns what a process' return code says, and the exit code that a shell would give.

    >>> words_of_exit(-9)
    ('was killed by SIGKILL (by hand, or by the system for want of memory)', 137)
    >>> words_of_exit(3)
    ('exited with 3', 3)
    """
    if returncode >= 0:
        if returncode == EXIT_TERMINATED:
            return "was asked to stop by SIGTERM", returncode
        return f"exited with {returncode}", returncode
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    hint = " (by hand, or by the system for want of memory)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}", 128 - returncode


@dataclass(frozen=True)
class StepTiming:
    """How a worker goes: since when it does what it does, and since when without using a core.

    It `computes` a step, in which workers wait for each other; `longest_s` is the longest such so
    far. Otherwise it traces (`first`, also inside of a step), runs callbacks, saves: nobody knows
    how long that takes.
    """

    computes: bool
    since_s: float
    longest_s: float
    idle_since_s: float
    first: bool = False

    @property
    def in_step(self) -> bool:
        """Whether it is in a step, known or first, where others may be waited for."""
        return self.computes or self.first


def stalled(paces: Sequence[StepTiming], now_s: float, timeout_s: float) -> bool:
    """Whether the job stands still: all wait, and at least one of them in a step.

    Args:
        timeout_s: at least so long, and for a step never below five of the longest ones. Where
            no worker is in a step it takes twenty times as long: they may all save a large model.

    >>> waits = StepTiming(True, since_s=0.0, longest_s=1.0, idle_since_s=0.0)
    >>> saves = StepTiming(False, since_s=0.0, longest_s=1.0, idle_since_s=14.0)
    >>> stalled([waits, saves], now_s=16.0, timeout_s=15.0)
    False
    >>> stalled([waits, saves], now_s=30.0, timeout_s=15.0)
    True
    """
    waits = any(pace.in_step for pace in paces)
    for pace in paces:
        if pace.computes:
            quiet_s, limit_s = now_s - pace.since_s, max(timeout_s, 5 * pace.longest_s)
        else:
            quiet_s = now_s - max(pace.since_s, pace.idle_since_s)
            limit_s = timeout_s * (1 if waits else NOBODY_WAITS)
        if quiet_s <= limit_s:
            return False
    return bool(paces)

"""Decides what the launcher does after an attempt, and whether a job is stalled.

An attempt is one start of all workers of the job. MultiWorkerMirroredStrategy cannot take a worker
back. So when one worker fails, the launcher ends all of them, starts them again, and they resume
from their checkpoint. All functions are pure: the failures and the time are arguments.
The limits are fields of `LaunchConfig`.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tfmulti.errors import (
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_TERMINATED,
    EXIT_USER,
    ChecksFailed,
    VerificationError,
)

# The delay doubles with each restart without progress, from the first value up to the second.
FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0

# The exit codes of a worker that was asked to stop, and has saved its state before it ended.
ASKED_TO_STOP = (EXIT_TERMINATED, EXIT_INTERRUPTED)

# If no worker is in a step, a job counts as stalled only after this multiple of the timeout. All
# workers may be saving a large model.
NOBODY_WAITS = 20


@dataclass(frozen=True)
class Failure:
    """Why one worker did not end well.

    Attributes:
        rank: the rank of the worker.
        what: what happened, as the words after "worker N".
        exit_code: the worker's exit code, or 128 + the number of the signal that ended it.
        seen_s: when the launcher noticed the failure, or when the worker itself wrote it down.
            It is in seconds of the launcher's clock.
        step: the last step that the worker reported; None without a report.
        is_consequence: whether the failure is a consequence of the failure of another worker.
        had_notice: whether this worker, and not all workers, was asked to stop.
        is_final: whether the worker says that a restart cannot help.
    """

    rank: int
    what: str
    exit_code: int
    seen_s: float
    step: int | None = None
    is_consequence: bool = False
    had_notice: bool = False
    is_final: bool = False


@dataclass(frozen=True)
class Attempt:
    """How an attempt ended.

    Attributes:
        failures: one for each worker that failed; empty if all workers ended well.
        step: the furthest step that a worker reported; None without a report.
    """

    failures: tuple[Failure, ...]
    step: int | None = None

    @property
    def cause(self) -> Failure:
        """The failure that explains the others.

        It is the earliest one that does not follow from another failure. A notice comes before all
        other failures.
        """
        return min(self.failures, key=lambda f: (not f.had_notice, f.is_consequence, f.seen_s))


@dataclass(frozen=True)
class Budget:
    """How often the job may still be restarted.

    Attributes:
        max_restarts: the allowed number of restarts without progress.
        used: the number of restarts since the job last made progress.
        furthest: the furthest step of all attempts; -1 before the first step.
    """

    max_restarts: int
    used: int = 0
    furthest: int = -1

    def unused(self) -> Budget:
        """Returns the budget after a restart that does not count."""
        return replace(self, used=self.used - 1)


@dataclass(frozen=True)
class Restart:
    """Says that all workers are started again after `delay_s`, with this budget."""

    delay_s: float
    budget: Budget


@dataclass(frozen=True)
class Stop:
    """Says that the job ends with an exit code, and why. An empty `why` needs no explanation."""

    exit_code: int
    why: str = ""


def next_action(attempt: Attempt, budget: Budget) -> Restart | Stop:
    """Returns whether the job is restarted or ends after an attempt.

    A user's mistake (exit code 2), Ctrl-C and an error of `FINAL` never lead to a restart. The
    first restart after progress of the job has no delay. The following ones wait 1, 2, 4, …
    seconds, at most 30.

    >>> crash = Failure(rank=1, what="exited with 1", exit_code=1, seen_s=5.0)
    >>> next_action(Attempt((crash,), step=90), Budget(max_restarts=3, used=2, furthest=40))
    Restart(delay_s=0.0, budget=Budget(max_restarts=3, used=1, furthest=90))
    >>> next_action(Attempt((crash,), step=40), Budget(max_restarts=3, used=3, furthest=40))
    Stop(exit_code=1, why='3 restarts without progress are used up (--max-restarts 3)')
    """
    if not attempt.failures:
        return Stop(EXIT_DONE)
    code = attempt.cause.exit_code
    if code == EXIT_USER:
        return Stop(code, "a user's mistake is not retried")
    if code == EXIT_INTERRUPTED:
        return Stop(code, "it was interrupted")
    if any(failure.is_final for failure in attempt.failures):
        return Stop(code, "a restart cannot help")
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


# The errors that TensorFlow raises in a worker when another worker is gone.
LOST_A_WORKER = ("UnavailableError", "AbortedError", "CancelledError", "DeadlineExceededError")

# A connection between two workers that has ended, see `tfmulti.distribution.transport.channel`.
_CHANNEL_ERROR = "ChannelError"

# The errors after which a restart cannot help.
FINAL = (ChecksFailed.__name__, VerificationError.__name__)

# TensorFlow names the operation that failed after its error.
_NODE = "[[{{node "


def has_lost_a_worker(error: BaseException | None) -> bool:
    """Returns whether an error says that another worker is gone, if there are several workers.

    TensorFlow raises the same errors in a job of one worker, where they mean something else.

    >>> has_lost_a_worker(ConnectionError())
    False
    """
    return type(error).__name__ in (*LOST_A_WORKER, _CHANNEL_ERROR)


def describe_error(kind: str, message: str) -> str:
    r"""Returns an error in one line, with the user's own error if it was raised inside a graph.

    Args:
        kind: the name of the error's type.
        message: its message.

    >>> describe_error("UnknownError", "Graph execution error:\n\nKeyError: 'a'\n\t [[{{node f}}]]")
    "UnknownError: KeyError: 'a'"
    """
    before, node, _ = message.partition(_NODE)
    lines = [line.strip() for line in before.splitlines() if line.strip()] or [""]
    if node:
        text = lines[-1]
        # After a traceback of Python there is the error of the user's function, with its type.
        if "Traceback (most recent call last):" in before:
            return text[:300]
    else:
        # An error in a traced function begins with its traceback, and ends with the message.
        text = lines[-1 if lines[0].startswith("in user code") else 0]
    return f"{kind}: {text[:300]}"


def describe_exit(returncode: int) -> tuple[str, int]:
    """Returns a return code in words, and the exit code that a shell would give for it.

    >>> describe_exit(-9)
    ('was killed by SIGKILL (by hand, or by the system when memory ran out)', 137)
    >>> describe_exit(3)
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
    hint = " (by hand, or by the system when memory ran out)" if name == "SIGKILL" else ""
    return f"was killed by {name}{hint}", 128 - returncode


@dataclass(frozen=True)
class StepTiming:
    """What a worker does, and since when.

    A worker is in a step, where workers wait for each other, or it runs callbacks or saves. Only
    the duration of a step of a known kind can be judged. A step that is traced and other work may
    take any time.

    Attributes:
        computes: whether the worker runs a step of a kind that it has timed before.
        since_s: when it began what it does.
        longest_s: the duration of its longest step of that kind.
        idle_since_s: since when it uses no core.
        first: whether the worker runs a step that it traces, or that has no known duration yet.
    """

    computes: bool
    since_s: float
    longest_s: float
    idle_since_s: float
    first: bool = False

    @property
    def in_step(self) -> bool:
        """Whether the worker is in a step of any kind, and may wait for other workers there."""
        return self.computes or self.first


def stalled(timings: Sequence[StepTiming], now_s: float, timeout_s: float) -> bool:
    """Returns whether the job is stalled: every worker is past its time limit.

    - A worker that computes a step has a limit for the duration of the step: the timeout, but at
      least five times its longest step.
    - Any other worker has a limit for the time without the use of a core: the timeout. If no worker
      is in a step the limit is twenty times as long, because all may be saving a large model.

    Args:
        timings: what each worker does.
        now_s: the time, in seconds of the same clock as the timings.
        timeout_s: the timeout.

    >>> waits = StepTiming(True, since_s=0.0, longest_s=1.0, idle_since_s=0.0)
    >>> saves = StepTiming(False, since_s=0.0, longest_s=1.0, idle_since_s=14.0)
    >>> stalled([waits, saves], now_s=16.0, timeout_s=15.0)
    False
    >>> stalled([waits, saves], now_s=30.0, timeout_s=15.0)
    True
    """
    waits = any(timing.in_step for timing in timings)
    for timing in timings:
        if timing.computes:
            quiet_s, limit_s = now_s - timing.since_s, max(timeout_s, 5 * timing.longest_s)
        else:
            quiet_s = now_s - max(timing.since_s, timing.idle_since_s)
            limit_s = timeout_s * (1 if waits else NOBODY_WAITS)
        if quiet_s <= limit_s:
            return False
    return bool(timings)

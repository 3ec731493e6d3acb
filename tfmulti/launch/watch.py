"""Watches the workers of an attempt until all have ended, or one of them has failed.

Each kind of failure has its own time limit:

| failure | noticed after |
|---|---|
| a worker ends with an error, or is killed | `monitor_interval_s` (0.1 s) |
| a worker is frozen: it is stopped by a signal or a debugger | `FROZEN_S` |
| no worker ends a step | `--stall-timeout-s`, and five times the longest step |
| before the first step: a worker does not listen, or all are idle | `--start-timeout` |
| before the first step: workers use cores without progress | `POLLING_TIMES` start timeouts |
| a machine does not answer | `remote_machine.LOST_S` |

`training.watchdog` only writes what a hanging run waits for. It restarts nothing.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace

from tfmulti.launch import policy
from tfmulti.launch.config import LaunchConfig
from tfmulti.launch.heartbeat import FIRST, TRAINING
from tfmulti.launch.membership import Placement, words_of
from tfmulti.launch.output import Output
from tfmulti.launch.policy import Failure, StepTiming, stalled
from tfmulti.launch.worker_group import WorkerGroup
from tfmulti.launch.workers import WorkerStatus

# A worker that is frozen for this long counts as failed: it does not go on by itself.
FROZEN_S = 5.0

# Workers that use cores before the first step may compile, or poll for something that never comes.
# They get this many start timeouts without any sign of progress.
POLLING_TIMES = 10


class Regroup(Exception):
    """Raised when the job can go on with other machines, and a new checkpoint has been written."""


class Watch:
    """Watches the workers of one attempt.

    Args:
        config: the time limits.
        crew: the workers.
        output: keeps the errors that workers on other machines have written down.
        wants_others: returns the placement of an attempt that began at this moment, or None if that
            is the placement of this attempt.
        show: shows a line to the user.
    """

    def __init__(
        self,
        config: LaunchConfig,
        crew: WorkerGroup,
        output: Output,
        wants_others: Callable[[], Placement | None],
        show: Callable[[str], None],
    ) -> None:
        self._config, self._crew, self._output = config, crew, output
        self._wants_others, self._show = wants_others, show
        self._is_prepared = False
        self._frozen_since: dict[int, float] = {}
        self._all_listen = len(crew.places) == 1
        self._first_listened_s: float | None = None
        self._asked_s = 0.0
        self._saved_before: int | None = None

    def until_the_end(self) -> list[Failure]:
        """Waits for the end of all workers or for a failure, and returns the failures found then.

        Raises:
            Regroup: the job can go on with other machines, and a checkpoint was written since.
        """
        while True:
            seen = self._crew.look()
            failures = self.failed(seen) or self._silent(seen) or self._idle_at_start(seen)
            failures = failures or self._still_at_start(seen) or self._stalled(seen)
            if failures or not any(one.runs for one in seen):
                return failures
            self._prepare(seen)
            self._look_for_others(seen)
            time.sleep(self._config.monitor_interval_s)

    def failed(self, seen: list[WorkerStatus]) -> list[Failure]:
        """Returns the failures of workers that ended badly, do not answer or are frozen.

        If each of the ended workers only lost another worker, a worker that ended well is the
        cause: it has left while the others needed it.

        Args:
            seen: the status of each worker.
        """
        ended = [found for one in seen if (found := self._exit_of(one)) is not None]
        if ended and all(failure.follows for failure in ended):
            ended += self._left_early(seen)
        return ended + self._unreachable(seen) + self._frozen(seen)

    def _left_early(self, seen: list[WorkerStatus]) -> list[Failure]:
        """Returns the workers that ended well while the others still needed them, as failures."""
        words = "ended with exit code 0 before the others"
        return [
            self._failure(one.rank, one, words, 1, one.ended_s or 0.0)
            for one in seen
            if one.returncode == 0
        ]

    def _unreachable(self, seen: list[WorkerStatus]) -> list[Failure]:
        """Returns the workers on machines that have stopped answering, as failures."""
        lost = self._crew.lost
        return [
            self._failure(
                rank,
                next((one for one in seen if one.rank == rank), None),
                f"is on {host}, which does not answer any more ({lost[host]})",
                1,
                self._crew.lost_s,
            )
            for rank, (host, _, _) in self._crew.places.items()
            if host in lost
        ]

    def _prepare(self, seen: list[WorkerStatus]) -> None:
        """Starts standby processes once all workers have ended a step.

        Before that they would slow down the start of the workers.
        """
        if not self._is_prepared and all(one.told and one.told.step > 0 for one in seen):
            self._crew.prepare()
            self._is_prepared = True

    def _look_for_others(self, seen: list[WorkerStatus]) -> None:
        """Raises Regroup at the first new checkpoint after other machines could take part."""
        others = self._wants_others()
        if others is None:
            self._saved_before = None
            return
        saved = max((one.told.saved for one in seen if one.told), default=-1)
        if self._saved_before is None:
            self._saved_before = saved
            self._show(f"the job restarts with {words_of(others)} after the next checkpoint")
        elif saved > self._saved_before:
            raise Regroup

    def _frozen(self, seen: list[WorkerStatus]) -> list[Failure]:
        """Returns the workers that have been stopped by SIGSTOP for long, as failures."""
        now = time.monotonic()
        found = []
        for one in seen:
            if not one.frozen:
                self._frozen_since.pop(one.rank, None)
                continue
            since = self._frozen_since.setdefault(one.rank, now)
            if now - since > FROZEN_S:
                words = "is frozen (SIGSTOP)"
                found.append(self._failure(one.rank, one, words, 128 + signal.SIGSTOP, since))
        return found

    def _silent(self, seen: list[WorkerStatus]) -> list[Failure]:
        """Returns the workers that do not listen past the start timeout, as failures.

        If no worker listens, they may all load their data. Then they fail only when all of them
        have been idle for the timeout. Otherwise the timeout counts from when another listened.
        """
        now = time.monotonic()
        if self._all_listen or now - self._asked_s < 1.0:
            return []
        self._asked_s = now
        if any(one.told for one in seen):
            # A worker first reports when training begins, and by then all workers have met.
            self._all_listen = True
            return []
        missing = self._crew.silent()
        self._all_listen = not missing
        if self._all_listen:
            return []
        limit_s = self._config.start_timeout_s
        if len(missing) == len(seen):
            if any(now - one.idle_since_s < limit_s for one in seen):
                return []
            after = f"after {limit_s:g} s without a sign of life"
        else:
            self._first_listened_s = self._first_listened_s or now
            if now - self._first_listened_s < limit_s:
                return []
            after = f"{limit_s:g} s after another worker did"
        return [
            self._failure(
                one.rank,
                one,
                f"does not listen at {self._crew.addresses[one.rank]}, {after}: does it still load "
                "its data, wait for something, or does a firewall stand between?",
                1,
                now,
            )
            for one in seen
            if one.rank in missing
        ]

    def _idle_at_start(self, seen: list[WorkerStatus]) -> list[Failure]:
        """Returns the workers that do not train yet, if all workers have been idle for long.

        They wait for each other or for something else. They may wait for each other in vain if a
        proxy between them accepts what is sent.
        """
        now, limit_s = time.monotonic(), self._config.start_timeout_s
        running = [one for one in seen if one.runs]
        idle = all(now - one.idle_since_s > limit_s for one in running)
        if not idle or all(one.told is not None for one in running):
            return []
        self._show_stacks()
        words = (
            f"has done nothing for {limit_s:g} s (--start-timeout), and does not train yet: does "
            "it wait for another worker, a file or a network?"
        )
        return [
            self._failure(one.rank, one, words, 1, one.idle_since_s)
            for one in running
            if one.told is None
        ]

    def _still_at_start(self, seen: list[WorkerStatus]) -> list[Failure]:
        """Returns all running workers if none has shown progress for long before the first step.

        Progress is a byte of output, a heartbeat, a byte from or to a disk, or more memory.

        A program that trains without tfmulti reports no steps. It is judged only from when one of
        its workers listens, because it may be no program of TensorFlow, and until all of them
        listen, because after that it may train.
        """
        running = [one for one in seen if one.runs]
        program = self._config.program
        reports = self._config.module and program[0] == "tfmulti.fit"
        if not (reports or self._first_listened_s or any(one.told for one in running)):
            return []
        for one in running:
            if one.told.step > 0 if one.told else self._all_listen and not reports:
                return []
        limit_s = POLLING_TIMES * self._config.start_timeout_s
        last_s = [one.told.since_s for one in running if one.told] + [self._output.heard_s()]
        last_s += [one.still_since_s for one in running]
        if not running or time.monotonic() - max(last_s) <= limit_s:
            return []
        self._show_stacks()
        words = (
            f"has shown no progress for {limit_s:g} s ({POLLING_TIMES} times --start-timeout), and "
            "has ended no step: no output, no byte from or to a disk, no more memory. Does it poll "
            "for something that never comes?"
        )
        return [self._failure(one.rank, one, words, 1, max(last_s)) for one in running]

    def _show_stacks(self) -> None:
        """Shows the Python stacks of all running workers."""
        for rank, stacks in self._crew.stacks().items():
            self._show(f"the stacks of worker {rank}:\n{stacks}")

    def _stalled(self, seen: list[WorkerStatus]) -> list[Failure]:
        """Returns all running workers as failures if the job is stalled.

        If some workers are outside of a step they are the cause, because the others wait for them
        in a step.
        """
        running = [(one, one.told) for one in seen if one.runs and one.told is not None]
        paces = [
            StepTiming(
                told.phase == TRAINING,
                told.since_s,
                told.longest_s,
                one.idle_since_s,
                told.phase == FIRST,
            )
            for one, told in running
        ]
        now = time.monotonic()
        alive = sum(one.runs for one in seen)
        if len(running) < alive or not stalled(paces, now, self._config.stall_timeout_s):
            return []
        self._show_stacks()
        all_in_step = all(pace.in_step for pace in paces)
        found = []
        for (one, told), pace in zip(running, paces, strict=True):
            quiet = f"for {now - told.since_s:.0f} s"
            words = f"has ended no step {quiet}"
            if not pace.in_step:
                words = f"has done nothing {quiet}, outside of a step"
            follows = pace.in_step and not all_in_step
            failure = self._failure(one.rank, one, words, 1, told.since_s)
            found.append(replace(failure, follows=follows))
        return found

    def _exit_of(self, one: WorkerStatus) -> Failure | None:
        """Returns the failure of a worker that has ended badly; None for any other worker."""
        if not one.returncode:
            return None
        what, code = policy.words_of_exit(one.returncode)
        notice = bool(one.told and one.told.asked) or one.returncode == -signal.SIGTERM
        found_s = one.ended_s or time.monotonic()
        if one.error is None:
            # A worker that ends as asked, without a signal of its own, was told by another worker.
            told_by_others = code in policy.ASKED_TO_STOP and one.told is not None and not notice
            failure = self._failure(one.rank, one, what, code, found_s)
            return replace(failure, notice=notice, follows=told_by_others)
        self._output.keep_error(one.rank, one.error)
        follows = one.error.type in policy.LOST_A_WORKER
        message = "another worker was lost" if follows else one.error.message
        what = f"{what} ({policy.words_of_error(one.error.type, message)})"
        failure = self._failure(one.rank, one, what, code, min(found_s, one.error.time_s))
        return replace(failure, follows=follows, final=one.error.type in policy.FINAL)

    def _failure(
        self, rank: int, one: WorkerStatus | None, what: str, code: int, found_s: float
    ) -> Failure:
        """Returns a failure, with the worker's last step.

        Args:
            rank: the rank of the worker.
            one: its status, or None where its machine does not answer.
            what: what happened to it, after "worker N".
            code: its exit code.
            found_s: when it was noticed, in seconds of the launcher's clock.
        """
        step = one.told.step if one and one.told else None
        return Failure(rank, what, code, found_s, step)

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
from tfmulti.launch.membership import Placement, describe_placement
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
        worker_group: the workers.
        output: keeps the errors that workers on other machines have written down.
        wants_others: returns the placement of an attempt that began at this moment, or None if that
            is the placement of this attempt.
        show: shows a line to the user.
    """

    def __init__(
        self,
        config: LaunchConfig,
        worker_group: WorkerGroup,
        output: Output,
        wants_others: Callable[[], Placement | None],
        show: Callable[[str], None],
    ) -> None:
        self._config, self._worker_group, self._output = config, worker_group, output
        self._wants_others, self._show = wants_others, show
        self._is_prepared = False
        self._frozen_since: dict[int, float] = {}
        self._all_listen = len(worker_group.locations) == 1
        self._first_listened_s: float | None = None
        self._asked_s = 0.0
        self._has_warned = False
        self._saved_before: int | None = None

    def until_the_end(self) -> list[Failure]:
        """Waits for the end of all workers or for a failure, and returns the failures found then.

        Raises:
            Regroup: the job can go on with other machines, and a checkpoint was written since.
        """
        while True:
            statuses = self._worker_group.statuses()
            failures = (
                self.failed(statuses) or self._silent(statuses) or self._idle_at_start(statuses)
            )
            failures = failures or self._still_at_start(statuses) or self._stalled(statuses)
            if failures or not any(status.runs for status in statuses):
                return failures
            self._prepare(statuses)
            self._look_for_others(statuses)
            time.sleep(self._config.monitor_interval_s)

    def failed(self, statuses: list[WorkerStatus]) -> list[Failure]:
        """Returns the failures of workers that ended badly, do not answer or are frozen.

        If each of the ended workers only lost another worker, a worker that ended well is the
        cause: it has left while the others needed it.

        Args:
            statuses: the status of each worker.
        """
        ended = [failure for status in statuses if (failure := self._exit_of(status)) is not None]
        if ended and all(failure.is_consequence for failure in ended):
            ended += self._left_early(statuses)
        return ended + self._unreachable(statuses) + self._frozen(statuses)

    def _left_early(self, statuses: list[WorkerStatus]) -> list[Failure]:
        """Returns the workers that ended well while the others still needed them, as failures."""
        what = "ended with exit code 0 before the others"
        return [
            self._failure(status.rank, status, what, 1, status.ended_s or 0.0)
            for status in statuses
            if status.returncode == 0
        ]

    def _unreachable(self, statuses: list[WorkerStatus]) -> list[Failure]:
        """Returns the workers on machines that have stopped answering, as failures."""
        lost = self._worker_group.lost
        return [
            self._failure(
                rank,
                next((status for status in statuses if status.rank == rank), None),
                f"is on {host}, which does not answer any more ({lost[host]})",
                1,
                self._worker_group.lost_s,
            )
            for rank, (host, _, _) in self._worker_group.locations.items()
            if host in lost
        ]

    def _prepare(self, statuses: list[WorkerStatus]) -> None:
        """Starts standby processes once all workers have ended a step.

        Before that they would slow down the start of the workers. A job without
        restarts needs no standby processes.
        """
        may_restart = self._config.max_restarts > 0
        if (
            may_restart
            and not self._is_prepared
            and all(status.heartbeat and status.heartbeat.step > 0 for status in statuses)
        ):
            self._worker_group.prepare()
            self._is_prepared = True

    def _look_for_others(self, statuses: list[WorkerStatus]) -> None:
        """Raises Regroup at the first new checkpoint after other machines could take part."""
        others = self._wants_others()
        if others is None:
            self._saved_before = None
            return
        saved = max((status.heartbeat.saved for status in statuses if status.heartbeat), default=-1)
        if self._saved_before is None:
            self._saved_before = saved
            self._show(
                f"the job restarts with {describe_placement(others)} after the next checkpoint"
            )
        elif saved > self._saved_before:
            raise Regroup

    def _frozen(self, statuses: list[WorkerStatus]) -> list[Failure]:
        """Returns the workers that have been stopped by SIGSTOP for long, as failures."""
        now = time.monotonic()
        failures = []
        for status in statuses:
            if not status.frozen:
                self._frozen_since.pop(status.rank, None)
                continue
            since = self._frozen_since.setdefault(status.rank, now)
            if now - since > FROZEN_S:
                what = "is frozen (SIGSTOP)"
                failures.append(
                    self._failure(status.rank, status, what, 128 + signal.SIGSTOP, since)
                )
        return failures

    def _silent(self, statuses: list[WorkerStatus]) -> list[Failure]:
        """Returns the workers that do not listen past the start timeout, as failures.

        If no worker listens, they may all load their data. Then they fail only when all of them
        have been idle for the timeout. Otherwise the timeout counts from when another listened.
        """
        now = time.monotonic()
        if self._all_listen or now - self._asked_s < 1.0:
            return []
        self._asked_s = now
        if any(status.heartbeat for status in statuses):
            # A worker first reports when training begins, and by then all workers have met.
            self._all_listen = True
            return []
        missing, addresses = self._worker_group.silent(), self._worker_group.addresses
        self._all_listen = not missing
        if self._all_listen:
            return []
        limit_s = self._config.start_timeout_s
        if len(missing) == len(statuses):
            if any(now - status.idle_since_s < limit_s for status in statuses):
                return []
            after = f"after {limit_s:g} s without a sign of life"
        else:
            self._first_listened_s = self._first_listened_s or now
            if now - self._first_listened_s < limit_s:
                return []
            after = f"{limit_s:g} s after another worker did"
        return [
            self._failure(
                status.rank,
                status,
                f"does not listen at {addresses[status.rank]}, {after}: does it still load its "
                "data, wait for something, or is there a firewall between the workers?",
                1,
                now,
            )
            for status in statuses
            if status.rank in missing
        ]

    def _idle_at_start(self, statuses: list[WorkerStatus]) -> list[Failure]:
        """Returns the workers that do not train yet, if all workers have been idle for long.

        They wait for each other or for something else. They may wait for each other in vain if a
        proxy between them accepts what is sent.
        """
        now, limit_s = time.monotonic(), self._config.start_timeout_s
        running = [status for status in statuses if status.runs]
        told = {status.rank: status.heartbeat for status in running if status.heartbeat}
        if len(told) == len(running) and any(heartbeat.step for heartbeat in told.values()):
            return []
        # A worker that waits for a server outside of the job renews its heartbeat.
        last_s = [status.idle_since_s for status in running]
        last_s += [heartbeat.since_s for heartbeat in told.values()]
        if any(now - since_s <= limit_s for since_s in last_s):
            return []
        self._show_stacks()
        what = (
            f"has done nothing for {limit_s:g} s (--start-timeout), and does not train yet: does "
            "it wait for another worker, a file or a network?"
        )
        return [
            self._failure(status.rank, status, what, 1, status.idle_since_s)
            for status in running
            if status.rank not in told or len(told) == len(running)
        ]

    def _still_at_start(self, statuses: list[WorkerStatus]) -> list[Failure]:
        """Returns all running workers if none has shown progress for long before the first step.

        Progress is new text (`workers.NewText`), a heartbeat, a byte from or to a disk, or more
        memory.

        A program that trains without tfmulti reports no steps. It is judged only from when one of
        its workers listens, because it may be no program of TensorFlow, and until all of them
        listen, because after that it may train. Before one listens, only a warning is shown.
        """
        running = [status for status in statuses if status.runs]
        program = self._config.program
        reports = self._config.module and program[0] == "tfmulti.fit"
        for status in running:
            if status.heartbeat.step > 0 if status.heartbeat else self._all_listen and not reports:
                return []
        limit_s = POLLING_TIMES * self._config.start_timeout_s
        last_s = [status.heartbeat.since_s for status in running if status.heartbeat]
        last_s += [status.still_since_s for status in running]
        if not running or time.monotonic() - max(last_s) <= limit_s:
            return []
        limit = f"{limit_s:g} s ({POLLING_TIMES} times --start-timeout"
        if not (reports or self._first_listened_s or any(status.heartbeat for status in running)):
            if not self._has_warned:
                self._show(
                    f"warning: each worker has shown no progress for {limit}), and none of them "
                    "listens. They have not used tfmulti yet, and may compute something else. If "
                    "they hang, end the job by Ctrl-C or SIGTERM"
                )
            self._has_warned = True
            return []
        self._show_stacks()
        what = (
            f"has shown no progress for {limit}; raise it if the program works), and has ended no "
            "step: it has written nothing new, used no disk and taken no more memory. Does it poll "
            "for something that never comes?"
        )
        return [self._failure(status.rank, status, what, 1, max(last_s)) for status in running]

    def _show_stacks(self) -> None:
        """Shows the stacks of the main threads of all running workers."""
        for rank, stack in self._worker_group.stacks().items():
            self._show(f"the main thread of worker {rank}:\n{stack}")

    def _stalled(self, statuses: list[WorkerStatus]) -> list[Failure]:
        """Returns all running workers as failures if the job is stalled.

        If some workers are outside of a step they are the cause, because the others wait for them
        in a step.
        """
        running = [
            (status, status.heartbeat)
            for status in statuses
            if status.runs and status.heartbeat is not None
        ]
        timings = [
            StepTiming(
                heartbeat.phase == TRAINING,
                heartbeat.since_s,
                heartbeat.longest_s,
                status.idle_since_s,
                heartbeat.phase == FIRST,
            )
            for status, heartbeat in running
        ]
        now = time.monotonic()
        alive = sum(status.runs for status in statuses)
        if len(running) < alive or not stalled(timings, now, self._config.stall_timeout_s):
            return []
        self._show_stacks()
        all_in_step = all(timing.in_step for timing in timings)
        failures = []
        for (status, heartbeat), timing in zip(running, timings, strict=True):
            quiet = f"for {now - heartbeat.since_s:.0f} s"
            what = f"has ended no step {quiet}"
            if not timing.in_step:
                what = f"is idle, and has been outside of a step {quiet}"
            is_consequence = timing.in_step and not all_in_step
            failure = self._failure(status.rank, status, what, 1, heartbeat.since_s)
            failures.append(replace(failure, is_consequence=is_consequence))
        return failures

    def _exit_of(self, status: WorkerStatus) -> Failure | None:
        """Returns the failure of a worker that has ended badly; None for any other worker."""
        if not status.returncode:
            return None
        what, code = policy.describe_exit(status.returncode)
        seen_s = status.ended_s or time.monotonic()
        error = status.error
        if error is None:
            was_asked = status.heartbeat is not None and status.heartbeat.asked
            had_notice = was_asked or status.returncode == -signal.SIGTERM
            # A worker that ends as asked, without a signal of its own, was told by another worker.
            told_by_others = (
                code in policy.ASKED_TO_STOP and status.heartbeat is not None and not had_notice
            )
            failure = self._failure(status.rank, status, what, code, seen_s)
            return replace(failure, had_notice=had_notice, is_consequence=told_by_others)
        self._output.keep_error(status.rank, error)
        has_lost = error.type in policy.LOST_A_WORKER
        message = "another worker was lost" if has_lost else error.message
        what = f"{what} ({policy.describe_error(error.type, message)})"
        failure = self._failure(status.rank, status, what, code, min(seen_s, error.time_s))
        return replace(failure, is_consequence=has_lost, is_final=error.type in policy.FINAL)

    def _failure(
        self, rank: int, status: WorkerStatus | None, what: str, code: int, seen_s: float
    ) -> Failure:
        """Returns a failure, with the worker's last step.

        The status is None if the worker's machine does not answer.
        """
        step = status.heartbeat.step if status and status.heartbeat else None
        return Failure(rank, what, code, seen_s, step)

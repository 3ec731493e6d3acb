"""Looks at the workers of an attempt until they have ended, or something is wrong with them."""

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

FROZEN_S = 5.0  # a worker that is stopped for so long does not go on by itself


class Regroup(Exception):
    """The job can have other machines than it has, and a checkpoint to go on from was made."""


class Watch:
    """Looks at an attempt's workers.

    Args:
        wants_others: returns who would take part if the job began now, if that is another group.
        show: says a line to the user.
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
        """Returns what failed first, or nothing.

        Raises:
            Regroup: other machines are there, and the newest checkpoint is newer than they.
        """
        while True:
            seen = self._crew.look()
            failures = self.failed(seen) or self._silent(seen) or self._idle_at_start(seen)
            failures = failures or self._stalled(seen)
            if failures or not any(one.runs for one in seen):
                return failures
            self._prepare(seen)
            self._look_for_others(seen)
            time.sleep(self._config.monitor_interval_s)

    def failed(self, seen: list[WorkerStatus]) -> list[Failure]:
        """Returns the failures of the workers that ended badly, are out of reach or frozen."""
        ended = [found for one in seen if (found := self._exit_of(one)) is not None]
        if ended and all(failure.follows for failure in ended):
            ended += self._left_early(seen)
        return ended + self._unreachable(seen) + self._frozen(seen)

    def _left_early(self, seen: list[WorkerStatus]) -> list[Failure]:
        """Returns those that ended well while the others still needed them."""
        words = "ended with exit code 0 before the others"
        return [
            self._failure(one.rank, one, words, 1, one.ended_s or 0.0)
            for one in seen
            if one.returncode == 0
        ]

    def _unreachable(self, seen: list[WorkerStatus]) -> list[Failure]:
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
        """Prepares for a restart, once all workers train: before, it would slow the start."""
        if not self._is_prepared and all(one.told and one.told.step > 0 for one in seen):
            self._crew.prepare()
            self._is_prepared = True

    def _look_for_others(self, seen: list[WorkerStatus]) -> None:
        others = self._wants_others()
        if others is None:
            self._saved_before = None
            return
        saved = max((one.told.saved for one in seen if one.told), default=-1)
        if self._saved_before is None:
            self._saved_before = saved
            self._show(f"from the next checkpoint on there are {words_of(others)}")
        elif saved > self._saved_before:
            raise Regroup

    def _frozen(self, seen: list[WorkerStatus]) -> list[Failure]:
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
        """Returns the workers that do not listen although others have for long."""
        now = time.monotonic()
        if self._all_listen or now - self._asked_s < 1.0:
            return []
        self._asked_s = now
        if any(one.told for one in seen):
            self._all_listen = True  # a step has ended: all were there
            return []
        missing = self._crew.silent()
        self._all_listen = not missing
        if self._all_listen:
            return []
        limit_s = self._config.start_timeout_s
        if len(missing) == len(seen):
            if any(now - one.idle_since_s < limit_s for one in seen):
                return []  # they load their data
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
        """Returns the workers that have not begun to train, where none has done anything for long.

        They wait for each other, as behind a proxy that takes what is sent, or for something else.
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

    def _show_stacks(self) -> None:
        for rank, stacks in self._crew.stacks().items():
            self._show(f"worker {rank} stands at:\n{stacks}")

    def _stalled(self, seen: list[WorkerStatus]) -> list[Failure]:
        """Returns all workers if the job stands still.

        The cause is who is not in a step, where there is one: the others wait for it there.
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
        if not one.returncode:
            return None
        what, code = policy.words_of_exit(one.returncode)
        notice = bool(one.told and one.told.asked) or one.returncode == -signal.SIGTERM
        found_s = one.ended_s or time.monotonic()
        if one.error is None:
            told_by_others = code in policy.ASKED_TO_STOP and one.told is not None and not notice
            failure = self._failure(one.rank, one, what, code, found_s)
            return replace(failure, notice=notice, follows=told_by_others)
        self._output.keep_error(one.rank, one.error)
        follows = one.error.type in policy.LOST_A_WORKER
        lines = one.error.message.strip().splitlines() or [""]
        message = lines[-1 if lines[0].startswith("in user code") else 0].strip()[:300]
        message = "another worker was lost" if follows else message
        what = f"{what} ({one.error.type}: {message})"
        failure = self._failure(one.rank, one, what, code, min(found_s, one.error.time_s))
        return replace(failure, traceback=one.error.traceback, follows=follows)

    def _failure(
        self, rank: int, one: WorkerStatus | None, what: str, code: int, found_s: float
    ) -> Failure:
        """Returns why a worker failed, with its last step and its last line of output.

        Args:
            rank: the rank of the worker.
            one: its status, or None where its machine does not answer.
            what: what happened to it, after "worker N".
            code: its exit code.
            found_s: when it was noticed, in seconds of the launcher's clock.
        """
        step = one.told.step if one and one.told else None
        last = self._output.last_line(rank)
        return Failure(rank, what, code, found_s, step, last_line=last)

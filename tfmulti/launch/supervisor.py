"""Runs a job: attempt after attempt, until it is done or the policy says stop."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from tfmulti.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, ConfigError
from tfmulti.launch import policy
from tfmulti.launch.addresses import reserved, silent
from tfmulti.launch.config import LaunchConfig
from tfmulti.launch.guard import Guard
from tfmulti.launch.policy import Attempt, Budget, Failure, Stop
from tfmulti.launch.workers import Standby, Worker, Workers, worker_env
from tfmulti.launched import TRAINING, read_error

STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
FROZEN_S = 5.0  # a worker that is stopped for so long does not go on by itself
SETTLE_S = 0.5  # after the first failure: for the workers that failed before it was seen


class Stopped(Exception):
    """The launcher was asked to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def run(config: LaunchConfig, env: Mapping[str, str] = os.environ) -> int:
    """Returns the exit code of the job: 0, that of the worker that failed, or 128 + signal."""
    guard = Guard(config.shutdown_grace_s)
    standby = Standby(config, guard)
    run_id = env.get("TFMULTI_RUN_ID") or secrets.token_hex(6)
    budget, number = Budget(config.max_restarts), 0
    try:
        while True:
            folder = folder_for_attempt(config.log_dir)
            with stopping_by_signals() as signals:
                found = attempt(config, guard, standby, signals, env, folder, run_id, number)
                action = policy.next_action(found, budget)
                if found.failures:
                    report(found, folder)
                if isinstance(action, Stop):
                    if found.failures:
                        why = f": {action.why}" if action.why else ""
                        say(f"ending with exit code {action.exit_code}{why}")
                    return action.exit_code
                budget, number = action.budget, number + 1
                left = budget.max_restarts - budget.used
                wait = f" in {action.delay_s:g} s" if action.delay_s else ""
                say(f"starting all workers again{wait} ({left} more without progress)")
                time.sleep(action.delay_s)
    except Stopped as stop:
        say(f"{stop}: all workers have ended")
        return 128 + stop.number
    finally:
        standby.end()
        guard.close()


def folder_for_attempt(log_dir: Path) -> Path:
    """Makes and returns a folder that no other attempt has, of this job or another one.

    Raises:
        ConfigError: it cannot be made.
    """
    number = 0
    while True:
        try:
            folder = log_dir / f"attempt_{number}"
            folder.mkdir(parents=True)
            return folder
        except FileExistsError:
            number += 1
            if log_dir.is_file():
                raise ConfigError(f"--log-dir {log_dir} is a file. Give a folder.") from None
        except OSError as error:
            raise ConfigError(
                f"--log-dir {log_dir} cannot be made: {error.strerror}. Give another folder."
            ) from None


def attempt(
    config: LaunchConfig,
    guard: Guard,
    standby: Standby,
    signals: Signals,
    env: Mapping[str, str],
    folder: Path,
    run_id: str,
    number: int,
) -> Attempt:
    """Starts all workers, waits until they have ended or one has failed, and ends the rest."""
    cores = os.cpu_count() or 1
    with (
        reserved(config.workers) as addresses,
        Workers(config, guard, standby, folder, len(str(config.workers - 1))) as workers,
    ):
        envs = [
            worker_env(config, env, addresses, rank, run_id, number, cores)
            for rank in range(config.workers)
        ]
        try:
            for child, address in zip(envs, addresses, strict=True):
                with signals.held():  # else a worker could be there that nobody knows of
                    workers.start(child, address)
            watch = Watch(config, workers, lambda: standby.fill(envs))
            failures = watch.until_the_end()
            if failures:
                failures += settle(config, workers, failures)
        except Stopped as stop:
            say(f"{stop}: asking {len(workers.running())} workers to stop")
            workers.end(config.shutdown_grace_s)
            raise
        steps = [told.step for worker in workers.all if (told := worker.told)]
        # Those that are left wait in a collective for the one that is gone, deaf to SIGTERM; the
        # end of the context ends them at once.
        return Attempt(tuple(_first_of_each(failures)), max(steps, default=None))


def settle(config: LaunchConfig, workers: Workers, failures: list[Failure]) -> list[Failure]:
    """Returns the failures of the workers that end by themselves soon after the first.

    One that was asked to stop takes all others with it at the same step: they get the time to
    save.
    """
    saves = any(f.exit_code in (EXIT_TERMINATED, EXIT_INTERRUPTED) for f in failures)
    deadline = time.monotonic() + (config.shutdown_grace_s if saves else SETTLE_S)
    while workers.running() and time.monotonic() < deadline:
        time.sleep(0.02)
    return failed(workers)


def failed(workers: Workers) -> list[Failure]:
    """Returns the failures of the workers that have ended, and not well."""
    return [found for worker in workers.all if (found := exit_of(worker)) is not None]


def _first_of_each(failures: list[Failure]) -> list[Failure]:
    found: dict[int, Failure] = {}
    for failure in failures:
        found.setdefault(failure.rank, failure)
    return sorted(found.values(), key=lambda failure: failure.found_s)


class Watch:
    """Looks at the workers of an attempt until they have ended, or one of them has failed."""

    def __init__(
        self, config: LaunchConfig, workers: Workers, when_training: Callable[[], None]
    ) -> None:
        self._config, self._workers = config, workers
        self._when_training: Callable[[], None] | None = when_training
        self._stopped_since: dict[int, float] = {}
        self._all_listen = config.workers == 1
        self._first_listened_s: float | None = None
        self._asked_s = 0.0

    def until_the_end(self) -> list[Failure]:
        """Returns what failed first, or nothing."""
        while True:
            running = self._workers.running()
            failures = (
                failed(self._workers)
                or self._frozen(running)
                or self._silent()
                or self._stalled(running)
            )
            if failures or not running:
                return failures
            self._prepare()
            time.sleep(self._config.monitor_interval_s)

    def _prepare(self) -> None:
        """Prepares for a restart, once all workers train: before, it would slow the start."""
        told = [worker.told for worker in self._workers.all]
        if self._when_training and all(t is not None and t.step > 0 for t in told):
            self._when_training()
            self._when_training = None

    def _frozen(self, running: list[Worker]) -> list[Failure]:
        now = time.monotonic()
        found = []
        for worker in running:
            if not worker.is_stopped():
                self._stopped_since.pop(worker.rank, None)
                continue
            since = self._stopped_since.setdefault(worker.rank, now)
            if now - since > FROZEN_S:
                found.append(failure(worker, "is frozen (SIGSTOP)", 128 + signal.SIGSTOP, since))
        return found

    def _silent(self) -> list[Failure]:
        """Returns the workers that do not listen although others have for long."""
        now = time.monotonic()
        if self._all_listen or now - self._asked_s < 1.0:
            return []
        self._asked_s = now
        if any(worker.told for worker in self._workers.all):
            self._all_listen = True  # a step has ended: all were there
            return []
        missing = silent([worker.address for worker in self._workers.all])
        self._all_listen = not missing
        if self._all_listen or len(missing) == len(self._workers.all):
            return []
        self._first_listened_s = self._first_listened_s or now
        if now - self._first_listened_s < self._config.start_timeout_s:
            return []
        return [
            failure(
                worker,
                f"does not listen at {worker.address}, {self._config.start_timeout_s:g} s after "
                "another worker did: does it still load its data, or wait for something?",
                1,
                now,
            )
            for worker in self._workers.all
            if worker.rank in missing
        ]

    def _stalled(self, running: list[Worker]) -> list[Failure]:
        """Returns all workers if no step has ended for too long in any of them."""
        told = [(worker, worker.told) for worker in running]
        times = [
            (t.since_s, t.longest_s) if t is not None and t.phase == TRAINING else (float("inf"), 0)
            for _, t in told
        ]
        late = policy.stalled(times, time.monotonic(), self._config.stall_timeout_s)
        if not late or len(late) < len(running):
            return []
        show_stacks(running)
        quiet = time.monotonic() - max(ended for ended, _ in times)
        return [
            failure(worker, f"has ended no step for {quiet:.0f} s", 1, t.since_s if t else 0.0)
            for worker, t in told
        ]


def exit_of(worker: Worker) -> Failure | None:
    """Returns a worker's failure if it has ended, and not well."""
    code = worker.process.poll()
    if not code:
        return None
    what, exit_code = policy.words_of_exit(code)
    written = read_error(worker.error_file)
    found_s = worker.exited_s or time.monotonic()
    if written is None:
        return failure(worker, what, exit_code, found_s)
    follows = written["type"] in policy.LOST_A_WORKER
    lines = str(written["message"]).strip().splitlines() or [""]
    message = lines[-1 if lines[0].startswith("in user code") else 0].strip()[:300]
    return failure(
        worker,
        f"{what} ({written['type']}: {'another worker was lost' if follows else message})",
        exit_code,
        min(found_s, float(written["time_s"])),
        str(written["traceback"]),
        follows=follows,
    )


def failure(
    worker: Worker,
    what: str,
    exit_code: int,
    found_s: float,
    traceback: str = "",
    *,
    follows: bool = False,
) -> Failure:
    told = worker.told
    step = told.step if told else None
    return Failure(
        worker.rank, what, exit_code, found_s, step, traceback, worker.last_line(), follows
    )


def show_stacks(running: list[Worker]) -> None:
    """Shows where each worker stands, by the stacks of its Python threads."""
    for worker in running:
        os.kill(worker.process.pid, signal.SIGUSR1)
    time.sleep(0.5)
    for worker in running:
        try:
            stacks = worker.stacks_file.read_text().rstrip()
        except OSError:
            stacks = "(none: not a Python program)"
        say(f"worker {worker.rank} stands at:\n{stacks}")


def report(found: Attempt, folder: Path) -> None:
    """Says what failed first and why, and what followed from it."""
    cause = found.cause
    at = "" if cause.step is None else f" at step {cause.step}"
    say(f"worker {cause.rank} {cause.what}{at}")
    if cause.traceback:
        with suppress(OSError):
            print(cause.traceback.rstrip(), file=sys.stderr, flush=True)
    elif cause.last_line:
        say(f"its last line: {cause.last_line}")
    for other in found.failures:
        if other.rank != cause.rank:
            say(f"then worker {other.rank} {other.what}")
    say(f"all output: {folder}")


class Signals:
    """Raises `Stopped` when a signal comes, or when the context is left in which it is held."""

    def __init__(self) -> None:
        self._is_held = False
        self._pending: int | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_held:
            raise Stopped(number)
        self._pending = number

    @contextmanager
    def held(self) -> Iterator[None]:
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._pending is not None:
            raise Stopped(self._pending)


@contextmanager
def stopping_by_signals() -> Iterator[Signals]:
    """Inside, SIGINT, SIGTERM and SIGHUP raise `Stopped` in the main thread."""
    signals = Signals()

    heard = [n for n in STOPPING if signal.getsignal(n) is not signal.SIG_IGN]  # nohup's stays
    before = {number: signal.signal(number, signals.handle) for number in heard}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def say(words: str) -> None:
    with suppress(OSError):  # a terminal that is gone
        print(f"[launch] {words}", file=sys.stderr, flush=True)

"""Runs a job: makes attempt after attempt, until the job is done or the policy stops it.

An attempt starts all workers and watches them until they have ended or one of them has failed. Then
the launcher ends the others, and `policy.next_action` decides whether there is another attempt.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

from tfmulti.cluster.job_secret import SECRET
from tfmulti.cluster.listening import names_loopback
from tfmulti.config.command_line import load_for_exit
from tfmulti.errors import EXIT_FAILED, EXIT_USER, ConfigError
from tfmulti.launch import membership, policy
from tfmulti.launch.config import LaunchConfig
from tfmulti.launch.connect import join_job
from tfmulti.launch.guard import STOPPING
from tfmulti.launch.host_manager import (
    HostManager,
    TooFewMachines,
    check_secret,
    named_hosts,
    own_host_name,
)
from tfmulti.launch.isolation import isolate
from tfmulti.launch.membership import Placement, Standing
from tfmulti.launch.output import Output, quote
from tfmulti.launch.policy import Attempt, Budget, Failure, Stop
from tfmulti.launch.remote_machine import LOST_S
from tfmulti.launch.watch import Regroup, Watch
from tfmulti.launch.worker_group import WorkerGroup

# How long the launcher waits after the first failure, for workers that have failed before it.
SETTLE_S = 0.1

# How long it waits if a worker has reported an error, but still runs.
FAILING_S = 1.0

# How long it waits if each failure is a consequence of another one. The launcher notices a lost
# machine after LOST_S.
CAUSE_S = LOST_S + 2.0


class Stopped(Exception):
    """Raised in the main thread when the launcher gets a signal to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def run(
    config: LaunchConfig, env: Mapping[str, str] = os.environ, command: Sequence[str] = ()
) -> int:
    """Runs a job and returns its exit code: 0, that of the failed worker, or 128 + signal.

    Args:
        config: the job.
        env: the environment that the workers inherit.
        command: the arguments of the command line, which are shown after a failure.

    Raises:
        UserError: the job cannot run as the configuration asks.
        TfmultiError: the first machine of a job that is started by hand does not answer.
    """
    load_for_exit()
    hosts = named_hosts(config)
    check_secret(config, hosts)
    secret = config.secret or ("" if config.by_hand else secrets.token_hex())
    env = {**env, SECRET: secret}
    if config.by_hand and config.node_rank:
        name = own_host_name(config, hosts)
        assert name is not None
        return join_job(config, hosts[0], name, env)
    if config.isolate:
        isolate()
    output = Output(config)
    run_id = env.get("TFMULTI_RUN_ID") or secrets.token_hex(6)
    host_manager = HostManager(config, env, run_id, output.line, output.say)
    code = EXIT_FAILED
    try:
        code = Job(config, host_manager, output, run_id, command).run()
    finally:
        host_manager.close(code)
    return code


class Job:
    """One job, with what the launcher remembers from one attempt to the next.

    Args:
        config: the job.
        host_manager: finds and holds the machines.
        output: takes the workers' output.
        run_id: names the job, the same on all machines.
        command: the arguments of the command line. Empty: a program has started the job.
    """

    def __init__(
        self,
        config: LaunchConfig,
        host_manager: HostManager,
        output: Output,
        run_id: str,
        command: Sequence[str],
    ) -> None:
        self._config, self._host_manager, self._output = config, host_manager, output
        self._run_id, self._command, self._say = run_id, command, output.say
        self._budget = Budget(config.max_restarts)
        self._standing = Standing()
        self._saved: dict[str, int] = {}
        self._number = 0
        self._before: Placement | None = None

    def run(self) -> int:
        """Makes attempts until the job ends, and returns its exit code."""
        try:
            while True:
                with stopping_by_signals() as signals:
                    code = self._make_attempt(signals)
                    if code is not None:
                        return code
        except Stopped as stop:
            self._say(f"{stop}: all workers have ended")
            if self._saved:
                self._say(describe_checkpoints(self._saved))
                self._show_how_to_go_on()
            return 128 + stop.number
        except TooFewMachines as error:
            self._say(str(error))
            return EXIT_FAILED

    def _make_attempt(self, signals: Signals) -> int | None:
        """Makes one attempt; returns the exit code of the job, or None if it goes on."""
        placement = self._host_manager.assemble(self._standing)
        self._show_placement(placement)
        folder = self._folder()
        attempt = self._run_workers(placement, folder, signals)
        self._number += 1
        if attempt is None:
            self._say("starting all workers again on the machines that answer")
            return None
        if attempt.failures:
            rank = attempt.cause.rank
            host = membership.ranks_of(placement)[rank][0]
            host = os.uname().nodename if names_loopback(host) else host
            is_mistake = attempt.cause.exit_code == EXIT_USER
            is_shown = {"stdout", "stderr"} <= set(self._config.terminal)
            is_seen = attempt.cause.is_final or (is_mistake and is_shown)
            lines = [] if is_seen else self._output.last_lines(rank)
            report(attempt, folder, host, lines, self._say)
            if attempt.cause.step is not None:
                self._say(describe_checkpoints(self._saved))
        action = policy.next_action(attempt, self._budget)
        if isinstance(action, Stop):
            if attempt.failures:
                why = f": {action.why}" if action.why else ""
                self._say(f"ending with exit code {action.exit_code}{why}")
                self._show_how_to_go_on()
            return action.exit_code
        self._remember(attempt, placement, action.budget)
        left = self._budget.max_restarts - self._budget.used
        wait = f" in {action.delay_s:g} s" if action.delay_s else ""
        self._say(f"starting all workers again{wait} ({left} more without progress)")
        time.sleep(action.delay_s)
        return None

    def _show_how_to_go_on(self) -> None:
        """Shows the command that resumes the job, if there is a checkpoint."""
        if self._command and any(step >= 0 for step in self._saved.values()):
            self._say(f"to go on: {resume_command(self._command, self._saved)}")

    def _folder(self) -> Path:
        """Returns a new folder for an attempt; raises ConfigError for the first attempt alone."""
        try:
            return folder_for_attempt(self._config.log_dir)
        except ConfigError as error:
            if self._number == 0:
                raise
            # The disk may have become full while the job ran. That does not end the job.
            folder = Path(tempfile.mkdtemp(prefix="tfmulti-logs-"))
            self._say(f"{error} The workers' output goes to {folder}.")
            return folder

    def _remember(self, attempt: Attempt, placement: Placement, budget: Budget) -> None:
        """Notes the hosts that failed, and the budget of restarts for the next attempt."""
        before = self._standing
        # A machine that does not answer needs no absence: it cannot take part anyway.
        hosts = {
            rank: host
            for rank, (host, _, _) in membership.ranks_of(placement).items()
            if host in self._host_manager.machines
        }
        self._standing = membership.after(
            before,
            attempt,
            hosts,
            progressed=budget.furthest > self._budget.furthest,
            now_s=time.monotonic(),
        )
        # An attempt without the failing worker does not use up the budget. In a job with a fixed
        # number of workers every attempt has that worker.
        is_left_out = self._standing.absent != before.absent
        choice = self._host_manager.choice(self._standing)
        is_left_out = is_left_out and choice is not None and choice != placement
        self._budget = budget.unused() if is_left_out else budget

    def _show_placement(self, placement: Placement) -> None:
        """Shows the placement if it differs from that of the last attempt."""
        if self._before is not None and placement != self._before:
            self._say(f"going on with {membership.describe_placement(placement)}")
        self._before = placement

    def _run_workers(self, placement: Placement, folder: Path, signals: Signals) -> Attempt | None:
        """Starts all workers, waits for their end or a failure, and ends those that still run.

        Returns:
            How the attempt ended, or None if the job goes on with other machines.
        """
        self._output.begin(folder, len(membership.ranks_of(placement)))
        with WorkerGroup(
            self._host_manager.machines, placement, self._host_manager.lost
        ) as worker_group:
            watch = Watch(
                self._config,
                worker_group,
                self._output,
                lambda: self._wants_others(placement),
                self._say,
            )
            try:
                # A signal in between could leave a worker that is started but not recorded.
                with signals.held():
                    worker_group.start(
                        self._run_id, self._number, self._saved, self._output.folder_of
                    )
                failures = watch.until_the_end()
                if failures:
                    failures = self._settled(worker_group, watch, failures)
            except Stopped as stop:
                self._say(f"{stop}: asking {len(worker_group.running())} workers to stop")
                worker_group.end(self._config.shutdown_grace_s)
                self._note_checkpoints(worker_group)
                raise
            except Regroup:
                worker_group.end(self._config.shutdown_grace_s)
                self._note_checkpoints(worker_group)
                return None
            steps = self._note_checkpoints(worker_group)
            # The other workers wait in a collective for the one that is gone, and do not react to
            # SIGTERM. The end of the context kills them at once.
            return Attempt(tuple(first_of_each(failures)), max(steps, default=None))

    def _wants_others(self, placement: Placement) -> Placement | None:
        """Returns the placement of an attempt that began at this moment, if it is another one."""
        self._host_manager.poll(placement)
        choice = self._host_manager.choice(self._standing)
        return choice if choice and sorted(choice) != sorted(placement) else None

    def _note_checkpoints(self, worker_group: WorkerGroup) -> list[int]:
        """Notes the newest checkpoints, and returns the steps that the workers reported."""
        heartbeats = [status.heartbeat for status in worker_group.statuses() if status.heartbeat]
        self._saved.update(
            (heartbeat.folder, heartbeat.saved) for heartbeat in heartbeats if heartbeat.folder
        )
        return [heartbeat.step for heartbeat in heartbeats]

    def _settled(
        self, worker_group: WorkerGroup, watch: Watch, failures: list[Failure]
    ) -> list[Failure]:
        """Waits a short time for further failures, and returns all that were found.

        - If a worker was asked to stop, all workers end at the same step. They get the grace period
          to save.
        - If every failure only says that another worker was lost, that worker is still to be found.
        """
        began_s = time.monotonic()
        while running := worker_group.running():
            if any(status.returncode in policy.ASKED_TO_STOP for status in worker_group.statuses()):
                wait_s = self._config.shutdown_grace_s
            else:
                failing = any(
                    status.error and status.error.type not in policy.LOST_A_WORKER
                    for status in running
                )
                wait_s = FAILING_S if failing else SETTLE_S
                if all(f.is_consequence for f in failures):
                    wait_s = CAUSE_S
            if time.monotonic() - began_s > wait_s:
                break
            time.sleep(0.02)
            failures = watch.failed(worker_group.statuses()) or failures
        return failures + watch.failed(worker_group.statuses())


def folder_for_attempt(log_dir: Path) -> Path:
    """Makes and returns a new folder for an attempt, `attempt_N` with the first free number.

    Raises:
        ConfigError: the folder cannot be made.
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


def first_of_each(failures: list[Failure]) -> list[Failure]:
    """Returns the first failure of each worker, ordered by the time of the failure."""
    first_failures: dict[int, Failure] = {}
    for failure in failures:
        first_failures.setdefault(failure.rank, failure)
    return sorted(first_failures.values(), key=lambda failure: failure.seen_s)


def report(
    attempt: Attempt, folder: Path, host: str, lines: Sequence[str], say: Callable[[str], None]
) -> None:
    """Shows the cause of an attempt's end, the failures of other workers, and the log folder.

    Args:
        attempt: how the attempt ended.
        folder: the folder of its logs.
        host: the machine of the worker that is the cause.
        lines: the last lines of the output of that worker.
        say: shows a line of the launcher.
    """
    cause = attempt.cause
    at = "" if cause.step is None else f" at step {cause.step}"
    say(f"worker {cause.rank} {cause.what}{at}")
    say(f"it ran on {host}" + ("; the last lines of its log:" if lines else ""))
    for line in lines:
        quote(f"    {line}")
    for other in attempt.failures:
        # Each worker finds the same mistake of the user.
        if other.rank != cause.rank and not cause.exit_code == other.exit_code == EXIT_USER:
            say(f"then worker {other.rank} {other.what}")
    say(f"all output: {folder}")


def describe_checkpoints(saved: Mapping[str, int]) -> str:
    """Returns what a job has saved, in words.

    Args:
        saved: for each folder of checkpoints, the step of the newest one.

    >>> describe_checkpoints({"runs/a/checkpoints": 40})
    'saved: step 40, in runs/a/checkpoints'
    """
    steps = [f"step {step}, in {folder}" for folder, step in sorted(saved.items()) if step >= 0]
    return f"saved: {'; '.join(steps)}" if steps else "no checkpoint was saved"


def resume_command(command: Sequence[str], saved: Mapping[str, int]) -> str:
    """Returns the command that starts a job again where it has stopped.

    Args:
        command: the arguments of the launcher.
        saved: for each folder of checkpoints, the step of the newest one.

    >>> resume_command(["-m", "tfmulti.fit"], {"runs/a b/checkpoints": 40})
    "tfmulti launch -m tfmulti.fit --run_dir 'runs/a b'"
    """
    arguments = ["tfmulti", "launch", *command]
    has_folder = any(word.lstrip("-").partition("=")[0] == "run_dir" for word in command)
    if "tfmulti.fit" in command and not has_folder and len(saved) == 1:
        # The name of a default folder has the time, so another start would take another folder.
        arguments += ["--run_dir", str(Path(next(iter(saved))).parent)]
    return shlex.join(arguments)


class Signals:
    """Turns a signal into the exception `Stopped`, at once or at the end of `held`."""

    def __init__(self) -> None:
        self._is_held = False
        self._pending: int | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Raises `Stopped`, or notes the signal inside of `held`. It is the signal handler."""
        if not self._is_held:
            raise Stopped(number)
        self._pending = number

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """A context in which signals are only noted; raises `Stopped` at its end if one came."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._pending is not None:
            raise Stopped(self._pending)


@contextlib.contextmanager
def stopping_by_signals() -> Iterator[Signals]:
    """A context in which SIGINT, SIGTERM and SIGHUP raise `Stopped` in the main thread."""
    signals = Signals()

    # A signal that is ignored stays ignored, such as SIGHUP under nohup.
    heard = [n for n in STOPPING if signal.getsignal(n) is not signal.SIG_IGN]
    before = {number: signal.signal(number, signals.handle) for number in heard}
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

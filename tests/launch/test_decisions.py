"""The launcher without a worker: its decisions, its command line, its small parts."""

from __future__ import annotations

import dataclasses
import errno
import faulthandler
import io
import itertools
import math
import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from tests.support.processes import is_alive, tf_config
from tfmulti.config.troubleshooting import docs_path_of
from tfmulti.errors import ClusterError, ConfigError
from tfmulti.launch import addresses, init_process, policy, shim, stacks
from tfmulti.launch.config import LaunchConfig, check_devices
from tfmulti.launch.connect import over_ssh, remote_command
from tfmulti.launch.flags import parse
from tfmulti.launch.heartbeat import (
    BUSY,
    ERROR_FILE,
    SAVED,
    TRAINING,
    Heartbeat,
    HeartbeatRecord,
    note_error,
    read_error,
    read_progress,
    saved_before,
)
from tfmulti.launch.idle import Idle, Use, used_by_groups
from tfmulti.launch.machine import Unreachable
from tfmulti.launch.output import Output
from tfmulti.launch.policy import (
    Attempt,
    Budget,
    Failure,
    Restart,
    StepTiming,
    Stop,
    describe_error,
    next_action,
)
from tfmulti.launch.signals import JOINING, default_signals
from tfmulti.launch.supervisor import (
    Stopped,
    describe_checkpoints,
    folder_for_attempt,
    report,
    resume_command,
    stopping_by_signals,
)
from tfmulti.launch.watch import Watch
from tfmulti.launch.workers import (
    Standby,
    StartRequest,
    Worker,
    WorkerStatus,
    command,
    worker_env,
)

LIMIT_S = 30
CRASH = Failure(rank=1, what="exited with 1", exit_code=1, seen_s=5.0)


def failed(code: int = 1, step: int | None = None) -> Attempt:
    return Attempt((Failure(0, "", code, 0.0),), step)


def test_a_job_that_is_done_stops() -> None:
    assert next_action(Attempt((), 100), Budget(3)) == Stop(0)


@pytest.mark.parametrize("code", [2, 130])
def test_mistakes_and_interrupts_are_not_tried_again(code: int) -> None:
    action = next_action(failed(code), Budget(3))
    assert isinstance(action, Stop)
    assert action.exit_code == code


def test_restarts_without_progress_wait_longer_and_end() -> None:
    budget, delays = Budget(6), []
    while isinstance(action := next_action(failed(137), budget), Restart):
        delays.append(action.delay_s)
        budget = action.budget
    assert delays == [0, 1, 2, 4, 8, 16]
    assert action == Stop(137, "6 restarts without progress are used up (--max-restarts 6)")


def test_a_run_that_moves_on_never_ends() -> None:
    budget = Budget(1)
    for step in range(50):
        action = next_action(failed(step=step), budget)
        assert isinstance(action, Restart)
        assert (action.delay_s, action.budget.furthest) == (0.0, step)
        budget = action.budget


def test_no_restart_is_asked_for() -> None:
    assert next_action(failed(), Budget(0)) == Stop(1, "")


def test_a_restart_without_the_failing_worker_uses_up_nothing() -> None:
    """Also where the attempt had made progress, which gives the whole budget back."""
    action = next_action(failed(step=90), Budget(3, used=3, furthest=40))
    assert isinstance(action, Restart)
    assert action.budget.unused() == Budget(3, used=0, furthest=90)


def test_a_standby_process_that_died_is_not_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system may give its number to another process group."""
    guarded: set[int] = set()
    guard = SimpleNamespace(add=guarded.add, remove=guarded.remove)
    standby = Standby(LaunchConfig(program=(__file__,)), guard)
    standby.fill([dict(os.environ)])
    (pid,) = guarded
    os.killpg(pid, signal.SIGKILL)
    standby._spare[0].wait()
    assert standby.take(0, {}) is None
    assert not guarded


def test_the_cause_is_what_was_first() -> None:
    late = Failure(0, "", 1, seen_s=9.0)
    assert Attempt((late, CRASH)).cause == CRASH
    early = Failure(2, "lost another worker", 1, seen_s=1.0, is_consequence=True)
    assert Attempt((early, late, CRASH)).cause == CRASH
    assert Attempt((early,)).cause == early


WAITS = StepTiming(True, since_s=80.0, longest_s=0.1, idle_since_s=80.0)
COMPUTES = StepTiming(True, since_s=100.0, longest_s=0.1, idle_since_s=110.0)
SLOW = StepTiming(True, since_s=80.0, longest_s=9.0, idle_since_s=80.0)
SAVES = StepTiming(False, since_s=80.0, longest_s=0.1, idle_since_s=109.0)
FIRST = StepTiming(False, since_s=80.0, longest_s=0.0, idle_since_s=81.0, first=True)
TRACES = StepTiming(False, since_s=80.0, longest_s=0.0, idle_since_s=109.0, first=True)
HANGS = StepTiming(False, since_s=80.0, longest_s=0.1, idle_since_s=81.0)


@pytest.mark.parametrize(
    ("timings", "stands"),
    [
        ([WAITS, WAITS], True),
        ([WAITS, COMPUTES], False),
        ([WAITS, SLOW], False),
        ([WAITS, SAVES], False),
        ([WAITS, HANGS], True),
        ([HANGS, HANGS], False),
        ([HANGS, FIRST], True),
        ([FIRST, FIRST], True),
        ([FIRST, TRACES], False),
        ([], False),
    ],
)
def test_a_job_stands_still(timings: list[StepTiming], stands: bool) -> None:
    assert policy.stalled(timings, now_s=110.0, timeout_s=15) is stands
    assert policy.stalled(timings, now_s=1000.0, timeout_s=15) is bool(timings)


def test_groups_that_use_no_core_are_seen() -> None:
    times = iter([0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    used = iter(
        [
            {7: Use(1.0)},
            {7: Use(1.01), 8: Use()},  # one per cent of a core
            {7: Use(1.02), 8: Use(0.5)},
            {7: Use(1.02, waits_for_disk=True), 8: Use(0.5)},
            {7: Use(1.02, queued_s=0.4), 8: Use(0.5)},  # a busy machine wakes it late
            {7: Use(1.02, queued_s=1.2), 8: Use(0.5)},  # it gets no core
        ]
    )
    idle = Idle(lambda: next(used), lambda: next(times))
    assert [idle.since(7) for _ in range(6)] == [0.0, 0.0, 0.0, 3.0, 3.0, 5.0]
    assert idle._since[8] == 2.0


def test_a_machine_that_was_paused_makes_no_group_idle() -> None:
    used = [{7: Use()}, {7: Use(0.3)}, {7: Use(0.31)}]
    times = iter([0.0, 60.0, 61.0])
    idle = Idle(lambda: used.pop(0), lambda: next(times))
    assert [idle.since(7) for _ in range(3)] == [0.0, 60.0, 60.0]


def test_a_process_that_gets_no_core_is_seen(request: pytest.FixtureRequest) -> None:
    """Two processes share one core, so each of them waits for it half of the time."""
    core = str(min(os.sched_getaffinity(0)))
    spins = ["taskset", "-c", core, sys.executable, "-c", "while True: pass"]
    groups = []
    for _ in range(2):
        process = subprocess.Popen(spins, start_new_session=True)
        request.addfinalizer(process.wait)
        request.addfinalizer(process.kill)
        groups.append(process.pid)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        used = used_by_groups()
        if all(used[group].queued_s > 0.2 for group in groups):
            return
        time.sleep(0.05)
    pytest.fail(f"{used}")


def test_a_group_that_waits_for_a_disk_without_a_byte_is_idle_in_the_end() -> None:
    """A file server that is gone lets its readers wait for ever; a slow one sends something."""
    used = [{7: Use(disk_bytes=number, waits_for_disk=True)} for number in (1, 2, 2, 2, 2, 3)]
    times = iter([0.0, 10.0, 100.0, 140.0, 200.0, 210.0])
    idle = Idle(lambda: used.pop(0), lambda: next(times))
    assert [idle.since(7) for _ in range(6)] == [0.0, 10.0, 100.0, 100.0, 100.0, 210.0]


def test_no_group_is_idle_while_no_file_can_be_opened() -> None:
    samples = [{7: Use()}, {7: Use()}, OSError(errno.EMFILE, "too many open files"), {7: Use()}]
    look = Mock(side_effect=[*samples, {7: Use()}])
    times = iter([0.0, 10.0, 20.0, 30.0, 40.0])
    idle = Idle(look, lambda: next(times))
    assert [idle.since(7) for _ in range(5)] == [0.0, 0.0, 20.0, 30.0, 30.0]


def test_a_group_that_polls_is_still_and_one_that_works_is_not() -> None:
    """Group 7 only uses a core; 8 reads a disk; 9 takes more memory, and later only keeps it."""
    now = [0.0]
    used = [
        {
            7: Use(core, memory_pages=1000),
            8: Use(core, disk_bytes=int(core), memory_pages=1000),
            9: Use(core, memory_pages=pages),
        }
        for core, pages in ((0.0, 500), (10.0, 900), (20.0, 1000), (30.0, 1005))
    ]
    idle = Idle(lambda: used.pop(0), lambda: now[0])
    found = []
    for now[0] in (0.0, 10.0, 20.0, 30.0):
        found.append([idle.still_since(group) for group in (7, 8, 9)])
    assert found == [[0.0, 0.0, 0.0], [0.0, 10.0, 10.0], [0.0, 20.0, 20.0], [0.0, 30.0, 20.0]]
    assert [idle.since(group) for group in (7, 8, 9)] == [30.0, 30.0, 30.0]


def test_a_worker_that_joins_is_known_without_blocking_sigterm() -> None:
    """TensorFlow's threads would inherit a blocked SIGTERM, and their child processes as well."""
    own = os.getpid()
    with default_signals():
        assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
        # As long as the signal has its default action, it ends the process.
        assert not init_process._is_joining(own)
        signal.signal(signal.SIGTERM, lambda *_: None)  # as TensorFlow does
        assert init_process._is_joining(own)
    assert JOINING not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_faulthandler_of_the_user_keeps_sigusr1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "_is_registered", False)
    faulthandler.unregister(signal.SIGUSR1)
    with open(tmp_path / "users", "w") as users, open(tmp_path / "errors", "w") as errors:
        monkeypatch.setattr(stacks, "own_stderr", errors.fileno)
        try:
            faulthandler.register(signal.SIGUSR1, file=users)
            stacks.show_at_sigusr1()
            with stacks.file_of_stacks() as file:
                assert file is None
            os.kill(os.getpid(), signal.SIGUSR1)
            faulthandler.unregister(signal.SIGUSR1)
            assert "most recent call first" in (tmp_path / "users").read_text()
            stacks.show_at_sigusr1()
            with stacks.file_of_stacks() as file:
                assert file is not None
            os.kill(os.getpid(), signal.SIGUSR1)
            assert "most recent call first" in (tmp_path / "errors").read_text()
        finally:
            faulthandler.unregister(signal.SIGUSR1)


STARTED = HeartbeatRecord(0, "busy", 0.0, 0.0)


@pytest.mark.parametrize(
    ("module", "heartbeat", "listening", "judged"),
    [
        # It may be no program of TensorFlow.
        ("own", None, (), False),
        ("own", None, (0,), True),
        # All listen, so it may train.
        ("own", None, (0, 1), False),
        ("own", STARTED, (0, 1), True),
        ("own", dataclasses.replace(STARTED, step=1), (0, 1), False),
        ("tfmulti.fit", None, (), True),
        ("tfmulti.fit", None, (0, 1), True),
    ],
)
def test_workers_that_only_use_a_core_are_judged_if_they_would_report(
    module: str, heartbeat: HeartbeatRecord | None, listening: tuple[int, ...], judged: bool
) -> None:
    shown = list[str]()
    config = LaunchConfig(program=(module,), module=True)
    worker_group = Mock(locations={0: (), 1: ()}, addresses=("a:1", "b:2"))
    worker_group.silent.return_value = [rank for rank in (0, 1) if rank not in listening]
    worker_group.stacks.return_value = {}
    watch = Watch(config, worker_group, Mock(), lambda: None, shown.append)
    still_s = time.monotonic() - 10 * config.start_timeout_s - 1
    if heartbeat is not None:
        heartbeat = dataclasses.replace(heartbeat, since_s=still_s)
    statuses = [
        WorkerStatus(rank, 1, heartbeat=heartbeat, idle_since_s=math.inf, still_since_s=still_s)
        for rank in (0, 1)
    ]
    watch._silent(statuses)
    for _ in range(2):
        assert bool(watch._still_at_start(statuses)) is judged
    warnings = [line for line in shown if line.startswith("warning")]
    assert len(warnings) == (not judged and not listening)
    assert not watch._still_at_start([dataclasses.replace(statuses[0], still_since_s=still_s + 2)])


@pytest.mark.parametrize(
    ("heartbeats", "named"),
    [
        ((None, None), [0, 1]),
        ((STARTED, None), [1]),
        # A vote on the data has given both a heartbeat before they hang.
        ((STARTED, STARTED), [0, 1]),
        ((STARTED, dataclasses.replace(STARTED, step=1)), []),
        ((None, dataclasses.replace(STARTED, step=1)), [0]),
        # It waits for a tracker's server.
        ((STARTED, dataclasses.replace(STARTED, since_s=math.inf)), []),
    ],
)
def test_workers_that_are_idle_before_the_first_step_have_the_start_timeout(
    heartbeats: tuple[HeartbeatRecord | None, ...], named: list[int]
) -> None:
    config = LaunchConfig(program=("own",), module=True, start_timeout_s=30.0)
    worker_group = Mock(locations={0: (), 1: ()}, addresses=("a:1", "b:2"))
    worker_group.stacks.return_value = {}
    watch = Watch(config, worker_group, Mock(), lambda: None, lambda line: None)
    idle_s = time.monotonic() - 31
    statuses = [
        WorkerStatus(rank, 1, heartbeat=heartbeat, idle_since_s=idle_s)
        for rank, heartbeat in enumerate(heartbeats)
    ]
    assert [failure.rank for failure in watch._idle_at_start(statuses)] == named
    working = dataclasses.replace(statuses[0], idle_since_s=idle_s + 2)
    assert not watch._idle_at_start([working, statuses[1]])


def test_the_docs_explain_where_a_worker_waits() -> None:
    config = LaunchConfig(program=(__file__,), stall_timeout_s=5)
    worker_group = Mock(locations={0: (), 1: ()})
    worker_group.stacks.return_value = {}
    watch = Watch(config, worker_group, Mock(), lambda: None, print)
    began_s = time.monotonic() - 30
    statuses = [
        WorkerStatus(
            rank, 1, heartbeat=HeartbeatRecord(3, phase, began_s, 1.0), idle_since_s=began_s
        )
        for rank, phase in enumerate((TRAINING, BUSY))
    ]
    in_step, outside = watch._stalled(statuses)
    assert (in_step.is_consequence, outside.is_consequence) == (True, False)
    assert docs_path_of(outside.what) == "troubleshooting#outside-of-step"
    assert docs_path_of(in_step.what) == "troubleshooting#no-step"


@pytest.mark.parametrize(("max_restarts", "calls"), [(0, 0), (3, 1)])
def test_standby_processes_are_for_jobs_that_may_restart(max_restarts: int, calls: int) -> None:
    config = LaunchConfig(program=(__file__,), max_restarts=max_restarts)
    worker_group = Mock(locations={0: ()})
    watch = Watch(config, worker_group, Mock(), lambda: None, print)
    status = WorkerStatus(0, 1, heartbeat=dataclasses.replace(STARTED, step=1))
    for _ in range(2):
        watch._prepare([status])
    assert worker_group.prepare.call_count == calls


def test_a_part_of_a_line_is_progress() -> None:
    """Progress bars return to the start of their line."""
    lines, began_s = [], time.monotonic()
    argv = ["printf", r"1/2\r2/2\r"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    worker = Worker(0, process, Path("nowhere"))
    worker.read(lambda rank, stream, line: lines.append((stream, line)))
    for reader in worker.readers:
        reader.join(LIMIT_S)
    process.wait(LIMIT_S)
    idle = Mock(**{"since.return_value": 0.0, "still_since.return_value": 0.0})
    assert worker.status(idle).still_since_s >= began_s
    assert lines == [("stdout", b"1/2\r2/2\r")]


def test_lines_come_whole_in_whatever_parts_they_are_written(tmp_path: Path) -> None:
    lines: list[bytes] = []
    (tmp_path / "text").write_bytes(text := b"one\r\n\n" + b"x" * 200_000 + b"\nlast")
    argv = ["cat", str(tmp_path / "text")]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    worker = Worker(0, process, tmp_path)
    worker.read(lambda rank, stream, line: lines.append(line))
    for reader in worker.readers:
        reader.join(LIMIT_S)
    process.wait(LIMIT_S)
    assert lines == text.splitlines(keepends=True)


PROGRAM = ["-m", "tfmulti.fit", "--epochs", "3"]


def test_the_command_line_is_torchruns() -> None:
    words = ["--nproc_per_node=2", "--max-restarts", "5", "--log_dir", "l", "--tee", "1"]
    config = parse([*words, "--redirects", "2", *PROGRAM], "", {})
    assert config.program == ("tfmulti.fit", "--epochs", "3")
    assert (config.module, config.per_node, config.max_restarts) == (True, "2", 5)
    assert (config.log_dir, config.terminal, config.files) == (
        Path("l"),
        ("stdout",),
        ("stdout", "stderr"),
    )
    config = parse(["--tee", "0", "-m", "x"], "", {})
    assert (config.terminal, config.files) == (("stdout", "stderr"), ())
    script = parse(["--nproc-per-node", "2", __file__, "--nproc-per-node", "9"], "", {})
    assert (script.program, script.module) == ((__file__, "--nproc-per-node", "9"), False)


@pytest.mark.parametrize("flags", [["--run_dir", "r/a"], ["--run_dir=r/a"]])
def test_logs_stand_in_the_run_directory(flags: list[str]) -> None:
    assert parse(["-m", "tfmulti.fit", *flags], "", {}).log_dir == Path("r/a/logs")
    assert parse([__file__], "", {}).log_dir == Path("logs")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "no program was given"),
        (["--nproc-per-nod", "2", "x.py"], "did you mean --nproc-per-node"),
        (["--nproc-per-node", "0", "x.py"], "must be a whole number from 1"),
        (["--nproc-per-node", "gpu", "-m", "x"], "has no GPU that a program may see"),
        (["--max-restarts", "-1", "x.py"], "must be a whole number from 0"),
        (["--monitor-interval", "soon", "x.py"], "must be a number of seconds"),
        (["--stall-timeout-s", "inf", "x.py"], "must be a number of seconds"),
        (["--tee", "4", "x.py"], "1 (stdout), 2 (stderr) or 3 (both)"),
        (["--log-dir"], "expected one argument"),
        (["nowhere.py"], "there is no script 'nowhere.py'"),
        (["--no-python", "nosuchcommand"], "there is no command 'nosuchcommand'"),
    ],
)
def test_mistakes_on_the_command_line(argv: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(argv, "", {})
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("workers", "gpus", "words"),
    [(3, 2, "more than the 2 GPUs"), (4, 2, "more than the 2 GPUs"), (2, 3, "be shared evenly")],
)
def test_gpus_are_shared_evenly_or_not_at_all(workers: int, gpus: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_devices(workers, gpus)


MODULE = LaunchConfig(program=("x",), module=True, shutdown_grace_s=7.0)


def start_request(rank: int = 1, **others: Any) -> StartRequest:
    return StartRequest(rank, rank, 2, ("a:1", "b:2"), "job", 3, "/logs", **others)


def test_each_worker_gets_its_place_and_its_devices() -> None:
    env = {"PATH": "p", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    child = worker_env(
        MODULE, env, start_request(gpus=2, saved={"/b": 40}), ("4", "5", "6", "7"), cores=8
    )
    assert child["TF_CONFIG"] == (
        '{"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}'
    )
    wanted = {
        "PATH": "p",
        "RANK": "1",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "TFMULTI_RUN_ID": "job",
        "TFMULTI_ATTEMPT": "3",
        "TFMULTI_GRACE_S": "7",
        "TFMULTI_SAVED": '{"/b": 40}',
        "CUDA_VISIBLE_DEVICES": "6,7",
    }
    assert {name: child[name] for name in wanted} == wanted
    assert env == {"PATH": "p", "CUDA_VISIBLE_DEVICES": "4,5,6,7"}


def test_a_program_that_does_not_use_tfmulti_goes_past_the_proxy_too() -> None:
    child = worker_env(MODULE, {"http_proxy": "http://p:1"}, start_request(), (), cores=1)
    assert child["no_grpc_proxy"] == "a,b"
    assert "no_grpc_proxy" not in worker_env(MODULE, {}, start_request(), (), cores=1)


def test_cores_are_shared_unless_the_user_says_otherwise() -> None:
    child = worker_env(MODULE, {"OMP_NUM_THREADS": "7"}, start_request(0), (), cores=5)
    assert (child["TF_NUM_INTRAOP_THREADS"], child["OMP_NUM_THREADS"]) == ("2", "7")


def test_commands() -> None:
    start = [sys.executable, "-m", "tfmulti.launch.shim"]
    assert command(LaunchConfig(program=(__file__, "-x"))) == [*start, __file__, "-x"]
    assert command(LaunchConfig(program=("m", "-x"), module=True)) == [*start, "-m", "m", "-x"]
    others = [*start, "--command", "echo", "-x"]
    assert command(LaunchConfig(program=("echo", "-x"), python=False)) == others


def test_addresses_are_nobody_elses_until_a_server_listens() -> None:
    with addresses.reserved(2) as (first, second):
        assert addresses.silent([first, second]) == [0, 1]
        port = int(first.rpartition(":")[2])
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        with socket.socket() as server:  # as gRPC does
            server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            server.bind(("127.0.0.1", port))
            server.listen()
            assert addresses.silent([first, second]) == [1]


def test_lines_are_kept_whole_and_shown_with_their_worker(tmp_path: Path) -> None:
    terminal = io.StringIO()
    output = Output(MODULE, {"stdout": terminal, "stderr": io.StringIO()})
    output.begin(tmp_path, workers=12)
    for line in (b"one\r\n", b"1/2\r2/2\n", "über".encode()):
        output.line(3, "stdout", line)
    output.line(3, "stderr", b"a warning\n")
    for chatter in (
        b"I0000 00:00:1795264006.0 1 cudart_stub.cc:31] no drivers\n",
        b"E0000 00:00:1795264006.0 1 cuda_platform.cc:52] failed call to cuInit: INTERNAL\n",
        b"/job:worker/replica:0/task:1\n",
    ):
        output.line(3, "stderr", chatter)
    folder = tmp_path / "worker_3"
    assert (folder / "stdout.log").read_bytes() == "one\r\n1/2\r2/2\nüber".encode()
    assert terminal.getvalue() == "[worker  3] one\n[worker  3] 2/2\n[worker  3] über\n"
    assert (output.last_lines(3), output.last_lines(2)) == (["a warning"], [])
    for number in range(20):
        output.line(3, "stderr", f"  {number}\n\n".encode())
    assert output.last_lines(3) == [f"  {number}" for number in range(10, 20)]
    output.begin(tmp_path / "next", workers=1)
    assert output.last_lines(3) == []


def test_a_mistake_that_every_worker_finds_is_shown_once(tmp_path: Path) -> None:
    terminal = io.StringIO()
    output = Output(MODULE, {"stdout": io.StringIO(), "stderr": terminal})
    output.begin(tmp_path, workers=2)
    for rank in (1, 0, 1):
        output.line(rank, "stderr", b"tfmulti: no flag\n")
        output.line(rank, "stderr", b"a warning\n")
    assert [line.split("] ")[1] for line in terminal.getvalue().splitlines()] == [
        "tfmulti: no flag",
        "a warning",
        "a warning",
        "tfmulti: no flag",
        "a warning",
    ]
    assert (tmp_path / "worker_0" / "stderr.log").read_bytes() == b"tfmulti: no flag\na warning\n"


IN_GRAPH = "Graph execution error:\n\nDetected at node f defined at:\n  File x, line 8, in call\n\n"
OF_NODE = "\n\n\n\t [[{{node f}}]] [Op:__inference_one_561]"


@pytest.mark.parametrize(
    ("kind", "message", "words"),
    [
        ("KeyError", "'weights'", "KeyError: 'weights'"),
        ("ValueError", "", "ValueError: "),
        ("ValueError", "first\nsecond", "ValueError: first"),
        ("ValueError", "in user code:\n  File x\n\n  TypeError: no", "ValueError: TypeError: no"),
        (
            "UnknownError",
            f"{IN_GRAPH}KeyError: 'a'\nTraceback (most recent call last):\n\n  File x\n\n"
            f"KeyError: 'a'{OF_NODE}",
            "KeyError: 'a'",
        ),
        (
            "InvalidArgumentError",
            f"{IN_GRAPH}Incompatible shapes: [8,3] vs. [8,4]{OF_NODE}",
            "InvalidArgumentError: Incompatible shapes: [8,3] vs. [8,4]",
        ),
    ],
)
def test_an_error_is_told_in_a_line(kind: str, message: str, words: str) -> None:
    assert describe_error(kind, message) == words


TWO_HOSTS = '{"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 1}}'
ONE_HOST = '{"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}}'


@pytest.mark.parametrize(
    ("env", "alone"),
    [
        ({}, True),
        ({"TF_CONFIG": ONE_HOST}, True),
        ({"TF_CONFIG": TWO_HOSTS}, False),
        # The program may have named another environment.
        ({"TF_CONFIG": "wrong"}, False),
    ],
)
def test_a_single_worker_cannot_have_lost_another(env: dict[str, str], alone: bool) -> None:
    assert shim.is_alone(env) is alone


def test_a_failure_that_says_so_is_final() -> None:
    failed = dataclasses.replace(CRASH, is_final=True)
    found = next_action(Attempt((failed,), step=3), Budget(max_restarts=3))
    assert found == Stop(1, "a restart cannot help")


def test_the_command_that_goes_on_names_the_folder_of_the_run() -> None:
    saved = {"runs/x/checkpoints": 7}
    given = ["-m", "tfmulti.fit", "--run_dir=runs/a"]
    assert resume_command(given, saved) == "tfmulti launch -m tfmulti.fit --run_dir=runs/a"
    assert resume_command(["a.py", "--lr", "1 0"], saved) == "tfmulti launch a.py --lr '1 0'"
    assert describe_checkpoints({"runs/x/checkpoints": -1}) == "no checkpoint was saved"


def test_lines_of_a_worker_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """They may resemble a message that the docs explain."""
    line = "ValueError: the model is not compiled"
    output = Output(MODULE)
    report(Attempt((CRASH,)), Path("logs"), "h1", [line], output.say)
    assert f"[launch]     {line}\n" in capsys.readouterr().err


def test_a_place_in_the_docs_is_named_once_in_a_job(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        output = Output(MODULE)
        output.say("starting all workers again (3 more without progress)")
        output.say("starting all workers again (2 more without progress)")
        output.say("all output: logs")
    assert capsys.readouterr().err.splitlines() == 2 * [
        "[launch] starting all workers again (3 more without progress) "
        "(docs: troubleshooting#starting-again)",
        "[launch] starting all workers again (2 more without progress)",
        "[launch] all output: logs",
    ]


class Kind:
    """What is executed: a kind lives as long as it does."""


def heartbeat_in(path: Path) -> HeartbeatRecord:
    heartbeat = read_progress(path)
    assert heartbeat is not None
    return heartbeat


def test_a_worker_tells_its_steps(tmp_path: Path) -> None:
    times = iter([10.0, 11.0, 14.0, 15.0, 15.5, 16.0, 16.2, 17.0, 18.0])
    path = tmp_path / "progress"
    assert read_progress(path) is None
    heartbeat_writer, one, other = Heartbeat(str(path), lambda: next(times)), Kind(), Kind()
    heartbeat_writer.begin()
    with heartbeat_writer.working(one):  # traces, for three seconds
        assert read_progress(path) == HeartbeatRecord(0, "first", 11.0, 0.0)
    heartbeat_writer.step(7)
    assert read_progress(path) == HeartbeatRecord(7, "busy", 14.0, 0.0)
    with heartbeat_writer.working(one):
        assert read_progress(path) == HeartbeatRecord(7, "first", 15.0, 0.0)
    heartbeat_writer.step(8)
    assert read_progress(path) == HeartbeatRecord(8, "busy", 15.5, 0.0)
    with heartbeat_writer.working(one):
        assert read_progress(path) == HeartbeatRecord(8, "training", 16.0, 0.5)
    with heartbeat_writer.working(other):  # which traces, too
        assert read_progress(path) == HeartbeatRecord(8, "first", 17.0, 0.0)
    heartbeat_writer.saved(8, "/runs/a long name/b")
    heartbeat_writer.asked()
    last_heartbeat = HeartbeatRecord(
        8, "busy", 18.0, 0.0, asked=True, saved=8, folder="/runs/a long name/b"
    )
    assert read_progress(path) == last_heartbeat
    heartbeat_writer.saved(9, "/b")
    assert read_progress(path) == dataclasses.replace(last_heartbeat, saved=9, folder="/b")
    assert saved_before("/b", {SAVED: '{"/b": 9}'}) == 9
    assert saved_before("/b", {}) == -1


def test_one_slow_step_does_not_change_the_usual_time() -> None:
    now, heartbeat_writer, kind, other = [0.0], Heartbeat(None, lambda: now[0]), Kind(), Kind()
    assert heartbeat_writer.usual_s() == 0.0
    for seconds in (99.0, *[1.0] * 9, 50.0, *[1.0] * 9):
        with heartbeat_writer.working(kind):
            now[0] += seconds
    assert heartbeat_writer.usual_s() == 1.0
    assert heartbeat_writer.record().longest_s == 50.0
    # One execution in five has more steps than the others.
    for seconds in [4.0, 1.0, 1.0, 1.0, 1.0] * 10:
        with heartbeat_writer.working(kind):
            now[0] += seconds
    assert heartbeat_writer.usual_s() == 4.0
    with heartbeat_writer.working(other):
        assert heartbeat_writer.usual_s() == 0.0


def test_who_goes_on_after_an_error_is_in_no_step(tmp_path: Path) -> None:
    path, kind = tmp_path / "progress", Kind()
    heartbeat_writer = Heartbeat(str(path), lambda: 1.0)
    with pytest.raises(ValueError, match="caught"), heartbeat_writer.working(kind):
        raise ValueError("caught by the script")
    assert heartbeat_in(path).phase == "busy"


def test_another_kind_at_the_same_place_is_not_the_same(tmp_path: Path) -> None:
    path, times = tmp_path / "progress", itertools.count()
    heartbeat_writer = Heartbeat(str(path), lambda: float(next(times)))
    places = set()
    for _ in range(3):
        kind = Kind()
        places.add(id(kind))
        for _ in range(2):
            with heartbeat_writer.working(kind):
                assert heartbeat_in(path).phase == "first"
        del kind
    assert len(places) < 3  # Python gives a place anew


def test_a_later_trace_is_no_stalled_step(tmp_path: Path) -> None:
    """Steps were short, and then one is traced for another shape: for minutes, perhaps."""
    now = [0.0]
    path = tmp_path / "progress"
    heartbeat_writer = Heartbeat(str(path), lambda: now[0])
    kind, phases = Kind(), []
    for seconds in (60.0, 0.01, 0.01, 90.0, 0.01):
        with heartbeat_writer.working(kind):
            if seconds > 1:
                heartbeat_writer.tracing()
            phases.append(heartbeat_in(path).phase)
            now[0] += seconds
    assert phases == ["first", "first", "training", "first", "training"]
    assert heartbeat_in(path).longest_s == pytest.approx(0.01)
    heartbeat_writer.tracing()  # as for a comparison, outside of any step
    assert heartbeat_in(path).phase == "busy"


def test_errors_are_written_whole(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    assert read_error(path) is None
    try:
        raise KeyError("weights")
    except KeyError as error:
        note_error(error, {ERROR_FILE: str(path), "RANK": "2"})
    found = read_error(path)
    assert found is not None
    assert (found.type, found.message, found.rank) == ("KeyError", "'weights'", 2)
    assert 'raise KeyError("weights")' in found.traceback
    path.write_text('{"message"')
    assert read_error(path) is None


GUARDED = """
    import subprocess, sys, time
    from tfmulti.launch.guard import Guard

    guard = Guard(grace_s=0.3)
    deaf = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    wait = "import time; print(1, flush=True); time.sleep(60)"
    for code in (wait, deaf + wait):
        child = subprocess.Popen(
            [sys.executable, "-c", code], start_new_session=True, stdout=subprocess.PIPE
        )
        child.stdout.readline()
        guard.add(child.pid)
        print(child.pid, flush=True)
    time.sleep(60)
"""


def test_no_worker_outlives_a_launcher_that_is_killed() -> None:
    launcher = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(GUARDED)], stdout=subprocess.PIPE
    )
    assert launcher.stdout is not None
    children = [int(launcher.stdout.readline()) for _ in range(2)]
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    launcher.stdout.close()
    deadline = time.monotonic() + 5
    while any(is_alive(pid) for pid in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(pid) for pid in children)


def test_the_launcher_starts_without_tensorflow(tmp_path: Path) -> None:
    code = "import sys; import tfmulti.launch.__main__; print(sorted(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert not {"'tensorflow'", "'keras'", "'numpy'"} & set(done.stdout.strip("[]\n").split(", "))


@pytest.mark.parametrize(("signal_number", "code"), [(9, 137), (15, 143)])
def test_what_an_exit_says(signal_number: int, code: int) -> None:
    words, found = policy.describe_exit(-signal_number)
    assert found == code
    assert signal.Signals(signal_number).name in words


def test_a_signal_waits_until_a_worker_is_known() -> None:
    events = []

    def start() -> None:
        with stopping_by_signals() as signals, signals.held():
            os.kill(os.getpid(), signal.SIGTERM)
            events.append("the rest is done")

    with pytest.raises(Stopped) as caught:
        start()
    assert (caught.value.number, events) == (signal.SIGTERM, ["the rest is done"])


def test_attempts_of_two_jobs_have_folders_of_their_own(tmp_path: Path) -> None:
    assert [folder_for_attempt(tmp_path / "l").name for _ in range(3)] == [
        "attempt_0",
        "attempt_1",
        "attempt_2",
    ]
    (tmp_path / "f").touch()
    with pytest.raises(ConfigError, match="--log-dir"):
        folder_for_attempt(tmp_path / "f")


def test_the_hosts_of_an_allocation_are_taken(tmp_path: Path) -> None:
    """In one of Slurm the remote workers are started by srun, elsewhere by SSH."""
    slurm = {"SLURM_JOB_NODELIST": "n[1-2]"}
    config = parse([__file__], "", slurm)
    assert ([host.name for host in config.hosts], config.ssh) == (["n1", "n2"], "srun")
    argv = remote_command(config, "n2")
    assert argv[0] == "srun"
    assert "--nodelist=n2" in argv
    assert "-m tfmulti.launch.agent" in argv[-1]
    # https://github.com/openpbs/openpbs/blob/master/doc/man1/qsub.1B for PBS, and for LSF
    # https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=variables-environment-set-job-execution
    file = tmp_path / "nodes"
    file.write_text("h1\nh1\nh2\n")
    for env in (
        {"PBS_NODEFILE": str(file)},
        {"LSB_DJOB_HOSTFILE": str(file)},
        {"LSB_MCPU_HOSTS": "h1 2 h2 1"},
        {"LSB_DJOB_HOSTFILE": str(file), "LSB_MCPU_HOSTS": "h3 1 h4 1"},
    ):
        config = parse([__file__], "", env)
        assert ([host.name for host in config.hosts], config.ssh) == (["h1", "h2"], "ssh")


STEP = {
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_JOB_NAME": "train",
}


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (STEP, "srun has started several launchers, .* Run tfmulti launch without srun"),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"},
            "mpirun has started several launchers, .* let mpirun start the training",
        ),
        ({"LSB_JOBID": "3", "JSM_NAMESPACE_SIZE": "2"}, "jsrun has started several launchers"),
        (
            {"JOB_COMPLETION_INDEX": "1", "TFMULTI_WORKERS": "4"},
            "kubernetes names several workers, .* Leave out 'tfmulti launch'",
        ),
        (
            {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-1"},
            "sagemaker names several workers, .* reads its place from sagemaker itself",
        ),
        ({"TF_CONFIG": tf_config(("a:1", "b:1"), 0)}, "TF_CONFIG names several workers, "),
    ],
)
def test_one_of_several_launchers_starts_nothing(env: dict[str, str], words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        parse([__file__], "", env)
    for flags in (["--nnodes", "1"], ["--hosts", "n1,n2", "--node-rank", "1", "--insecure"]):
        assert parse([*flags, __file__], "", env).program == (__file__,)


def test_a_launcher_takes_no_notice_of_a_cluster_of_one_worker() -> None:
    env = {"TF_CONFIG": tf_config(("a:1",), 0)}
    assert parse([__file__], "", env).program == (__file__,)


def test_a_launcher_in_a_shell_of_slurm_takes_the_allocation() -> None:
    for step in ({"SLURM_STEP_NUM_TASKS": "1"}, {"SLURM_JOB_NAME": "zsh", "SLURM_PTY_PORT": "1"}):
        assert len(parse([__file__], "", STEP | step).hosts) == 2


@pytest.mark.parametrize(
    ("lines", "code", "error", "message"),
    [
        # srun says that the command has run and failed, so another try gives the same.
        (
            ["no module tfmulti", "srun: error: n2: task 0: Exited with exit code 1"],
            1,
            ConfigError,
            "n2: no module tfmulti. The folder, Python and tfmulti",
        ),
        # The node may come back.
        (
            ["srun: error: Unable to create step for job 3: Required node not available"],
            1,
            Unreachable,
            "Required node not available",
        ),
    ],
)
def test_srun_tells_whose_error_it_is(
    lines: list[str],
    code: int,
    error: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    srun = tmp_path / "srun"
    says = "".join(f"echo '{line}' >&2\n" for line in lines)
    srun.write_text(f"#!/bin/sh\n{says}exit {code}\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    config = parse([__file__], "", {"SLURM_JOB_NODELIST": "n[1-2]"})
    with pytest.raises(error, match=re.escape(message)):
        over_ssh(config, {}, config.hosts[1], "r", Mock())


@pytest.mark.parametrize(
    ("flags", "env"),
    [
        ([], {"SLURM_JOB_NODELIST": "n1"}),
        (["--nnodes", "1"], {"SLURM_JOB_NODELIST": "n[1-2]"}),
        (["--isolate"], {"SLURM_JOB_NODELIST": "n[1-2]"}),
    ],
)
def test_an_allocation_is_not_used_where_it_is_not_needed(
    flags: list[str], env: dict[str, str]
) -> None:
    assert parse([*flags, __file__], "", env).hosts == ()


def test_named_hosts_come_before_those_of_an_allocation() -> None:
    config = parse(["--hosts", "a,b", __file__], "", {"SLURM_JOB_NODELIST": "n[1-2]"})
    assert ([host.name for host in config.hosts], config.ssh) == (["a", "b"], "ssh")


def test_the_place_of_a_machine_needs_a_list() -> None:
    with pytest.raises(ConfigError, match="--node-rank is the place of this machine in --hosts"):
        parse(["--node-rank", "0", "--host-discovery-script", "echo", __file__], "", {})
    assert parse(["--node-rank", "0", "--nnodes", "1", __file__], "", {}).hosts == ()

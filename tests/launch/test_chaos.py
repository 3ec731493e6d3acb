"""Tests that runs of two workers with faults give the results of a run without them.

The results are equal to the bit. Each run has several faults, because each fault costs a start.
`whole` is the run without faults.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from tests.support.launching import (
    LIMIT_S,
    argv,
    assert_as_if_nothing_had_happened,
    assert_the_same_within_rounding,
    has_checkpoint,
    launch,
    launched,
    wait_for,
)
from tests.support.mounts import mounted, needs_root
from tests.support.processes import Finished, Processes, is_alive, processes

pytestmark = pytest.mark.processes

SLOW = {"TFMULTI_TEST_STEP_S": "0.3"}


def test_kills_of_any_worker_at_any_time(tmp_path: Path, whole: dict[str, np.ndarray]) -> None:
    """Worker 0, worker 1 or both are killed, also in a checkpoint and in the evaluation."""
    schedule = "0.0.0.kill 0.4.1.kill 0.v.0.kill 1.1.0.half 1.3.*.kill"
    done = launched(tmp_path, schedule)
    assert done.returncode == 0, done.stderr
    assert_as_if_nothing_had_happened(tmp_path, whole)
    assert done.stderr.count("[launch] starting all workers again") == 5
    assert "[launch] worker 1 was killed by SIGKILL" in done.stderr
    assert not list((tmp_path / "checkpoints").glob(".partial*99*"))


def test_errors_freezes_and_notices(tmp_path: Path, whole: dict[str, np.ndarray]) -> None:
    """The faults: an exception, an exit, a frozen worker, a damaged checkpoint, and a SIGTERM."""
    schedule = "0.1.1.raise 0.3.0.exit 1.0.1.stop 1.4.0.damage 2.2.1.term"
    done = launched(tmp_path, schedule)
    assert done.returncode == 0, done.stderr
    assert_as_if_nothing_had_happened(tmp_path, whole)
    for words in (
        "[launch] worker 1 exited with 1 (RuntimeError: the data was on fire) at step 2",
        'raise RuntimeError("the data was on fire")',
        "[launch] worker 0 exited with 3 at step 4",
        "[launch] worker 1 is frozen (SIGSTOP)",
        "going on from step",
        "was asked to stop by SIGTERM",
    ):
        assert words in done.stderr


@needs_root
def test_a_full_disk_loses_nothing(tmp_path: Path, whole: dict[str, np.ndarray]) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    with mounted(folder, "256k"):
        done = launched(tmp_path, "0.2.0.fill 1.0.0.kill 1.3.0.free 2.0.1.kill")
        assert done.returncode == 0, done.stderr
        assert_as_if_nothing_had_happened(tmp_path, whole)
        assert "No space left on device. Training continues; the older ones stay" in done.stderr


def test_a_deadlock_is_seen_and_named(tmp_path: Path, whole: dict[str, np.ndarray]) -> None:
    """One worker alone enters a collective, or a callback never returns."""
    done = launched(tmp_path, "0.2.1.deadlock 1.3.0.hang", "--stall-timeout-s", "8")
    assert done.returncode == 0, done.stderr
    assert_as_if_nothing_had_happened(tmp_path, whole)
    for worker, function, step in ((1, "_deadlock", 3), (0, "_hang", 10)):
        words = (
            rf"worker {worker} is idle, and has been outside of a step for (\d+) s at step {step}\b"
        )
        found = re.search(words, done.stderr)
        assert found is not None, done.stderr
        # It takes 9 s on an idle machine.
        assert int(found[1]) < 30
        # The stack of the worker names the function.
        assert f"in {function}\n" in done.stderr
    assert done.stderr.count("starting all workers again") == 2


def test_a_worker_that_never_comes_is_named(tmp_path: Path) -> None:
    """Without the launcher, the chief would wait for ever."""
    script = tmp_path / "late.py"
    script.write_text(
        "import os, time, tensorflow as tf\n"
        "if os.environ['RANK'] == '1': time.sleep(1e6)\n"
        "tf.distribute.MultiWorkerMirroredStrategy()\n"
    )
    flags = ["--nproc-per-node", "2", "--start-timeout", "3", "--max-restarts", "0"]
    done = launch(tmp_path, *flags, str(script))
    assert done.returncode == 1
    # On a loaded machine both workers may be idle for as long before one of them is missed.
    late = r"does not listen at 127\.0\.0\.1:\d+, 3 s after another worker did"
    words = rf"\[launch\] (then )?worker 1 ({late}|has done nothing for 3 s \(--start-timeout\))"
    assert re.search(words, done.stderr)


# Nothing listens there, so a run that asks the proxy for a worker would wait for ever.
PROXIES = {
    name: "http://127.0.0.1:9" for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
}


def test_a_launched_run_goes_past_a_dead_proxy(
    tmp_path: Path, whole: dict[str, np.ndarray]
) -> None:
    done = launched(tmp_path, "0.3.1.kill", env=PROXIES)
    assert done.returncode == 0, done.stderr
    assert_as_if_nothing_had_happened(tmp_path, whole)
    assert done.stderr.count("starting all workers again") == 1


SPINS = """
import json, os, socket, sys, time
from pathlib import Path
from tfmulti.launch.heartbeat import heartbeat
if sys.argv[1] in ("listens", "begins"):
    config = json.loads(os.environ["TF_CONFIG"])
    port = int(config["cluster"]["worker"][config["task"]["index"]].rpartition(":")[2])
    server = socket.create_server(("127.0.0.1", port))
if sys.argv[1] in ("begins", "counts"):
    heartbeat().begin()
said, next_s = Path(sys.argv[2]), 0.0
end = time.monotonic() + 14
# However busy the machine is, it goes on until it is ended, or until the launcher has warned.
awaited = {"begins": "what nobody says", "polls": "warning: each worker has shown no progress"}
while time.monotonic() < end or awaited.get(sys.argv[1], "") not in said.read_text():
    if sys.argv[1] == "counts" and time.monotonic() > next_s:
        print(f"file {int(end - time.monotonic())}/14", flush=True)
        next_s = time.monotonic() + 1
    # This uses a part of a core, far more than the launcher calls idle.
    until = time.process_time() + 0.02
    while time.process_time() < until:
        pass
    time.sleep(0.05)
"""


TWO_WORKERS = ("--nproc-per-node", "2", "--max-restarts", "0")
SOON = (*TWO_WORKERS, "--start-timeout", "1")


def spun(folder: Path, how: str) -> Finished:
    """Runs two workers that use a part of a core each for at least 14 s, and never train."""
    script = folder / "spins.py"
    script.write_text(SPINS)
    said = folder / "launcher" / "process_0.stderr.log"
    return launch(folder, *SOON, "--redirects", "3", str(script), how, str(said))


def assert_no_progress(done: Finished, start_timeout_s: int = 1) -> None:
    """Checks that the launcher has ended two workers that poll, and has shown where they were."""
    assert done.returncode == 1
    limit = rf"{10 * start_timeout_s} s \(10 times --start-timeout; raise it if"
    words = rf"worker [01] has shown no progress for {limit}"
    assert re.search(words, done.stderr), done.stderr
    assert "spins.py" in done.stderr


def test_workers_that_poll_before_the_first_step_are_ended(tmp_path: Path) -> None:
    """They have begun to train and end no step."""
    assert_no_progress(spun(tmp_path, "begins"))


SAYS = "if attempt % 10**6 == 0: print(f'{time.time()} waiting, attempt {attempt}')"


@pytest.mark.parametrize("body", ["pass", SAYS])
def test_workers_of_fit_that_poll_before_they_listen_are_ended(tmp_path: Path, body: str) -> None:
    """A module of the user polls when it is imported, and may say so again and again."""
    loop = f"import itertools, time\nfor attempt in itertools.count():\n    {body}\n"
    (tmp_path / "spins.py").write_text(loop)
    program = ["-m", "tfmulti.fit", "--model", "spins:build"]
    env = {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    # On a busy machine one worker may load TensorFlow more than a second longer than the other.
    argv = (*TWO_WORKERS, "--start-timeout", "3", *program)
    assert_no_progress(launch(tmp_path, *argv, env=env), start_timeout_s=3)


@pytest.mark.parametrize("how", ["counts", "polls", "listens"])
def test_workers_that_may_work_go_on(tmp_path: Path, how: str) -> None:
    """They count up to a total, or do not use tfmulti and so report no steps."""
    done = spun(tmp_path, how)
    assert done.returncode == 0, done.stderr
    warned = "warning: each worker has shown no progress for 10 s (10 times --start-timeout)"
    assert done.stderr.count(warned) == (how == "polls")


def test_a_job_that_cannot_continue_ends_with_the_cause(tmp_path: Path) -> None:
    done = launched(tmp_path, "0.0.1.exit 0.1.1.raise 0.1.0.raise", "--max-restarts", "0")
    assert done.returncode == 3
    assert "[launch] worker 1 exited with 3 at step 1" in done.stderr
    assert "[launch] ending with exit code 3" in done.stderr
    assert "[launch] no checkpoint was saved" in done.stderr
    assert "to go on" not in done.stderr


def test_the_report_of_a_failure_is_short_and_says_how_to_go_on(tmp_path: Path) -> None:
    done = launched(tmp_path, "0.4.1.raise", "--max-restarts", "0")
    assert done.returncode == 1
    lines = [line.removeprefix("[launch] ") for line in done.stderr.splitlines() if "[la" in line]
    first, where, *log = lines
    assert first == "worker 1 exited with 1 (RuntimeError: the data was on fire) at step 5"
    assert where == f"it ran on {os.uname().nodename}; the last lines of its log:"
    assert "    RuntimeError: the data was on fire" in log
    assert len(lines) <= 18
    # The checkpoint of step 4 may still be written when the worker fails.
    saved = [line for line in lines if line.startswith("saved: step ")]
    assert re.fullmatch(rf"saved: step [24], in {tmp_path}/checkpoints", saved[0])
    assert lines[-1].startswith("to go on: tfmulti launch --nproc-per-node 2 --shutdown-grace-s 10")
    assert "-m tests.support.chaos" in lines[-1]


def test_one_worker_resumes_a_run_of_two(tmp_path: Path, whole: dict[str, np.ndarray]) -> None:
    """The run stops within an epoch, so the metrics of two replicas are merged into one."""
    done = launched(tmp_path, "1.2.1.exit", "--max-restarts", "0")
    assert done.returncode == 3
    done = launched(tmp_path, "", "--nproc-per-node", "1")
    assert done.returncode == 0, done.stderr
    assert_the_same_within_rounding(tmp_path, whole)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_launcher_itself_is_ended(
    tmp_path: Path, whole: dict[str, np.ndarray], number: signal.Signals
) -> None:
    """No process is left, the launcher names what was saved, and the same command resumes."""
    group = Processes(tmp_path / "launcher")
    try:
        launcher = group.start(argv(tmp_path, ""))
        wait_for(lambda: has_checkpoint(tmp_path))
        children = workers_of(launcher.pid)
        # These are two workers and their standby processes.
        assert len(children) in (2, 3, 4)
        launcher.send_signal(number)
        [ended] = group.wait(LIMIT_S)
        assert ended.returncode == (-9 if number == signal.SIGKILL else 143)
        if number == signal.SIGTERM:
            *_, saved, command = ended.stderr.splitlines()
            assert re.match(rf"\[launch\] saved: step \d+, in {tmp_path}/checkpoints", saved)
            assert command.startswith("[launch] to go on: tfmulti launch --nproc-per-node 2")
        wait_for(lambda: not any(map(is_alive, children)), 15)
    finally:
        group.end()
    done = launched(tmp_path)
    assert done.returncode == 0, done.stderr
    assert_as_if_nothing_had_happened(tmp_path, whole)


def test_a_guard_that_is_killed_is_replaced(tmp_path: Path, whole: dict[str, np.ndarray]) -> None:
    """The job continues, and a worker that fails later is started again."""
    with processes(tmp_path / "launcher") as group:
        launcher = group.start(argv(tmp_path, "0.3.1.kill"), SLOW)
        wait_for(lambda: has_checkpoint(tmp_path))
        [guard] = guards_of(launcher.pid)
        os.kill(guard, signal.SIGKILL)
        wait_for(lambda: guards_of(launcher.pid) not in ([], [guard]), 15)
        [done] = group.wait(LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("starting all workers again") == 1
    assert_as_if_nothing_had_happened(tmp_path, whole)


DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(1e6)"
# While this function of the C library runs, no other thread of the process can run Python.
BLOCKED = "import ctypes; ctypes.PyDLL(None).sleep(10**6)"


@pytest.mark.parametrize("replaced", [False, True])
@pytest.mark.parametrize(
    "program", ["sleeps", "deaf", "blocked", "command", "wrapped", "deaf command"]
)
def test_nothing_outlives_launcher_and_guard_killed_at_once(
    tmp_path: Path, program: str, replaced: bool
) -> None:
    """A worker that prints would fail, because the pipe is closed. These workers print nothing."""
    (tmp_path / "deaf.py").write_text(DEAF)
    (tmp_path / "sleeps.py").write_text("import time; time.sleep(1e6)")
    (tmp_path / "blocked.py").write_text(BLOCKED)
    words = [str(tmp_path / f"{program}.py")]
    inner = ["sleep", str(secrets.randbelow(10**9) + 10**9)]
    commands = {
        "command": inner,
        "wrapped": ["bash", "-c", f"{' '.join(inner)}; true"],
        "deaf command": ["bash", "-c", f"trap '' TERM; {' '.join(inner)}; true"],
    }
    words = ["--no-python", *commands[program]] if program in commands else words
    flags = ["-m", "tfmulti.launch", "--shutdown-grace-s", "2", "--log-dir", str(tmp_path / "logs")]
    with processes(tmp_path / "launcher") as group:
        launcher = group.start([*flags, *words])
        wait_for(lambda: workers_of(launcher.pid) != [])
        # The program itself must have begun.
        time.sleep(1.0)
        [worker] = workers_of(launcher.pid)
        guards = guards_of(launcher.pid)
        if replaced:
            os.kill(guards[0], signal.SIGKILL)
            wait_for(lambda: guards_of(launcher.pid) not in ([], guards), 15)
            guards = guards_of(launcher.pid)
        assert is_alive(worker), group.logs()
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for pid in (*guards, launcher.pid):
                os.kill(pid, number)
        launcher.wait(LIMIT_S)
        try:
            wait_for(lambda: not is_alive(worker), 15)
            wait_for(lambda: not running(" ".join(inner)), 15)
        except AssertionError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(worker, signal.SIGKILL)
            raise


def test_a_command_that_ends_leaves_no_process(tmp_path: Path) -> None:
    mark = f"{secrets.randbelow(10**9) + 10**9}"
    done = launch(tmp_path, "--no-python", "bash", "-c", f": {mark}; exit 3")
    assert done.returncode == 3, done.stderr
    wait_for(lambda: not running(mark), 10)


def running(words: str) -> bool:
    """Whether a process has these words in its command line."""
    done = subprocess.run(["pgrep", "-f", words], capture_output=True, text=True)
    return done.returncode == 0


def guards_of(launcher: int) -> list[int]:
    """Returns the guard of a launcher: a fork of the launcher, or a separate program."""
    return [pid for pid, args in children_of(launcher) if _is_guard(args)]


def workers_of(launcher: int) -> list[int]:
    """Returns the processes that the launcher has started, its guard left out."""
    return [pid for pid, args in children_of(launcher) if not _is_guard(args)]


def _is_guard(args: str) -> bool:
    return "tfmulti.launch --" in args or "tfmulti.launch.guard" in args


def children_of(launcher: int) -> list[tuple[int, str]]:
    """Returns the living children of a process, and their command lines."""
    done = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(launcher)], capture_output=True, text=True
    )
    lines = [line.split(None, 1) for line in done.stdout.splitlines()]
    return [(int(pid), args) for pid, args in lines if is_alive(int(pid))]

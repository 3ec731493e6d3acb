"""Tests that a run that hangs says which worker the others wait for, and what that one does."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tfmulti
from tests.support.processes import ONE_THREAD, Processes, processes, tf_config
from tfmulti.distribution.strategies import Placement
from tfmulti.errors import ConfigError
from tfmulti.launch.addresses import reserved
from tfmulti.launch.heartbeat import TRAINING, Heartbeat
from tfmulti.training import watchdog
from tfmulti.training.watchdog import Watchdog, describe, read

pytestmark = pytest.mark.processes

LIMIT_S = 120
MODULE = "tests.support.hanging_script"


def until(found: Callable[[], Any], group: Processes) -> Any:
    """Returns what a function finds, as soon as it does."""
    deadline = time.monotonic() + LIMIT_S
    while not (value := found()):
        assert time.monotonic() < deadline, group.logs()
        time.sleep(0.1)
    return value


def ask(pid: int, answer: Callable[[], Any], group: Processes) -> Any:
    """Sends SIGUSR1 to a process, again every 10 s, and returns its answer.

    Linux gives about one signal in two thousand to another thread than the main one. That thread
    writes nothing.
    """
    sent_s = -math.inf

    def answered() -> Any:
        nonlocal sent_s
        if time.monotonic() - sent_s > 10:
            sent_s = time.monotonic()
            os.kill(pid, signal.SIGUSR1)
        return answer()

    return until(answered, group)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Processes]:
    with processes(tmp_path / "logs") as made:
        yield made


def start(group: Processes, folder: Path, rank: int, *how: str) -> list[int]:
    """Starts two workers, and returns their process ids by rank."""
    argv = ["-m", MODULE, str(folder), str(rank), *how]
    with reserved(2) as addresses:
        return [group.start(argv, {"TF_CONFIG": tf_config(addresses, r)}).pid for r in (0, 1)]


def hang_file(folder: Path, rank: int) -> Any:
    path = folder / "run" / f"hang_worker_{rank}.json"
    return json.loads(path.read_text()) if path.exists() else None


def reports(group: Processes, rank: int) -> list[str]:
    """Returns the lines of a worker that name a hang file.

    On a busy machine a worker may start so late that another says, without a file, that it waits.
    """
    return re.findall(
        rf"tfmulti: worker {rank}: .* See \S+/hang_worker_{rank}\.json.*\n", group.errors(rank)
    )


def test_the_chief_names_the_worker_that_sleeps_and_where(group: Processes, tmp_path: Path) -> None:
    pids = start(group, tmp_path, 1, "sleep")
    line = until(lambda: reports(group, 0), group)[0]
    waits, sleeps = hang_file(tmp_path, 0), hang_file(tmp_path, 1)
    (tmp_path / "end").touch()
    assert [done.returncode for done in group.wait(LIMIT_S)] == [0, 0]
    found = re.fullmatch(
        r"tfmulti: worker 0: no step has ended for (\d+) s; it waits for worker 1 in collective "
        r"\d+ of the step: .*mine/kernel.*; "
        r"worker 1 was in dawdle \((.*)\) \(process (\d+) on .*\)\. "
        rf"See {tmp_path}/run/hang_worker_0\.json \(docs: troubleshooting#late-step\)\n",
        line,
    )
    assert found is not None, line
    assert int(found[1]) >= 2
    assert "hanging_script.py:" in found[2]
    assert int(found[3]) == pids[1]
    assert waits["waits"][0]["missing"] == [1]
    assert waits["waits"][0]["seconds"] > 1
    assert waits["phase"] == "training"
    assert not sleeps["waits"]
    assert any("dawdle" in frame for frame in sleeps["stacks"]["MainThread"])
    # One stop is told once.
    assert len(reports(group, 0)) == 1
    assert not reports(group, 1)


def line_about_frozen(group: Processes, folder: Path, frozen: int, prints: int) -> str:
    """Freezes a worker of two, and returns the line that the worker `prints` shows."""
    pids = start(group, folder, frozen, "freeze")
    try:
        found = until(lambda: reports(group, prints), group)[0]
    finally:
        os.kill(pids[frozen], signal.SIGCONT)
    (folder / "end").touch()
    group.wait(LIMIT_S)
    return str(found)


def test_a_worker_that_is_frozen_writes_no_report(group: Processes, tmp_path: Path) -> None:
    line = line_about_frozen(group, tmp_path, frozen=1, prints=0)
    assert "it waits for worker 1 in collective" in line
    assert "worker 1 has written no report: its process has ended or stopped, " in line


def fit(group: Processes, addresses: list[str], rank: int, folder: Path) -> int:
    """Starts a worker of `python -m tfmulti.fit`, with all defaults of its watchdog."""
    flags = ["--dataset", "digits", "--steps_per_execution", "1", "--epochs", "100000"]
    argv = ["-m", "tfmulti.fit", *flags, "--run_dir", str(folder / "run")]
    env = {"TF_CONFIG": tf_config(addresses, rank), **ONE_THREAD}
    return group.start(argv, env).pid


def test_a_worker_is_named_if_tensorflow_ends_the_step_first(
    group: Processes, tmp_path: Path
) -> None:
    """TensorFlow notices a frozen worker sooner than the watchdog with its defaults.

    On a busy machine the watchdog may come first, with a line about the late step.
    """
    with reserved(2) as addresses:
        pids = [fit(group, addresses, rank, tmp_path) for rank in (0, 1)]
        until((tmp_path / "run/history.csv").exists, group)
    os.kill(pids[1], signal.SIGSTOP)
    until(lambda: hang_file(tmp_path, 0), group)
    until(lambda: "UnavailableError: " in group.errors(0), group)
    *earlier, line = reports(group, 0)
    assert all("no step has ended for" in each for each in earlier)
    seen = hang_file(tmp_path, 0)
    # The worker may be frozen in a step, or where workers exchange values between two steps. Where
    # TensorFlow's own collective waits, only the task is known.
    waited = r"it waited for worker 1 in (collective|an exchange outside of a step)"
    expected = rf"(TensorFlow has lost /job:worker/replica:0/task:1\.|{waited})"
    assert re.search(rf"the step has failed.* {expected}", line)
    place = f"See {tmp_path}/run/hang_worker_0.json (docs: troubleshooting#failed-step)\n"
    assert line.endswith(place)
    assert "/job:worker/replica:0/task:1" in seen["error"]
    assert all(waits["missing"] == [1] for waits in seen["waits"])
    assert "/job:worker/replica:0/task:1" in group.errors(0).rpartition("UnavailableError: ")[2]
    assert len(seen["last_collectives"]) >= 32
    assert all(each["began_s"] <= 0 for each in seen["last_collectives"])


def test_data_that_does_not_come_is_named(group: Processes, tmp_path: Path) -> None:
    start(group, tmp_path, 1, "read")
    line = until(lambda: reports(group, 0), group)[0]
    (tmp_path / "end").touch()
    group.wait(LIMIT_S)
    where = r"worker 1 waited for data in wait_for \(.*hanging_script\.py:\d+\) \(process"
    assert re.search(where, line), line
    assert "it waits for worker 1 in collective" in line


def test_sigusr1_ends_no_worker_that_waits_for_another(group: Processes, tmp_path: Path) -> None:
    with reserved(2) as addresses:
        pid = fit(group, addresses, 0, tmp_path)
        port = int(addresses[0].rpartition(":")[2])

        def listens() -> bool:
            with contextlib.closing(socket.socket()) as asked:
                return asked.connect_ex(("127.0.0.1", port)) == 0

        until(listens, group)
        seen = ask(pid, lambda: hang_file(tmp_path, 0), group)
        line = until(lambda: reports(group, 0), group)[0]
        assert (seen["waits"][0]["what"], seen["waits"][0]["missing"]) == ("the rendezvous", [1])
        assert any("build_strategy" in frame for frame in seen["stacks"]["MainThread"])
        assert f"; worker 1 does not listen at {addresses[1]} (refused). Start it, " in line
        assert "which this process has got from the shell or program that started it" in line
        assert f". See {tmp_path}/run/hang_worker_0.json" in line
        fit(group, addresses, 1, tmp_path)
        until((tmp_path / "run/history.csv").exists, group)


def test_sigusr1_ends_no_worker_after_the_training(group: Processes, tmp_path: Path) -> None:
    pids = start(group, tmp_path, 9, "stay")
    (tmp_path / "end").touch()
    until(lambda: "trained" in group.output(1), group)
    ask(pids[1], lambda: "in wait_for" in group.errors(1), group)
    (tmp_path / "leave").touch()
    assert [done.returncode for done in group.wait(LIMIT_S)] == [0, 0]


def test_a_chief_that_sleeps_says_where(group: Processes, tmp_path: Path) -> None:
    start(group, tmp_path, 0, "sleep")
    line = until(lambda: reports(group, 0), group)[0]
    (tmp_path / "end").touch()
    assert [done.returncode for done in group.wait(LIMIT_S)] == [0, 0]
    assert "; it is in dawdle (" in line
    assert hang_file(tmp_path, 1)["waits"][0]["missing"] == [0]


def test_a_worker_that_does_not_come_to_fit_is_named(group: Processes, tmp_path: Path) -> None:
    start(group, tmp_path, 1, "late")
    line = until(lambda: reports(group, 0), group)[0]
    seen = hang_file(tmp_path, 0)
    (tmp_path / "end").touch()
    assert [done.returncode for done in group.wait(LIMIT_S)] == [0, 0]
    assert "no step has ended for" in line
    assert "worker 1 has written no report: " in line
    assert "it has not come to fit" in line
    assert any("draw_shuffle" in frame for frame in seen["stacks"]["MainThread"])


def test_a_worker_that_sleeps_in_predict_is_named(group: Processes, tmp_path: Path) -> None:
    start(group, tmp_path, 1, "predict")
    line = until(lambda: reports(group, 0), group)[0]
    (tmp_path / "end").touch()
    assert [done.returncode for done in group.wait(LIMIT_S)] == [0, 0]
    assert "it waits for worker 1 in " in line
    assert "worker 1 was in dawdle (" in line
    assert any("predict" in frame for frame in hang_file(tmp_path, 1)["stacks"]["MainThread"])


def test_a_worker_is_named_where_no_collective_tells_it(group: Processes, tmp_path: Path) -> None:
    """TensorFlow's own collectives connect the workers, as NCCL connects GPUs."""
    start(group, tmp_path, 1, "sleep", "--own-channel=false")
    line = until(lambda: reports(group, 0), group)[0]
    (tmp_path / "end").touch()
    assert [done.returncode for done in group.wait(LIMIT_S)] == [0, 0]
    assert "; worker 1 was in dawdle (" in line
    assert not hang_file(tmp_path, 0)["waits"]


def test_a_chief_that_is_frozen_is_named_by_the_first_other(
    group: Processes, tmp_path: Path
) -> None:
    line = line_about_frozen(group, tmp_path, frozen=0, prints=1)
    assert "it waits for worker 0 in collective" in line


def test_sigusr1_tells_without_ending_the_run(group: Processes, tmp_path: Path) -> None:
    pids = start(group, tmp_path, 9, "none")
    until(lambda: len(list(tmp_path.glob("pid-*"))) == 2, group)
    assert not list(tmp_path.glob("run/*"))
    ask(pids[1], lambda: hang_file(tmp_path, 1), group)
    line = until(lambda: reports(group, 1), group)[0]
    (tmp_path / "end").touch()
    assert [done.returncode for done in group.wait(LIMIT_S)] == [0, 0]
    assert line.startswith("tfmulti: worker 1: SIGUSR1; at this moment it ")
    # Of a healthy job nothing else is known.
    assert "process" not in line
    assert hang_file(tmp_path, 1)["pid"] == pids[1]
    # The steps of the others go on, so they have nothing to tell.
    assert hang_file(tmp_path, 0) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"phase": "busy", "at": 3, "reads": "", "pid": 1, "host": "h", "time": 1.0}',
        '{"phase": "busy", "at": "f", "reads": "", "pid": "1", "host": "h", "time": 1.0}',
        "\xff",
    ],
)
def test_a_file_of_another_form_is_left_out(tmp_path: Path, text: str) -> None:
    (tmp_path / "a").write_text(text)
    assert read(tmp_path / "a") is None
    assert read(tmp_path / "b") is None
    (tmp_path / "a").write_text(
        '{"phase": "busy", "at": "f\\u001b[2J", "reads": "", "pid": 1, "host": "h", "time": 1.0}'
    )
    found = read(tmp_path / "a")
    assert found is not None
    assert found["at"] == "f[2J"


@pytest.mark.parametrize("wrong", [{"times": 0}, {"least_s": -1}])
def test_numbers_must_be_above_0(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=r"it must be above 0\."):
        Watchdog(**wrong)


class UnavailableError(Exception):
    """Has the name of TensorFlow's error."""


def watch(folder: Path | None, workers: int, *fences: Callable[[], None]) -> watchdog._Watch:
    callback = Watchdog(folder)
    callback.fences = list(fences)
    return watchdog._Watch(callback, Placement(0, workers, 1))


def test_a_worker_ends_also_if_its_file_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call to a file server that is gone may wait for ever."""
    monkeypatch.setattr(watchdog, "_FAILED_S", 0.05)
    released, ended = threading.Event(), threading.Event()

    def check() -> None:
        released.wait(LIMIT_S)
        ended.set()

    try:
        with pytest.raises(UnavailableError), watch(tmp_path, 2, check):
            raise UnavailableError
        assert not ended.is_set()
    finally:
        released.set()
    # The file is written as soon as the server answers. The thread must not print in another test.
    assert ended.wait(LIMIT_S)
    for thread in threading.enumerate():
        if thread.name == watchdog._THREAD:
            thread.join(LIMIT_S)


@pytest.mark.parametrize("workers", [1, 2])
def test_only_one_of_several_workers_has_lost_another(
    workers: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnavailableError), watch(None, workers):
        raise UnavailableError
    assert ("has lost another worker" in capsys.readouterr().err) == (workers > 1)


def test_what_was_before_the_watch_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """`evaluate` begins no training, and a notebook may call it a day after `fit`."""
    told = Heartbeat(None, lambda: 0.0)
    monkeypatch.setattr(watchdog, "heartbeat", lambda: told)
    monkeypatch.setattr(watchdog, "_LOOK_S", LIMIT_S)
    with watch(None, 1) as found:
        began_s = time.monotonic()
        with monkeypatch.context() as clock:
            clock.setattr(time, "monotonic", lambda: began_s + 50)
            assert found._late_s() is None
            clock.setattr(time, "monotonic", lambda: began_s + 70)
            assert found._late_s() == pytest.approx(70, abs=5)
            seen = describe(Placement(0, 1, 1), found._record())
            assert seen["seconds"] == pytest.approx(70, abs=5)


def test_a_step_is_late_after_five_times_its_usual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Usual(Heartbeat):
        def usual_s(self) -> float:
            return 4.0

    told = Usual(None, lambda: 0.0)
    monkeypatch.setattr(watchdog, "heartbeat", lambda: told)
    monkeypatch.setattr(watchdog, "_LOOK_S", LIMIT_S)
    with watch(None, 1) as found:
        began_s = time.monotonic()
        record = dataclasses.replace(told.record(), phase=TRAINING, since_s=began_s)
        monkeypatch.setattr(found, "_record", lambda: record)
        with monkeypatch.context() as clock:
            for passed_s, is_late in ((11, False), (19, False), (21, True)):
                clock.setattr(time, "monotonic", lambda s=passed_s: began_s + s)
                assert (found._late_s() is not None) is is_late


@pytest.mark.parametrize("given", [None, "elsewhere"])
def test_a_watchdog_takes_the_folder_above_the_checkpoints(tmp_path: Path, given: Any) -> None:
    callback = Watchdog(given)
    callbacks = [callback, tfmulti.Checkpoint(tmp_path / "run" / "checkpoints")]
    with watchdog.watching(callbacks, Placement(0, 1, 1)):
        assert callback.folder == (Path(given) if given else tmp_path / "run")


def test_all_workers_write_into_the_folder_that_the_chief_has_named(
    group: Processes, tmp_path: Path
) -> None:
    argv = ["-m", "tfmulti.fit", "--epochs", "1000", "--steps_per_epoch", "1000"]
    with reserved(2) as addresses:
        pids = [
            group.start(argv, {"TF_CONFIG": tf_config(addresses, rank)}, tmp_path).pid
            for rank in (0, 1)
        ]
        until(lambda: list(tmp_path.glob("runs/*/history.csv")), group)
    [path] = ask(pids[1], lambda: list(tmp_path.glob("runs/*/hang_worker_1.json")), group)
    assert json.loads(path.read_text())["worker"] == 1
    assert len(list(tmp_path.glob("runs/*"))) == 1

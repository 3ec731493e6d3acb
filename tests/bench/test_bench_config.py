"""Tests the measurement command without TensorFlow: flags, order of points, and files."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.support.benches import Launched, bench
from tfmulti.bench import __main__ as command
from tfmulti.bench import flags
from tfmulti.bench.config import MatrixPoint, cores_of
from tfmulti.bench.matrix import Matrix, MeasurementError, MeasurementStopped
from tfmulti.config.troubleshooting import print_error
from tfmulti.errors import ConfigError


def test_all_replicas_get_the_same_number_of_cores() -> None:
    four = (0, 1, 2, 3)
    assert cores_of(MatrixPoint(1, 1), four, most=2) == ((0, 1),)
    assert cores_of(MatrixPoint(1, 2), four, most=2) == (four,)
    assert cores_of(MatrixPoint(2, 1), four, most=4) == ((0,), (1,))
    assert cores_of(MatrixPoint(1, 8), four, most=8) == (four,)
    assert cores_of(MatrixPoint(6, 1), four, most=6) == ((0,), (1,), (2,), (3,), (0,), (1,))


def test_strong_keeps_the_global_batch_and_weak_the_batch_of_a_replica() -> None:
    point = MatrixPoint(4, 1)
    assert (bench().global_batch_of(point), bench().slice_rows(point)) == (64, 16)
    weak = bench(weak=True)
    assert (weak.global_batch_of(point), weak.slice_rows(point)) == (256, 64)
    per = {"per_replica_batch_size": 8, "global_batch_size": None}
    weak = bench(weak=True, run=per)
    assert weak.run_of(point).global_batch_size == 32
    assert weak.run_of(point).strategy == "multi_worker_mirrored"
    assert weak.run_of(MatrixPoint(1, 4)).strategy == "mirrored"
    assert weak.run_of(MatrixPoint(1, 1)).strategy == "one_device"
    assert weak.run_of(point).dataset == "synthetic:shape=28x28x1,examples=128"
    with pytest.raises(ConfigError, match=r"--per_replica_batch_size 8 is valid only with --weak"):
        bench(run=per)


def test_each_point_is_measured_once() -> None:
    places = bench(replicas=(4, 1), workers=(2, 1)).points
    assert [point.name for point in places] == ["1 replica", "4 replicas", "2 workers"]
    assert [point.kind for point in places] == ["one", "replicas", "workers"]


MISTAKES = [
    (["--model", "resnet5"], "no model 'resnet5' for --model; did you mean 'resnet50'"),
    (["--replicas", "0"], "--replicas is '0', but it must be numbers from 1"),
    (["--replicas", "1,x"], "--replicas is '1,x', but it must be numbers from 1"),
    (["--workers", "2,-1"], "--workers is '2,-1', but it must be numbers from 1"),
    (["--workers", ""], "--workers is '', but it must be numbers from 1"),
    (["--steps", ""], "--steps is '', but it must be a whole number"),
    (["--test_split", "test"], "--test_split has no effect on a measurement"),
    (["--weak", "--strong"], "Give one of them"),
    (["--rounds", "0"], "--rounds is 0, but it must be at least 1"),
    (["--rounds", "many"], "--rounds is 'many', but it must be a whole number"),
    (["--steps", "0"], "--steps is 0, but it must be at least 1"),
    (["--output_dir", "used"], "--output_dir used exists and is not an empty folder"),
    (["--output_dir", "used/file/x"], "used/file is a file"),
    (["--epochs", "3"], "--epochs has no effect on a measurement. Leave it out"),
    (["--run_dir", "r"], "--run_dir has no effect"),
    (["--strategy", "mirrored"], "--strategy has no effect"),
    (["--replica", "2"], "no flag --replica; did you mean --replicas"),
    (["resnet20"], "the argument 'resnet20' belongs to no flag"),
    (["--per_replica_batch_size", "8"], "is valid only with --weak"),
    (["--global_batch_size", "3", "--replicas", "4"], "has fewer rows than 4 replicas"),
    (["--model", "my.place:build"], "--model my.place:build has no synthetic data"),
    (["--model", "cnn", "--dataset", "regression"], "takes image data"),
    (["--dataset", "digits", "--global_batch_size", "5000"], "larger than the training data"),
    (["--dataset", "digits", "--weak", "--workers", "1,64"], "larger than the training data"),
]


@pytest.mark.parametrize(("argv", "message"), MISTAKES, ids=[" ".join(m[0]) for m in MISTAKES])
def test_mistakes_get_one_line(
    argv: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "file").touch()
    # Another test may have imported it.
    before = "tensorflow" in sys.modules
    assert command.main(["bench", *argv]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert len(shown.err.splitlines()) == 1
    assert shown.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["used"]
    assert ("tensorflow" in sys.modules) == before


def test_more_than_the_gpus_is_refused() -> None:
    with pytest.raises(Exception, match="4 replicas need as many GPUs, but this machine has 2"):
        command.check(bench(replicas=(1, 4)), ("0", "1"))


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["bench", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"--{name}\n" in shown for name in ("workers", "weak", "rounds", "replicas"))
    assert "--model (text; since 0.1.0)\n" in shown
    assert not any(f"  --{name}" in shown for name in ("epochs", "run_dir", "log_throughput"))
    assert "default: synthetic" in shown
    # In a measurement the number of steps of an execution is not chosen automatically.
    assert "0.1 s" not in shown


def test_flags_become_the_configuration_of_the_measurement() -> None:
    now = datetime(2026, 5, 4, 3, 2, 1)
    argv = "bench --model resnet20 --replicas 2,1 --workers 2 --weak --rounds 5 --steps 7 --profile"
    config = flags.parse([*argv.split(), "--peak_tflops=2", "--precision=mixed_bfloat16"], "", now)
    assert config is not None
    assert [point.name for point in config.points] == ["1 replica", "2 replicas", "2 workers"]
    assert (config.weak, config.rounds, config.steps, config.profile) == (True, 5, 7, True)
    assert str(config.output_dir) == "bench/resnet20-20260504-030201"
    assert (config.run.peak_tflops, config.run.precision) == (2.0, "mixed_bfloat16")
    assert config.run_of(MatrixPoint(1, 2)).dataset == "synthetic:shape=32x32x3,examples=512"
    digits = flags.parse(["bench", "--model=cnn", "--dataset=digits", "--output_dir=o"], "", now)
    assert digits is not None
    assert (
        digits.batch,
        digits.weak,
        digits.rounds,
        digits.steps,
    ) == (64, False, 3, None)
    assert digits.run_of(MatrixPoint(1, 1)).dataset == "digits"
    assert str(digits.output_dir) == "o"


def test_rounds_alternate_the_order_and_give_each_process_its_part(tmp_path: Path) -> None:
    config = bench(
        replicas=(1, 2), workers=(2,), rounds=2, profile=True, output_dir=tmp_path / "o", steps=7
    )
    launched = Launched(config)
    said: list[str] = []
    matrix = Matrix(config, (4, 5, 6, 7), (), {}, lambda label, text: said.append(text), launched)
    matrix.measure()
    places = [
        (request.run.strategy, per)
        for request, per in zip(launched.requests, launched.workers, strict=True)
    ]
    strategies = [("one_device", "1"), ("mirrored", "1"), ("multi_worker_mirrored", "2")]
    assert places == strategies + strategies[::-1]
    first, second, third = launched.requests[:3]
    assert first.cores == ((4, 5),)
    assert second.cores == ((4, 5, 6, 7),)
    assert third.cores == ((4, 5), (6, 7))
    # One device gets all rows if replicas share the cores, or the rows of a worker on its cores.
    assert [request.rows_alone for request in launched.requests[:3]] == [None, 64, 32]
    assert [bool(request.profile) for request in launched.requests] == [True] * 3 + [False] * 3
    assert {request.steps for request in launched.requests} == {7}
    assert len(said) == 6
    assert all(len(rounds) == 2 for rounds in matrix.measurements.values())


def test_gpus_are_divided_among_processes(tmp_path: Path) -> None:
    config = bench(replicas=(1, 2), workers=(2,), rounds=1, output_dir=tmp_path / "o")
    launched = Launched(config)
    Matrix(config, (0, 1), ("3", "5", "7"), {}, lambda *_: None, launched).measure()
    assert [env["CUDA_VISIBLE_DEVICES"] for env in launched.envs] == ["3", "3,5", "3,5"]
    assert [request.rows_alone for request in launched.requests] == [None, 32, 32]


@pytest.mark.parametrize(
    ("code", "message"), [(3, "the measurement of 1 replica failed"), (130, "stopped before all")]
)
def test_a_process_that_fails_ends_the_command(code: int, message: str, tmp_path: Path) -> None:
    config = bench(output_dir=tmp_path / "o")
    launched = Launched(config, code)
    with pytest.raises(MeasurementError, match=message) as raised:
        Matrix(config, (0,), (), {}, lambda *_: None, launched).measure()
    assert raised.value.exit_code == code
    assert len(launched.requests) == 1
    # The logs of a process that failed stay. A command that was stopped leaves nothing.
    assert (tmp_path / "o" / "logs").exists() == (code == 3)
    assert (tmp_path / "o").exists() == (code == 3)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_between_two_points_leaves_no_files(
    number: signal.Signals, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = bench(replicas=(1, 2), output_dir=tmp_path / "o")
    launched = Launched(config)

    def say(*words: str) -> None:
        assert (tmp_path / "o" / "logs").exists()
        signal.raise_signal(number)

    # Shells start programs in the background with SIGINT ignored.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with pytest.raises(MeasurementStopped) as raised:
            Matrix(config, (0,), (), {}, say, launched).measure()
    finally:
        signal.signal(number, before)
    assert raised.value.exit_code == 128 + number
    assert len(launched.requests) == 1
    assert not (tmp_path / "o").exists()
    print_error(raised.value)
    line = "tfmulti: stopped before all was measured, so no file was kept.\n"
    assert capsys.readouterr().err == line


def test_the_command_writes_its_results(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = bench(workers=(1, 2), output_dir=tmp_path / "o", rounds=1)
    monkeypatch.setattr("os.getloadavg", lambda: (64.0, 0.0, 0.0))
    said: list[str] = []
    command.measure(config, (), lambda *texts: said.append(" ".join(texts)), Launched(config))
    report = json.loads((tmp_path / "o" / "bench.json").read_text())
    assert [point["place"] for point in report["places"]] == ["1 replica", "2 workers"]
    for point in report["places"]:
        assert sum(point["parts_ms"].values()) == pytest.approx(point["step_ms"])
    assert report["machine"]["load_before"] == 64
    assert "measure again when it is idle" in report["limits"][-1]
    assert report["cost_model"]["latency_us"] == pytest.approx(100)
    assert len(report["predicted_not_measured"]) == 7
    assert (tmp_path / "o" / "bench.png").read_bytes().startswith(b"\x89PNG")
    table = capsys.readouterr().out
    assert "2 workers" in table
    [bound] = [n for n, line in enumerate(said) if line.startswith("limit 2 workers: communicat")]
    assert said[bound].endswith(" of the step is communication")
    assert said[bound + 1].startswith(" mostly ")
    assert any("predicted (not measured): 64 workers" in line for line in said)

    # The import then fails as if matplotlib were not installed.
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    without = bench(output_dir=tmp_path / "p", rounds=1)
    said.clear()
    command.measure(without, (), lambda *texts: said.append(" ".join(texts)), Launched(without))
    assert any("no bench.png: matplotlib is not installed" in line for line in said)
    assert any("no prediction: it takes --workers 2 or more" in line for line in said)
    assert (tmp_path / "p" / "bench.json").is_file()
    assert not (tmp_path / "p" / "bench.png").exists()


def test_a_full_disk_is_reported_in_a_line_after_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(command, "write_text", full)
    config = bench(output_dir=tmp_path / "o", rounds=1)
    with pytest.raises(MeasurementError, match=r"printed above: No space left .*Make room") as told:
        command.measure(config, (), lambda *_: None, Launched(config))
    assert told.value.exit_code == 1
    assert "1 replica" in capsys.readouterr().out


def test_more_replicas_than_cores_are_reported(tmp_path: Path) -> None:
    said: list[str] = []
    config = bench(replicas=(1, 8), output_dir=tmp_path / "o")
    for load in (0.0, 3.0):
        command.describe(config, (), (0, 1), load, lambda *texts: said.append(" ".join(texts)))
    assert sum("8 replicas share 2 cores" in line for line in said) == 2
    assert (
        sum("other programs use this machine (load 3.0 on 2 cores)" in line for line in said) == 1
    )
    said.clear()
    command.describe(config, ("0",) * 8, (0, 1), 0.0, lambda *texts: said.append(" ".join(texts)))
    assert not any("share" in line for line in said)

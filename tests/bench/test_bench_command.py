"""Tests `python -m tfmulti.bench` as a user runs it, with real processes."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.processes import Finished, run
from tfmulti.distribution.collectives import SEND

pytestmark = pytest.mark.processes

LIMIT_S = 180
SIZES = (4_096, 65_536, 524_288, 2_097_152, 8_388_608)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Finished, dict[str, Any]]:
    """Measures a tiny model once, at one replica, two replicas and two workers."""
    folder = tmp_path_factory.mktemp("bench")
    argv = ["--model", "linear", "--replicas", "1,2", "--workers", "1,2", "--rounds", "1"]
    argv += ["--steps", "6", "--steps_per_execution", "2", "--global_batch_size", "32"]
    done = run(
        ["-m", "tfmulti.bench", *argv, "--profile", "--output_dir", "o"],
        folder / "logs",
        limit_s=LIMIT_S,
        cwd=folder,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return folder / "o", done, json.loads((folder / "o" / "bench.json").read_text())


Measured = tuple[Path, Finished, dict[str, Any]]


def test_the_parts_of_each_point_add_up(measured: Measured) -> None:
    _, _, report = measured
    assert [p["place"] for p in report["places"]] == ["1 replica", "2 replicas", "2 workers"]
    for point in report["places"]:
        parts = point["parts_ms"]
        assert sum(parts.values()) == pytest.approx(point["step_ms"])
        assert all(value >= 0 for value in parts.values())
        assert parts["compute"] > 0
        assert parts["host"] > 0
        assert point["measured_steps"] == 6
        assert point["global_batch_size"] == 32
        speed = point["examples_per_sec"]
        assert speed == pytest.approx(32_000 / point["step_ms"])
        assert point["rounds_step_ms"] == [point["step_ms"]]
    one, *several = report["places"]
    assert one["parts_ms"]["communication"] == 0
    assert one["efficiency"] == 1
    for point in several:
        rate = point["examples_per_sec"] / one["examples_per_sec"] / 2
        assert point["efficiency"] == pytest.approx(rate)


def test_measured_quantities_match_the_model(measured: Measured) -> None:
    _, _, report = measured
    assert report["parameters"] == 28 * 28 * 10 + 10
    # The bytes include those of metrics and votes.
    assert 0 <= report["gradient_bytes"] - 4 * report["parameters"] < 1000
    assert report["flops_per_example"] >= 3 * 2 * 28 * 28 * 10
    for kind in ("replicas", "workers"):
        points = report["all_reduces"][kind]
        assert [(p["replicas"], p["bytes"]) for p in points] == [(2, size) for size in SIZES]
        assert points[0]["ms"] > 0
        # The last all-reduce has 2048 times the bytes of the first. On a busy machine the latency
        # of the first one may be long, too.
        assert points[-1]["ms"] > points[0]["ms"]
    assert report["cost_model"]["latency_us"] >= 0
    # Workers on CPUs send to each other directly, so the cost of a message is known.
    assert 0 <= report["cost_model"]["message_us"] < 1e6
    assert [p["workers"] for p in report["predicted_not_measured"]] == [1, 2, 4, 8, 16, 32]
    assert len(report["limits"]) >= 2


def test_the_report_is_printed_and_drawn(measured: Measured) -> None:
    folder, done, _ = measured
    for text in (
        "round 1/1  2 workers: ",
        "communication",
        "predicted (not measured): 32 workers",
    ):
        assert text in done.stdout
    assert (folder / "bench.png").read_bytes().startswith(b"\x89PNG")


def test_tensorboard_shows_the_picture(measured: Measured) -> None:
    folder, _, _ = measured
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    [shown] = events.Images("scaling")
    assert shown.encoded_image_string == (folder / "bench.png").read_bytes()
    with Image.open(folder / "bench.png") as picture:
        assert (shown.width, shown.height) == picture.size


def test_profile_writes_a_trace_of_each_point(measured: Measured) -> None:
    folder, _, _ = measured
    for point in ("1_replica", "2_replicas", "2_workers"):
        # Only the chief writes a trace.
        (trace,) = (folder / "profile" / point).rglob("*.xplane.pb")
        assert b"MatMul" in trace.read_bytes()
        assert (SEND.encode() in trace.read_bytes()) == (point == "2_workers")


EMBEDDING = """
import keras
import numpy as np

def build():
    layers = keras.layers
    stack = [layers.Embedding(10_000, 8), layers.GlobalAveragePooling1D(), layers.Dense(10)]
    return keras.Sequential([keras.Input((4,), dtype="int32"), *stack])

def data():
    return np.zeros((2000, 4), np.int32), np.zeros(2000, np.int32)
"""


@pytest.mark.parametrize(
    ("argv", "travels", "rows"),
    [
        # 16 rows send 4 values of 8 floats with their indices, and a Dense(10) sends all values.
        ([], 16 * 4 * (8 * 4 + 4) + 4 * 90, 4 * (8 * 4 + 4)),
    ],
)
def test_bytes_between_workers_are_counted(
    argv: list[str], travels: float, rows: float, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(EMBEDDING)
    argv = ["--model", "mine:build", "--dataset", "mine:data", "--workers", "2", *argv]
    argv += ["--rounds", "1", "--steps", "6", "--global_batch_size", "32", "--output_dir", "o"]
    env = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).resolve().parents[2]}"}
    done = run(
        ["-m", "tfmulti.bench", *argv], tmp_path / "logs", limit_s=LIMIT_S, cwd=tmp_path, env=env
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    report = json.loads((tmp_path / "o" / "bench.json").read_text())
    assert 0 <= report["gradient_bytes"] - travels < 1000
    assert report["cost_model"]["row_bytes_an_example"] == rows


def test_a_model_that_fails_is_the_cause(tmp_path: Path) -> None:
    code = """
    def build():
        raise RuntimeError("no such luck")
    """
    (tmp_path / "mine.py").write_text(textwrap.dedent(code))
    argv = ["-m", "tfmulti.bench", "--model", "mine:build", "--output_dir", "o"]
    argv += ["--dataset", "synthetic:shape=4x4x1", "--rounds", "1", "--steps", "2"]
    env = {"PYTHONPATH": f"{tmp_path}:{Path(__file__).resolve().parents[2]}"}
    done = run(argv, tmp_path / "logs", limit_s=LIMIT_S, cwd=tmp_path, env=env)
    assert done.returncode in (1, 2)
    assert "no such luck" in done.stderr
    assert "tfmulti: the measurement of 1 replica failed; its processes' output is in o/logs" in (
        done.stderr
    )
    assert not (tmp_path / "o" / "bench.json").exists()

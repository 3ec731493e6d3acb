"""Tests `python -m benchmarks.compare` and the programs that it compares."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import keras
import pytest

from benchmarks import result_files
from benchmarks.compare import SIDES
from benchmarks.workloads import WORKLOADS, keras_model
from tests.support.processes import run

pytestmark = pytest.mark.processes

KINDS = ("workers", "mirrored")


def test_all_installed_frameworks_are_measured(tmp_path: Path) -> None:
    before = result_files.read("compare")
    argv = ["--rounds", "1", "--workloads", "mlp", "--kinds", ",".join(KINDS), "--dry"]
    done = run(["-m", "benchmarks.compare", *argv], tmp_path, limit_s=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    left_out = re.findall(r"^left out: (.*) \(", done.stdout, re.M)
    found = {}
    for line in done.stdout.splitlines():
        if match := re.match(r"0 mlp +(\w+) +(.*?) +(\{.*\})$", line):
            found[match[1], match[2]] = json.loads(match[3].replace("'", '"'))
    for side, way in SIDES.items():
        assert (side in left_out) == bool(way.needs and not importlib.util.find_spec(way.needs))
        for kind in KINDS:
            ran = way.runs("mlp", kind) and side not in left_out
            assert ((kind, side) in found) == ran, (kind, side)
    for figures in found.values():
        assert 0 < figures["step_ms"] < 1000
        assert 1 < figures["start_s"] < 200
        assert 0 <= figures["after_s"] < 100
    # With `--dry` nothing is written.
    assert result_files.read("compare") == before


PARAMETERS = {"mlp": 1_863_690, "cnn": 225_034, "resnet20": 272_474, "transformer": 3_369_986}


@pytest.mark.parametrize("name", WORKLOADS)
def test_networks_have_the_same_parameters_in_all_frameworks(name: str) -> None:
    """The parameters are counted by hand, layer by layer."""
    ours = keras_model(name, keras)
    assert sum(weight.numpy().size for weight in ours.trainable_weights) == PARAMETERS[name]


@pytest.mark.parametrize("name", WORKLOADS)
def test_pytorchs_networks_have_the_same_parameters(name: str) -> None:
    pytest.importorskip("torch", reason="torch is in the extra `benchmarks`")
    from benchmarks.peers.training_torch import model_of

    assert sum(p.numel() for p in model_of(name).parameters()) == PARAMETERS[name]

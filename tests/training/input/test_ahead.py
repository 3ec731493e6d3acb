"""Tests the transfer of batches to the replicas' devices one step ahead, without a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.forked import run
from tests.support.processes import ONE_THREAD

pytestmark = pytest.mark.mirrored


def test_a_batch_ahead_changes_no_number(tmp_path: Path) -> None:
    done = run(["-m", "tests.support.ahead"], tmp_path, limit_s=120, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr[-6000:]
    (plain, traces), (ahead, traces_ahead) = json.loads(done.stdout.splitlines()[-1])[0]
    assert ahead == plain
    # The smaller last batch needs no trace of its own.
    assert traces_ahead == traces
    placed = json.loads(done.stdout.splitlines()[-1])[1]
    assert placed
    assert all(device.endswith(f"CPU:{i}") for p in placed for i, device in enumerate(p))

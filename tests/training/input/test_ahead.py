"""Tests what tfmulti does on GPUs alone, on CPU devices that are treated as GPUs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked import run
from tests.support.processes import ONE_THREAD

pytestmark = pytest.mark.mirrored


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns what `tests.support.ahead` prints."""
    folder: Path = tmp_path_factory.mktemp("ahead")
    done = run(["-m", "tests.support.ahead"], folder, limit_s=120, env=ONE_THREAD)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_batch_ahead_changes_no_number(printed: Any) -> None:
    (plain, traces), (ahead, traces_ahead) = printed[0]
    assert ahead == plain
    # The smaller last batch needs no trace of its own.
    assert traces_ahead == traces
    placed = printed[1]
    assert placed
    assert all(device.endswith(f"CPU:{i}") for p in placed for i, device in enumerate(p))


def test_a_step_with_sparse_inputs_is_not_compiled_unless_asked(printed: Any) -> None:
    first, second = printed[2]
    assert second < first

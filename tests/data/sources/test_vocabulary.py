"""Tests that all workers use the chief's vocabulary, even if their own texts differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.forked import run_workers
from tests.support.processes import ONE_THREAD

pytestmark = pytest.mark.multiworker


@pytest.mark.parametrize("workers", [2, 3])
def test_all_workers_have_the_chiefs_vocabulary(tmp_path: Path, workers: int) -> None:
    argv = ["-m", "tests.support.vocabularies", str(tmp_path / "out_RANK.json")]
    run_workers(argv, workers, tmp_path / "logs", limit_s=120, env=ONE_THREAD)
    for rank in range(workers):
        vocabulary, size, tokens, said = json.loads((tmp_path / f"out_{rank}.json").read_text())
        assert (vocabulary, size) == (["ünter", "chiefs"], 4)
        assert tokens == ([1, 3, 2, 1, 0] if rank else [2, 3, 2, 0, 0])
        assert "texts_0: the training texts hold no words" in said

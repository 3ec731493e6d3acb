"""Runs of three workers, of the behaviours that differ from those of two."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.processes import ONE_THREAD, run_workers

LIMIT_S = 300
OF_THREE = [
    "sums_in_half_the_bytes",
    "gradients_in_half_the_bytes",
    "apart: momentum and a regularizer",
    "apart: batch statistics",
    "apart: no rows for some",
    "meeting_after_each_step",
    "collectives_of_local_steps",
    "stopped_apart",
    "slots_of_other_workers",
]


@pytest.fixture(scope="session")
def workers(
    behaviours: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], list[dict[str, Any]]]:
    """Gives `workers(count)`: what the behaviours returned on each of two or three workers."""

    @functools.cache
    def behaved(count: int) -> list[dict[str, Any]]:
        if count == 2:
            found: list[dict[str, Any]] = behaviours("multi_worker_mirrored", 2)
            return found
        folder = tmp_path_factory.mktemp("three")
        argv = ["-m", "tests.support.behaviours", str(folder / "out_RANK.json")]
        argv += ["multi_worker_mirrored", "", *OF_THREE]
        run_workers(argv, count, folder / "logs", limit_s=LIMIT_S, env=ONE_THREAD)
        return [json.loads(file.read_text()) for file in sorted(folder.glob("out_*.json"))]

    return behaved

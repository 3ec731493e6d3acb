"""Tests how the measurements of faults wait for their job."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.jobs import Job


def test_a_job_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    job = Job([sys.executable, "-c", "raise SystemExit('no free port')"], tmp_path)
    with pytest.raises(RuntimeError, match="the job has ended with 1:\nno free port"):
        job.says("never")
    job = Job([sys.executable, "-c", "print('ready')"], tmp_path)
    job.process.wait(60)
    job.says("ready")

"""Tests how often workers are started again after an error that comes again."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from tests.support.launching import launch

pytestmark = pytest.mark.processes

SCRIPT = """
from tfmulti.errors import VerificationError

raise VerificationError("step 1 gives other numbers than on one device.")
"""
FIT = """
import sys
import tfmulti.fit
from tfmulti.errors import VerificationError
from tfmulti.run import train

def fails(job):
    raise VerificationError("step 1 gives other numbers than on one device.")

train.run = fails
sys.exit(tfmulti.fit.main(["tfmulti.fit", "--epochs", "1", "--run_dir", sys.argv[1]]))
"""


@pytest.mark.parametrize("program", [SCRIPT, FIT], ids=["script", "tfmulti.fit"])
def test_other_numbers_than_on_one_device_end_the_job(program: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(program)
    done = launch(tmp_path, str(tmp_path / "train.py"), str(tmp_path / "run"))
    assert done.returncode == 1, done.stderr
    assert "starting all workers again" not in done.stderr
    assert "worker 0 exited with 1 (VerificationError: step 1 gives other" in done.stderr
    assert "ending with exit code 1: a restart cannot help" in done.stderr


def test_a_job_with_a_fixed_number_of_workers_has_no_more_restarts_than_it_may(
    tmp_path: Path,
) -> None:
    """A worker that fails twice is left out of other jobs, which does not count as a restart."""
    (tmp_path / "train.py").write_text("raise ValueError('a mistake')\n")
    flags = ["--nproc-per-node", "2", "--max-restarts", "3"]
    done = launch(tmp_path, *flags, str(tmp_path / "train.py"))
    assert done.returncode == 1
    left = re.findall(r"\((\d) more without progress\)", done.stderr)
    assert left == ["2", "1", "0"], done.stderr


def test_a_mistake_is_shown_once_and_no_worker_starts_again(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "from tfmulti.errors import ConfigError\nraise ConfigError('--epochs is 0')\n"
    )
    done = launch(tmp_path, "--nproc-per-node", "2", str(tmp_path / "train.py"))
    assert done.returncode == 2
    told, *lines = done.stderr.splitlines()
    assert re.fullmatch(r"\[worker [01]\] tfmulti: --epochs is 0 \(docs: .*\)", told)
    assert re.fullmatch(r"\[launch\] worker [01] exited with 2", lines[0])
    assert lines[1:] == [
        f"[launch] it ran on {os.uname().nodename}",
        f"[launch] all output: {tmp_path / 'logs' / 'attempt_0'}",
        "[launch] ending with exit code 2: a user's mistake is not retried",
    ]

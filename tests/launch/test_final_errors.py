"""Tests that workers are not started again after an error that would only come again."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import run

pytestmark = pytest.mark.processes

LIMIT_S = 120
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
    argv = ["-m", "tfmulti.launch", "--log-dir", str(tmp_path / "logs")]
    argv += [str(tmp_path / "train.py"), str(tmp_path / "run")]
    done = run(argv, tmp_path / "launcher", limit_s=LIMIT_S)
    assert done.returncode == 1, done.stderr
    assert "starting all workers again" not in done.stderr
    assert "worker 0 exited with 1 (VerificationError: step 1 gives other" in done.stderr
    assert "ending with exit code 1: a restart cannot help" in done.stderr

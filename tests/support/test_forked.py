"""Tests that a forked process runs a program as a new process does."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support import forked, processes

pytestmark = pytest.mark.processes

STATE = """
import json, os, sys
import __main__
print(json.dumps([
    __name__, __main__.__dict__ is globals(), sys.argv, sys.path, os.getcwd(), sorted(os.environ),
    os.getpid() == os.getsid(0), os.path.realpath("/proc/self/fd/0"), sys.stdout.write_through,
    [name for name in sys.modules if name.startswith("tfmulti")],
]))
raise SystemExit(7)
"""


@pytest.mark.parametrize("kind", ["-c", "-m", "file"])
def test_a_forked_process_has_the_state_of_a_new_one(tmp_path: Path, kind: str) -> None:
    (tmp_path / "state.py").write_text(STATE)
    argv = {"-c": ["-c", STATE], "-m": ["-m", "state"], "file": ["state.py"]}[kind]
    found = []
    for module in (forked, processes):
        done = module.run([*argv, "a", "-b"], tmp_path, limit_s=120, cwd=tmp_path)
        assert done.returncode == 7, done.stderr
        found.append(json.loads(done.stdout))
    assert found[0] == found[1]


def test_forked_processes_draw_different_numbers_and_leave_no_file_open(tmp_path: Path) -> None:
    code = "import os, random, numpy as np; print(random.random(), np.random.rand())\n"
    code += "print(len(os.listdir('/proc/self/fd')))"
    draws, files = zip(
        *(forked.run(["-c", code], tmp_path, limit_s=120).stdout.splitlines() for _ in range(2)),
        strict=True,
    )
    assert len({number for line in draws for number in line.split()}) == 4
    # The listing itself opens the directory.
    assert files == ("4", "4")


def test_a_forked_process_is_ended_and_waited_for(tmp_path: Path) -> None:
    with processes.processes(tmp_path, forked.Forks) as group:
        process = group.start(["-c", "print('begun', flush=True); import time; time.sleep(60)"])
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == process.poll() == -signal.SIGTERM
        left = group.start(["-c", "import time; time.sleep(60)"])
    assert left.returncode == -signal.SIGKILL
    assert not processes.is_alive(left.pid)


@pytest.mark.parametrize("name", ["PYTHONPATH", "TF_ENABLE_ONEDNN_OPTS", "KERAS_HOME", "HOME"])
def test_variables_of_imports_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(AssertionError, match=f"has imported already: {{'{name}'}}"):
        forked.run(["-c", ""], tmp_path, limit_s=60, env={name: os.fspath(tmp_path)})

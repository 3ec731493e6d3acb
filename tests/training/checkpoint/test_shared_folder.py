"""Tests that a job ends before training if a worker does not see the chief's checkpoint folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.support.processes import Finished, processes, tf_config
from tfmulti.launch.addresses import reserved

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(os.geteuid() != 0, reason="a disk of its own for a worker needs root"),
]

LIMIT_S = 150
# Normally a worker waits long enough for a slow NFS client. Here it waits for a second.
FIT = """
import runpy, sys
from tfmulti.training.checkpoint import owner
owner.SEEN_S = 1.0
runpy.run_module("tfmulti.fit", run_name="__main__")
"""


def fit_with_two_disks(folder: Path, *flags: str) -> list[Finished]:
    """Runs two workers, of which the second sees an empty disk in place of the run directory."""
    disk = folder / "runs"
    disk.mkdir()
    own_disk = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs tmpfs {disk} && exec "$@"', "-"]
    argv = ["-c", FIT, "--epochs", "1", "--run_dir", str(disk / "a"), *flags]
    with reserved(2) as addresses, processes(folder / "logs") as group:
        group.start(argv, {"TF_CONFIG": tf_config(addresses, 0)})
        group.start(argv, {"TF_CONFIG": tf_config(addresses, 1)}, before=own_disk)
        return group.wait(LIMIT_S)


def test_all_workers_refuse_a_folder_that_one_cannot_see(tmp_path: Path) -> None:
    for done in fit_with_two_disks(tmp_path):
        assert done.returncode == 2, done.stderr
        assert done.lines()[-1].startswith(
            "tfmulti: worker 1 cannot see worker 0's folder of checkpoints "
            f"({tmp_path}/runs/a/checkpoints). Give a folder that all machines share"
        )
    assert not list((tmp_path / "runs").iterdir())


def test_a_folder_of_worker_0_alone_is_allowed_on_request(tmp_path: Path) -> None:
    for done in fit_with_two_disks(tmp_path, "--shared_run_dir=false"):
        assert done.returncode == 0, done.stderr
    assert (tmp_path / "runs/a/report.json").exists()

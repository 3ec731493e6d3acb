from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import slurm as support


@pytest.fixture(autouse=True)
def folder_of_open_mpi(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Gives Open MPI 4.1 a folder of its own in each test.

    All its jobs of a user share /tmp/ompi.HOST.UID. Whichever ends last removes it, and a job that
    starts in the same moment fails ("A call to mkdir was unable to create the desired directory").
    """
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("OMPI_MCA_orte_tmpdir_base", folder)
        yield


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[support.Slurm]:
    """Gives a Slurm of two nodes on this machine."""
    reason = support.why_not()
    if reason is not None:
        pytest.skip(reason)
    folder: Path = tmp_path_factory.mktemp("slurm")
    with support.started(folder) as made:
        yield made

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import slurm as support


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[support.Slurm]:
    """Gives a Slurm of two nodes on this machine."""
    reason = support.why_not()
    if reason is not None:
        pytest.skip(reason)
    folder: Path = tmp_path_factory.mktemp("slurm")
    with support.started(folder) as made:
        yield made

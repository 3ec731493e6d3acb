"""The run of two workers to which the others are compared."""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.launching import launched, left_in


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Returns what a run without any fault leaves."""
    folder = tmp_path_factory.mktemp("whole")
    done = launched(folder)
    assert done.returncode == 0, done.stderr
    return left_in(folder)

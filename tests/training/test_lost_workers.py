"""A worker that waits for a lost worker ends with an error, also without a launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.forked import Forks
from tests.support.processes import ONE_THREAD, processes, tf_config
from tfmulti.launch.addresses import reserved
from tfmulti.launch.policy import LOST_A_WORKER

pytestmark = pytest.mark.multiworker

LIMIT_S = 120


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("kill", "UnavailableError worker 1 is lost: "),
        ("error", "UnavailableError worker 1 is lost: "),
        ("step", "UnavailableError worker 1 is lost: "),
        ("fit", "UnavailableError worker 1 is lost: "),
        ("evaluate", "UnavailableError worker 1 is lost: "),
        ("predict", "UnavailableError worker 1 is lost: "),
        ("verify", "UnavailableError worker 1 is lost: "),
        ("train_on_batch", "UnavailableError worker 1 is lost: "),
        ("stop", ""),  # TensorFlow's own message
    ],
)
def test_it_raises_that_a_worker_is_lost(tmp_path: Path, how: str, message: str) -> None:
    """The type of the error shows the launcher that another worker has failed first."""
    with reserved(2) as addresses, processes(tmp_path, Forks) as group:
        survivor, _ = (
            group.start(
                ["-m", "tests.support.losing", how],
                {**ONE_THREAD, "TF_CONFIG": tf_config(addresses, index)},
            )
            for index in range(2)
        )
        assert survivor.wait(LIMIT_S) == 3, group.logs()
        output = group.output(0)
        assert output.startswith(message), group.logs()
        if how in ("fit", "evaluate", "predict", "verify", "train_on_batch"):
            assert f"call {how}() on all workers alike, not only on the chief" in output
        assert output.split()[0] in LOST_A_WORKER, group.logs()

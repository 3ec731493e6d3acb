"""Tests that a closed prefetcher ends its threads at once and reads nothing more."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.support.processes import run
from tests.support.sources import Gated
from tfmulti.config.reading import ReadOptions
from tfmulti.data.batch_plan import BatchPlan
from tfmulti.data.loader import Loader
from tfmulti.distribution.strategies import Placement
from tfmulti.training.input.prefetcher import prefetcher_of

pytestmark = pytest.mark.mirrored


@pytest.mark.parametrize("threads", [0, 1, 2])
def test_a_closed_stream_reads_no_more(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reads that are in progress when it is closed end by themselves, and no other read begins."""
    source, stop = Gated(64), Loader.stop

    def stopping(reader: Loader) -> None:
        stop(reader)
        source.go.set()

    monkeypatch.setattr(Loader, "stop", stopping)
    before = set(threading.enumerate())
    stream = prefetcher_of(source, BatchPlan(64, 16), Placement(0, 2, 2), 0, ReadOptions(threads))
    in_work = max(threads, 1)
    source.wait_for(in_work)
    stream.close()
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("tfmulti")]
    assert len(source.calls) == in_work
    assert stream.error is None


FITS = """
import keras, numpy as np
from tfmulti import prepare
model = prepare(keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)]))
model.compile("sgd", "mse")
x = np.zeros((640, 4), np.float32)
model.fit(x, x[:, :1], batch_size=8, verbose=0)
"""


def test_the_end_of_a_fit_logs_no_cancelled_operation(tmp_path: Path) -> None:
    done = run(["-c", FITS], tmp_path, limit_s=120, env={"TF_CPP_MIN_LOG_LEVEL": "0"})
    assert done.returncode == 0
    # TensorFlow logs messages, so a missing message means that nothing was cancelled.
    assert "oneDNN" in done.stderr or "TensorFlow" in done.stderr
    assert "cancelled" not in done.stderr

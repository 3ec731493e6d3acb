"""What `tfmulti.data` says of data that comes in batches of its own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.data.sources.test_tfrecord_values import compressed
from tfmulti.config.fit_config import FitConfig
from tfmulti.errors import DataError
from tfmulti.run import inspection, validation
from tfmulti.run.data_speed import StopsAfter

pytestmark = pytest.mark.mirrored

MINE = """
import keras
import numpy as np
import tensorflow as tf

X, Y = np.zeros((8, 3), "float32"), np.zeros(8, "int32")


class Own(keras.utils.PyDataset):
    def __len__(self):
        return 2

    def __getitem__(self, index):
        return X[:4], Y[:4]


def dataset():
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(4).map(lambda x, y: (x, y))


def own():
    return Own()


def build():
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
"""


def said_of(config: FitConfig, capsys: pytest.CaptureFixture[str]) -> list[str]:
    inspection.show(validation.check(config, env={}), 1, "", measure=False)
    return capsys.readouterr().out.splitlines()


def test_a_stream_is_called_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = f"tfrecord:{compressed(tmp_path)}"
    config = FitConfig(dataset=dataset, global_batch_size=8, strategy="one_device", dry_run=True)
    _, train, batch = said_of(config, capsys)
    words = "a stream of GZIP files: batches of its own, which every worker reads"
    assert train == f"train      {words}"
    assert batch.startswith("batch      (TensorSpec(shape=(None, 8, 8, 3)")


def test_a_bad_record_behind_the_first_batch(tmp_path: Path) -> None:
    """Found while the data is measured it is an error in one line, as in training."""
    for label in "ab":
        (tmp_path / label).mkdir()
        for i in range(4):
            (tmp_path / label / f"{i}.txt").write_text(f"{label} {i}")
    (tmp_path / "b" / "3.txt").write_bytes(b"\xff")
    config = FitConfig(
        dataset=f"text:{tmp_path},tokens=4",
        global_batch_size=1,
        validation_fraction=0.0,
        strategy="one_device",
    )
    with pytest.raises(DataError, match=r"3\.txt: it is not UTF-8 text \(byte 0\)\. Repair"):
        inspection.show(validation.check(config, env={}), 1, "", measure=True)


@pytest.mark.parametrize(
    ("function", "kind"), [("dataset", "a tf.data.Dataset"), ("own", "a PyDataset (Own)")]
)
def test_batches_of_a_users_own(
    function: str,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "inspected.py").write_text(MINE)
    monkeypatch.syspath_prepend(tmp_path)
    config = FitConfig(
        dataset=f"inspected:{function}",
        model="inspected:build",
        global_batch_size=4,
        strategy="one_device",
        dry_run=True,
    )
    said = said_of(config, capsys)
    assert said[0] == f"train      {kind}: batches of its own, which every worker reads"
    assert said[-1] == "plan       2 steps an epoch"


def test_speed_is_measured_after_the_first_execution() -> None:
    """The callback is called with the last step of an execution, which is not 0 for several."""
    times = iter([100.0, 101.0, 103.0])
    stops = StopsAfter(2.0, clock=lambda: next(times))
    stops.set_model(SimpleNamespace(stop_training=False))
    found = []
    for last in (3, 7, 11):
        stops.on_train_batch_end(last)
        found.append(stops.model.stop_training)
    assert found == [False, False, True]

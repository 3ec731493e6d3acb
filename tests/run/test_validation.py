"""Tests the checks before TensorFlow starts, except for mistakes of the command line."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tfmulti.cluster import gpus
from tfmulti.cluster.gpus import visible_gpus
from tfmulti.config import registry
from tfmulti.config.fit_config import FitConfig
from tfmulti.data.data_set import DataSet
from tfmulti.errors import ConfigError, DeviceError, ModelError
from tfmulti.run import validation


def devices(folder: Path, count: int) -> Path:
    for name in [*(f"nvidia{i}" for i in range(count)), "nvidiactl", "nvidia-uvm", "null"]:
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("listed", "seen"), [(None, 4), ("", 0), ("-1", 0), ("1,3", 2), ("0,1,2,3,4,5", 4)]
)
def test_visible_gpus(tmp_path: Path, listed: str | None, seen: int) -> None:
    env = {} if listed is None else {"CUDA_VISIBLE_DEVICES": listed}
    assert len(visible_gpus(env, devices(tmp_path, 4))) == seen


def test_gpus_are_named_as_the_list_names_them(tmp_path: Path) -> None:
    folder = devices(tmp_path, 2)
    assert visible_gpus({}, folder) == ("0", "1")
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "GPU-a, 1"}, folder) == ("GPU-a", "1")


def test_more_replicas_than_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "visible_gpus", lambda env: ("0", "1"))
    with pytest.raises(DeviceError, match="replicas is 3, but this machine has 2 visible GPUs"):
        validation.check(FitConfig(replicas=3), env={})


def test_a_job_is_resolved_and_has_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = validation.check(FitConfig(), env={})
    assert job.data is not None
    assert (job.config.model, job.config.global_batch_size, len(job.data.train)) == (
        "cnn",
        64,
        1197,
    )
    assert list(tmp_path.iterdir()) == []


def test_statistics_of_the_training_rows_are_computed_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{i},{'ab'[i % 2]}\n" for i in range(50))
    (tmp_path / "t.csv").write_text(f"n,y\n{rows}")
    job = validation.check(FitConfig(dataset="csv:t.csv,target=y"), env={})
    assert job.data is not None
    assert job.data.spec is not None
    assert (len(job.data.train), job.config.model, job.config.global_batch_size) == (45, "mlp", 32)
    mean = float(job.data.train.data[0].astype(float).mean())
    assert job.data.spec.input_mean == (pytest.approx(mean, rel=1e-12),)


def test_a_built_in_model_needs_plain_arrays() -> None:
    with pytest.raises(ModelError, match="gives no plain arrays"):
        validation.check_model_takes(FitConfig(model="cnn"), DataSet(object(), spec=None))


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "userside.py").write_text(
        textwrap.dedent("""
        value = 3
        def load(): return 1
    """)
    )
    (tmp_path / "broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("user_module")
@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("userside:laod", "no function 'laod' .*did you mean 'load'"),
        ("userside:value", "'value' is a int, not a function"),
        ("broken:load", "importing 'broken' failed with ZeroDivisionError"),
        ("missing:load", "no module 'missing'"),
        ("missing.inner:load", "no module 'missing.inner'"),
    ],
)
def test_users_functions(place: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        registry.load_reference("dataset", place)


@pytest.mark.usefixtures("user_module")
def test_a_users_function_is_found() -> None:
    assert registry.load_reference("dataset", "userside:load")() == 1

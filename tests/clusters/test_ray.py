"""Training under a real Ray: the numbers of one process, also after the loss of a worker."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="the extra ray is not installed")

import ray.train

import tfmulti.ray
from tests.support import ray_jobs
from tests.support.processes import ROOT
from tfmulti.errors import ClusterError, ConfigError

pytestmark = pytest.mark.ray

# Four jobs, which start two workers six times.
LIMIT_S = 800


@pytest.fixture(scope="module")
def left_by(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Returns what a job of `ray_jobs` has left."""
    folder: Path = tmp_path_factory.mktemp("ray")
    ray_jobs.run_jobs(folder, LIMIT_S)

    def left(name: str) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
        assert "error" not in found, found["error"]
        return found

    return left


Left = Callable[[str], dict[str, Any]]


def test_a_run_has_the_numbers_of_one_process(left_by: Left) -> None:
    found, one = left_by("whole"), left_by("alone")["run"]
    report = found["report"]
    assert (report["workers"], report["steps_before"]) == (2, 0)
    for name, values in one["history"].items():
        assert report["history"][name] == pytest.approx(values, rel=1e-4)


def test_metrics_and_the_run_directory_are_reported(left_by: Left) -> None:
    found = left_by("whole")
    report = found["report"]
    assert found["epochs"] == [*range(1, ray_jobs.EPOCHS + 1), ray_jobs.EPOCHS]
    assert found["metrics"] == {"epoch": ray_jobs.EPOCHS, "step": 0, **report["metrics"]}
    expected = {"checkpoints", "config.json", "history.csv", "model.keras", "report.json"}
    assert expected <= set(found["files"])


def test_a_run_goes_on_exactly_after_the_loss_of_a_worker(left_by: Left) -> None:
    found, whole = left_by("killed"), left_by("whole")
    report = found["report"]
    assert 0 < report["steps_before"] < report["steps"]
    assert report["weights_sha256"] == whole["report"]["weights_sha256"]
    assert report["history"] == whole["report"]["history"]
    assert (found["history"], found["epochs"]) == (whole["history"], whole["epochs"])


def test_a_finished_run_is_not_trained_again(left_by: Left) -> None:
    found = left_by("alone")
    assert found["again"] == found["run"]


def test_an_own_loop_goes_on_after_the_loss_of_the_chief(left_by: Left) -> None:
    found, one = left_by("own"), left_by("alone")["own"]
    assert found["replicas"] == 2
    # The newest checkpoint is from the middle of the third epoch.
    assert (one["begun"], found["begun"]) == ([0, 1, 2, 3, 4], [2, 3, 4])
    assert found["loss"] == pytest.approx(one["loss"], rel=1e-4)


def test_a_wrong_name_is_told_to_the_driver(left_by: Left) -> None:
    found = left_by("wrong")
    expected = "ConfigError: train_loop_config: no field 'epoch'; did you mean 'epochs'?"
    assert found["errors"]
    assert all(line.startswith(expected) and "\n" not in line for line in found["errors"])
    # Ray cuts the text of an error in the middle.
    assert expected in found["text"]


# What the page says in words: the trainer takes the own loop in place of tfmulti's.
OWN_LOOP = """
trainer = TensorflowTrainer(
    loop,
    train_loop_config={"epochs": 2},
    scaling_config=ScalingConfig(num_workers=2),
    run_config=RunConfig(name="own", storage_path=str(Path("results").resolve())),
)
own = trainer.fit()
print("own", sorted(own.metrics)[:3], own.metrics["epoch"], own.checkpoint is not None)
"""


def test_the_examples_of_the_page_run(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "ray.md").read_text()
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", page, re.M | re.S))
    done = ray_jobs.run(code + OWN_LOOP, tmp_path, LIMIT_S)
    assert "'epoch': 2, 'step': 0, " in done.stdout
    assert (tmp_path / "results" / "digits").is_dir()
    assert "own ['accuracy', 'epoch', 'loss'] 2 True" in done.stdout


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"sync_every": 4}, "train_loop_config: sync_every was removed: "),
        ({"run_dir": "runs/a"}, "train_loop_config: run_dir is 'runs/a', but Ray starts "),
        ({"export_dir": "out"}, "train_loop_config: export_dir is 'out', but Ray starts "),
        ({"epochs": 0}, "--epochs is 0, but it must be at least 1"),
    ],
)
def test_wrong_values_are_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        tfmulti.ray.checked(config)
    assert str(error.value).startswith(message)


def test_workers_without_tf_config_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers of another trainer of Ray would each train alone."""
    context = SimpleNamespace(get_world_size=lambda: 3)
    monkeypatch.setattr(ray.train, "get_context", lambda: context)
    with pytest.raises(ClusterError, match="Ray has started 3 workers, but the environment desc"):
        tfmulti.ray.check_cluster(tfmulti.FitConfig())

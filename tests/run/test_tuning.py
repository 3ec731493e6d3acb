"""Tests searches of the real KerasTuner whose trials train on several replicas or workers."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import keras
import keras_tuner
import pytest
import tensorflow as tf

import tfmulti
from tests.support import forked
from tests.support.processes import Finished, run
from tfmulti.run.tuning import unpack

pytestmark = pytest.mark.processes

LIMIT_S = 240
SCRIPT = ("-m", "tests.support.tuned_script")


def search(folder: Path, kind: str) -> dict[str, Any]:
    """Returns what a search on local replicas finds, such as `RandomSearch:2` on two of them."""
    folder.mkdir()
    done = forked.run([*SCRIPT, str(folder), kind], folder / "log", limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    return found(folder, 0)


def launch(folder: Path, *words: str) -> Finished:
    """Searches on two workers of the launcher."""
    argv = ["-m", "tfmulti.launch", "--nproc-per-node", "2", "--max-restarts", "0"]
    argv += ["--no-standby"]
    argv += ["--log-dir", str(folder / "logs"), *SCRIPT, str(folder), *words]
    return run(argv, folder / "launcher", env={"TMPDIR": str(folder)}, limit_s=LIMIT_S)


def found(folder: Path, rank: int) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((folder / f"found_{rank}.json").read_text())
    return result


def assert_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Checks that two searches tried the same and found the same, within rounding."""
    assert one["best"] == other["best"]
    assert one["scores"] == pytest.approx(other["scores"], rel=1e-4)
    for row, other_row in zip(one["predicted"], other["predicted"], strict=True):
        assert row == pytest.approx(other_row, rel=1e-3, abs=1e-5)


def trials_begun(folder: Path) -> int:
    """Returns how many trials the oracle of the chief has begun."""
    return len(
        json.loads((folder / "search" / "RandomSearch" / "oracle.json").read_text())["start_order"]
    )


def test_replicas_and_workers_find_what_one_device_finds(tmp_path: Path) -> None:
    one = search(tmp_path / "one", "RandomSearch:1")
    assert len(one["scores"]) == 3
    assert_alike(search(tmp_path / "two", "RandomSearch:2"), one)
    done = launch(tmp_path, "RandomSearch")
    assert done.returncode == 0, done.stderr
    assert found(tmp_path, 0) == found(tmp_path, 1)
    assert_alike(found(tmp_path, 0), one)
    # The chief's files are those of a search on one device, and no other worker has left one.
    project = Path("search", "RandomSearch")
    assert files(tmp_path / project) == files(tmp_path / "one" / project)
    assert not list(tmp_path.glob("tfmulti-not-chief-*"))
    # A second start of the job reads the folder on the chief, and trains nothing.
    done = launch(tmp_path, "RandomSearch")
    assert done.returncode == 0, done.stderr
    assert found(tmp_path, 0) == found(tmp_path, 1)
    assert_alike(found(tmp_path, 1), one)
    assert trials_begun(tmp_path) == 3


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("kind", ["BayesianOptimization", "GridSearch"])
def test_other_oracles_find_the_same_on_replicas_and_workers(tmp_path: Path, kind: str) -> None:
    if kind == "BayesianOptimization":
        pytest.importorskip("sklearn", reason="KerasTuner needs it for BayesianOptimization")
    one = search(tmp_path / "one", f"{kind}:1")
    assert len(one["scores"]) == 3
    assert_alike(search(tmp_path / "two", f"{kind}:2"), one)
    done = launch(tmp_path, kind)
    assert done.returncode == 0, done.stderr
    assert found(tmp_path, 0) == found(tmp_path, 1)
    assert_alike(found(tmp_path, 0), one)


def test_keras_tuner_alone_still_ends_a_grid_search_that_is_started_again(tmp_path: Path) -> None:
    """If this fails, try to remove `tfmulti.keras_patches.grid_search`."""

    class Search(keras_tuner.GridSearch):
        def run_trial(self, trial: Any, *args: Any, **kwargs: Any) -> float:
            return float(trial.hyperparameters.Int("width", 1, 4))

    def build(parameters: Any) -> keras.Model:
        return keras.Sequential([keras.layers.Dense(parameters.Int("width", 1, 4))])

    for trials in (1, 3):
        objective = keras_tuner.Objective("loss", "min")
        tuner = Search(build, objective=objective, max_trials=trials, directory=tmp_path)
        tuner.search(verbose=0)
        assert len(tuner.oracle.trials) == 1


def test_a_grid_search_that_is_started_again_goes_on(tmp_path: Path) -> None:
    """KerasTuner alone ends it without a message."""
    one = search(tmp_path / "one", "GridSearch:1")
    for trials in ("2", "3"):
        done = launch(tmp_path, "GridSearch", "", trials)
        assert done.returncode == 0, done.stderr
        assert len(found(tmp_path, 1)["scores"]) == int(trials)
    assert_alike(found(tmp_path, 0), one)


def test_hyperband_goes_on_from_weights_that_only_the_chief_has(tmp_path: Path) -> None:
    one = search(tmp_path / "one", "Hyperband:1")
    done = launch(tmp_path, "Hyperband")
    assert done.returncode == 0, done.stderr
    assert found(tmp_path, 0) == found(tmp_path, 1)
    assert_alike(found(tmp_path, 1), one)


def test_a_trial_that_fails_on_one_worker_ends_the_search_and_another_start_goes_on(
    tmp_path: Path,
) -> None:
    done = launch(tmp_path, "RandomSearch", "fails")
    assert done.returncode == 1
    assert "trial 1 failed on this worker, which ends the search on all: ValueError: this row" in (
        done.stderr
    )
    assert trials_begun(tmp_path) == 2
    assert not list(tmp_path.glob("found_*"))
    done = launch(tmp_path, "RandomSearch")
    assert done.returncode == 0, done.stderr
    assert found(tmp_path, 0) == found(tmp_path, 1)
    assert_alike(found(tmp_path, 0), search(tmp_path / "one", "RandomSearch:1"))


def test_an_oracle_that_ends_the_search_ends_it_on_all_workers(tmp_path: Path) -> None:
    """KerasTuner's oracle, which the chief alone has, gives up after three trials without score."""
    done = launch(tmp_path, "RandomSearch", "unscored")
    assert done.returncode == 1
    words = "the chief has ended the search on all workers: RuntimeError: Number of consecutive"
    assert words in done.stderr, done.stderr
    for rank in (0, 1):
        (log,) = (tmp_path / "logs").rglob(f"worker_{rank}/stderr.log")
        assert words in log.read_text()


def archive_of(*names: str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name in names:
            archive.writestr(name, "{}")
    return data.getvalue()


@pytest.mark.parametrize(
    "name", ["../evil.json", "/evil.json", "trial_1/../../evil", ".evil", "trial_1/a/b", "other/b"]
)
def test_files_of_the_chief_with_other_names_are_not_written(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "project"
    with pytest.raises(tfmulti.DataError, match="the chief has sent a file with the name"):
        unpack(archive_of("oracle.json", name), folder)
    assert not list(tmp_path.iterdir())
    names = ["oracle.json", "trial_00a1/trial.json", "trial_00a1/checkpoint.weights.h5"]
    unpack(archive_of(*names), folder)
    assert all((folder / each).read_text() == "{}" for each in names)


def test_other_arguments_are_refused() -> None:
    with pytest.raises(tfmulti.ConfigError, match="takes a class of KerasTuner"):
        tfmulti.make_tuner("RandomSearch", tf.distribute.get_strategy())
    with pytest.raises(tfmulti.ConfigError, match="strategy is None"):
        tfmulti.make_tuner(keras_tuner.RandomSearch, None)


def test_an_oracle_of_keras_tuner_for_separate_searches_is_refused(tmp_path: Path) -> None:
    code = (
        "import tfmulti, keras_tuner\n"
        "from tfmulti import make_tuner\n"
        "try:\n"
        "    make_tuner(keras_tuner.RandomSearch, tfmulti.make_strategy(), hypermodel=print)\n"
        "except tfmulti.ConfigError as error:\n"
        "    print(error)\n"
    )
    env = {"KERASTUNER_ORACLE_IP": "127.0.0.1", "KERASTUNER_ORACLE_PORT": "9"}
    env |= {"KERASTUNER_TUNER_ID": "tuner1"}
    for done in forked.run_workers(["-c", code], 2, tmp_path, limit_s=LIMIT_S, env=env):
        assert done.stdout.startswith("KERASTUNER_ORACLE_IP is set, but the chief of these")

"""Tests trackers: the real MLflow with a folder as its store, and the real W&B without network."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import keras
import mlflow
import numpy as np
import psutil
import pytest
import tensorflow as tf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support import forked
from tests.support.launching import wait_for
from tests.support.processes import processes, run
from tfmulti import Checkpoint, ConfigError, Tracker, prepare
from tfmulti.config import trackers
from tfmulti.config.fit_config import FitConfig
from tfmulti.run.callbacks import tracker

pytestmark = pytest.mark.processes

LIMIT_S = 240
TWO_WORKERS = ("-m", "tfmulti.launch", "--nproc-per-node", "2")


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Where the trackers write: into the test's folder."""
    return {
        "MLFLOW_TRACKING_URI": (tmp_path / "mlruns").as_uri(),
        # MLflow 3 wants a database. Its folder store needs no server.
        "MLFLOW_ALLOW_FILE_STORE": "true",
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(tmp_path),
        "HOME": str(tmp_path),
    }


@pytest.fixture
def store(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of MLflow's store."""
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    return mlflow.MlflowClient(tracking_uri=env["MLFLOW_TRACKING_URI"])


def epochs_of(store: Any, run_id: str, name: str) -> dict[int, float]:
    """Returns the values of a metric by epoch."""
    return {each.step: each.value for each in store.get_metric_history(run_id, name)}


def wandb_ids(folder: Path) -> list[str]:
    """Returns the id of the run in each folder that W&B has written, in order of time."""
    found = sorted((folder / "wandb").glob("offline-run-*"))
    return [re.sub(r".*-", "", path.name) for path in found]


def test_a_job_that_is_killed_goes_on_with_the_same_run(
    tmp_path: Path, env: dict[str, str], store: Any
) -> None:
    """The chief is killed; the launcher starts both workers again from the checkpoint."""
    run_dir = tmp_path / "run"
    words = [*TWO_WORKERS, "--log-dir", str(tmp_path / "logs"), "-m", "tfmulti.fit"]
    words += ["--run_dir", str(run_dir), "--tracker", "tensorboard,mlflow,wandb"]
    words += ["--dataset", "synthetic:shape=28x28x1,classes=10,examples=2048", "--epochs", "6"]
    words += ["--checkpoint_every_steps", "5", "--global_batch_size", "64"]
    with processes(tmp_path / "launcher") as group:
        launcher = group.start(words, env)
        wait_for(lambda: (run_dir / "history.csv").exists(), LIMIT_S)
        wait_for(lambda: (run_dir / "history.csv").read_text().count("\n") >= 2)
        chief = next(
            process
            for process in psutil.Process(launcher.pid).children(recursive=True)
            if "tfmulti.fit" in process.cmdline() and process.environ().get("RANK") == "0"
        )
        chief.kill()
        [done] = group.wait(LIMIT_S)
    assert done.returncode == 0, done.stderr
    assert "starting all workers again" in done.stderr
    [found] = store.search_runs(["0"])
    history = np.genfromtxt(run_dir / "history.csv", delimiter=",", names=True)
    logged = epochs_of(store, found.info.run_id, "loss")
    assert sorted(logged) == list(range(6))
    assert [logged[epoch] for epoch in range(6)] == pytest.approx(list(history["loss"]))
    assert found.info.status == "FINISHED"
    assert found.data.params["epochs"] == "6"
    assert found.data.params["tracker"] == "tensorboard,mlflow,wandb"
    assert {"report.html", "curves.png"} <= {
        each.path for each in store.list_artifacts(found.info.run_id)
    }
    ids = wandb_ids(tmp_path)
    # One folder for each attempt, and no other worker has written one.
    assert len(ids) == 2
    assert len(set(ids)) == 1


def test_only_the_chief_runs_callbacks_of_trackers(
    tmp_path: Path, env: dict[str, str], store: Any
) -> None:
    words = [*TWO_WORKERS, "--no-standby", "--log-dir", str(tmp_path / "logs")]
    words += ["-m", "tests.support.tracked_script", str(tmp_path)]
    done = run(words, tmp_path / "launcher", env=env, limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    [found] = store.search_runs(["0"])
    assert sorted(epochs_of(store, found.info.run_id, "loss")) == [0, 1, 2]
    assert len(store.get_metric_history(found.info.run_id, "loss")) == 3
    assert len(wandb_ids(tmp_path)) == 1
    assert (tmp_path / "mine.txt").read_text() == "0\n1\n2\n"


@pytest.mark.parametrize("tracker", ["mlflow", "wandb"])
def test_a_server_that_does_not_answer_costs_a_line(
    tmp_path: Path, env: dict[str, str], tracker: str
) -> None:
    """It accepts connections and is silent, so that a tracker waits for its own time-outs."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        env |= {"MLFLOW_TRACKING_URI": url, "WANDB_BASE_URL": url}
        env |= {"WANDB_MODE": "online", "WANDB_API_KEY": "0" * 40, "WANDB_INIT_TIMEOUT": "5"}
        words = [*TWO_WORKERS, "--max-restarts", "0", "--log-dir", str(tmp_path / "logs")]
        words += ["-m", "tfmulti.fit", "--epochs", "2", "--run_dir", str(tmp_path / "run")]
        done = run([*words, "--tracker", tracker], tmp_path / "fit", env=env, limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stderr.splitlines() if f"{tracker} does not take" in line]
    assert f"tfmulti: {tracker} does not take this run: " in line
    assert line.endswith(" The training goes on. See docs/trackers.md.")
    assert len(line) < 280
    assert (tmp_path / "run" / "report.json").exists()
    assert not (tmp_path / "run" / "tensorboard").exists()


class Server:
    """Replaces a tracker's package, and records the calls that `Tracker` makes."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start(self, run_id: str | None, parameters: Any) -> str:
        self.calls.append(("start", run_id))
        return run_id or f"run{len(self.calls)}"

    def log(self, metrics: Any, epoch: int) -> None:
        self.calls.append((epoch, metrics))

    def end(self, done: bool, files: Any) -> None:
        self.calls.append(("end", done))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    monkeypatch.setitem(tracker._SERVERS, "mlflow", lambda: made)
    return made


def model() -> Any:
    made = prepare(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
    made.compile("sgd", "mse")
    return made


X, Y = np.ones((4, 2)), np.ones((4, 1))


def test_numbers_of_any_library_are_logged(server: Server) -> None:
    made = Tracker("mlflow")
    made.set_model(model())
    made.on_train_batch_begin(0)
    numbers = {"a": 1, "b": np.float32(0.5), "c": np.int64(3), "d": tf.constant(2.0), "e": True}
    made.on_epoch_end(0, {**numbers, "vector": np.ones(2), "text": "x"})
    assert server.calls[-1] == (0, {"a": 1.0, "b": 0.5, "c": 3.0, "d": 2.0, "e": 1.0})


def test_each_fit_makes_a_run_of_its_own(server: Server) -> None:
    made, trained = Tracker("mlflow"), model()
    for _ in range(2):
        trained.fit(X, Y, verbose=0, callbacks=[made])
    assert [call for call in server.calls if call[0] == "start"] == [("start", None)] * 2


def test_a_run_is_ended_if_the_checkpoint_leaves_nothing_to_train(
    server: Server, tmp_path: Path
) -> None:
    """As when a job is killed after its last checkpoint: the tracker's run is still open."""
    trained = model()
    open_run = Tracker("mlflow", at_end=False)
    trained.fit(X, Y, verbose=0, callbacks=[open_run, Checkpoint(tmp_path)])
    run_id = open_run.get_state()["run_id"]
    server.calls.clear()
    model().fit(X, Y, verbose=0, callbacks=[Tracker("mlflow"), Checkpoint(tmp_path)])
    assert server.calls == [("start", run_id), ("end", True)]


def test_tensorboard_has_the_hyper_parameters_and_the_configuration(tmp_path: Path) -> None:
    words = ["-m", "tfmulti.fit", "--epochs", "1", "--run_dir", str(tmp_path / "run")]
    done = forked.run(words, tmp_path / "fit", limit_s=LIMIT_S)
    assert done.returncode == 0, done.stderr
    events = EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    assert "_hparams_/session_start_info" in events.summary_metadata
    [text] = events.Tensors("configuration")
    assert b"| epochs | 1 |" in text.tensor_proto.string_val[0]


def test_mistakes(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="unknown name 'mlfow'; did you mean 'mlflow'"):
        FitConfig(tracker="tensorboard,mlfow")
    with pytest.raises(ConfigError, match="has other names beside 'none'"):
        FitConfig(tracker="none,mlflow")
    assert trackers.names_in("mlflow, mlflow,wandb") == ("mlflow", "wandb")
    with pytest.raises(ConfigError, match=r"Tracker\('tensorboard'\): known: mlflow, wandb"):
        Tracker("tensorboard")
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="wandb is not installed on this machine"):
        Tracker("wandb")


@pytest.mark.parametrize("run_id", ["../../a", "a/b", "", "a" * 65, 7, None, "a b"])
def test_a_crafted_id_of_a_run_is_not_used(run_id: Any) -> None:
    made = Tracker("mlflow")
    made.set_state({"run_id": run_id})
    assert made.get_state() == {"run_id": None}
    made.set_state({"run_id": "0f-A_1"})
    assert made.get_state() == {"run_id": "0f-A_1"}

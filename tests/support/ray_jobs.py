"""Jobs of Ray's TensorflowTrainer with two workers on this machine, and what each of them left.

`run_jobs(folder, limit_s)` starts a process that does all jobs in one Ray. Each job writes
`NAME.json`. That process imports this module by its name, so that Ray sends its functions to the
workers by name, too. `run` ends Ray's processes whatever happens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import secrets
import shutil
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import ray
from ray.train import FailureConfig, Result, RunConfig, ScalingConfig, WorkerGroupError
from ray.train.tensorflow import TensorflowTrainer

import tfmulti
import tfmulti.ray
from tests.support.processes import ROOT, Finished, is_alive
from tests.support.processes import run as run_alone

EPOCHS, STEPS, BATCH = 5, 10, 16
ROWS = np.random.default_rng(1).normal(size=(STEPS * BATCH, 6)).astype(np.float32)
LABELS = np.arange(len(ROWS)) % 3
CONFIG = {
    "dataset": "tests.support.ray_jobs:load",
    "model": "tests.support.ray_jobs:build",
    "global_batch_size": BATCH,
    "epochs": EPOCHS,
    "steps_per_execution": 1,
}


def load() -> tuple[np.ndarray, np.ndarray]:
    return ROWS, LABELS


def build() -> keras.Model:
    layers = [keras.layers.Dense(8, "relu"), keras.layers.Dropout(0.3)]
    return keras.Sequential([keras.Input((6,)), *layers, keras.layers.Dense(3, "softmax")])


def storage() -> Path:
    """The folder of the job in Ray's storage."""
    return Path(ray.train.get_context().get_storage().experiment_fs_path)


def is_first_attempt() -> bool:
    """Whether no worker was killed yet."""
    return not (storage() / "killed").exists()


def folders_of_checkpoints() -> list[str]:
    return [path.name for path in storage().glob("checkpoint_*-*")]


def kill_with(folder: Path, count: int) -> None:
    """Kills this process as soon as Ray's controller knows `count` checkpoints.

    The folder of a checkpoint exists before the controller knows it.
    """
    snapshot, known = folder / "checkpoint_manager_snapshot.json", 0
    while known < count:
        time.sleep(0.005)
        with contextlib.suppress(FileNotFoundError):
            known = len(set(re.findall(r"checkpoint_[\d_.-]+", snapshot.read_text())))
    (folder / "killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)


def rank() -> int:
    found: int = ray.train.get_context().get_world_rank()
    return found


def killed(config: dict[str, Any]) -> Any:
    """The whole run, of which worker 1 is killed once, when Ray has its first checkpoint."""
    if rank() == 1 and is_first_attempt():
        threading.Thread(target=kill_with, args=(storage(), 1), daemon=True).start()
    return tfmulti.ray.train_loop(config)


class KilledOnce(keras.callbacks.Callback):
    """Kills the chief in its first attempt, and notes which epochs this process has begun."""

    begun: tuple[int, ...] = ()

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        pass

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        self.begun = (*self.begun, epoch)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        if is_killed and (self.begun[-1], batch) == (2, STEPS // 2) and rank() == 0:
            kill_with(storage(), len(folders_of_checkpoints()))


is_killed = False


def own_loop(config: Mapping[str, Any]) -> dict[str, Any]:
    """A user's own loop."""
    global is_killed
    is_killed = config["kill"] and is_first_attempt()
    strategy = tfmulti.make_strategy()
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = tfmulti.prepare(build(), seed=5)
        model.compile("adam", "sparse_categorical_crossentropy")
    checkpoint = tfmulti.ray.Checkpoint(every_steps=4) if config["kill"] else None
    once = KilledOnce()
    callbacks = [once] if checkpoint is None else [checkpoint, once]
    history = model.fit(
        ROWS, LABELS, batch_size=BATCH, epochs=EPOCHS, callbacks=callbacks, verbose=0
    )
    weights = b"".join(np.asarray(v).tobytes() for v in model.weights)
    return {
        "weights": hashlib.sha256(weights).hexdigest(),
        "loss": history.history["loss"],
        "begun": once.begun,
        "replicas": strategy.num_replicas_in_sync,
    }


def fitted(
    folder: Path, name: str, loop: Callable[..., Any], config: Mapping[str, Any], failures: int = 1
) -> Result:
    """Returns the result of a trainer with two workers, which starts them again after failures."""
    result: Result = TensorflowTrainer(
        loop,
        train_loop_config=dict(config),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name=name,
            storage_path=str(folder / "storage"),
            failure_config=FailureConfig(max_failures=failures),
        ),
    ).fit()
    return result


def of_run(result: Result) -> dict[str, Any]:
    """Returns what a whole run has left."""
    with result.checkpoint.as_directory() as kept:
        files = sorted(path.name for path in Path(kept).iterdir())
        history = (Path(kept) / "history.csv").read_text()
    return {
        "report": dataclasses.asdict(result.return_value),
        "files": files,
        "history": history,
        "metrics": result.metrics,
        "epochs": result.metrics_dataframe["epoch"].tolist(),
    }


def whole_job(folder: Path) -> dict[str, Any]:
    """The whole run without a fault, in a run directory that all workers see."""
    config = {**CONFIG, "run_dir": str(folder / "run")}
    return of_run(fitted(folder, "whole", tfmulti.ray.train_loop, config))


def killed_job(folder: Path) -> dict[str, Any]:
    """The whole run with a lost worker."""
    return of_run(fitted(folder, "killed", killed, CONFIG))


def wrong_job(folder: Path) -> dict[str, Any]:
    """A name that does not exist."""
    try:
        fitted(folder, "wrong", tfmulti.ray.train_loop, {"epoch": 3}, failures=0)
    except WorkerGroupError as error:
        return {
            "text": str(error),
            "errors": [f"{type(e).__name__}: {e}" for e in error.worker_failures.values()],
        }
    raise AssertionError("the name was taken")


def alone_job(folder: Path) -> dict[str, Any]:
    """The same on one device without Ray, and the finished run by Ray in this process."""
    config = {**CONFIG, "run_dir": str(folder / "alone")}
    run = tfmulti.train(tfmulti.FitConfig(**config))
    trainer = TensorflowTrainer(
        tfmulti.ray.train_loop,
        train_loop_config=config,
        scaling_config=ScalingConfig(num_workers=0),
    )
    again = trainer.fit().return_value
    return {
        "run": dataclasses.asdict(run),
        "again": dataclasses.asdict(again),
        "own": own_loop({"kill": False}),
    }


JOBS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "whole": whole_job,
    "killed": killed_job,
    "own": lambda folder: fitted(folder, "own", own_loop, {"kill": True}).return_value,
    "wrong": wrong_job,
    "alone": alone_job,
}


def main(folder: Path) -> None:
    """Does all jobs, in the process that starts Ray."""
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20)
    for name, job in JOBS.items():
        started = time.monotonic()
        try:
            found = job(folder)
        except Exception:
            found = {"error": traceback.format_exc()}
        (folder / f"{name}.json").write_text(json.dumps(found))
        print(f"{name}: {time.monotonic() - started:.1f} s", flush=True)
    ray.shutdown()


def run_jobs(folder: Path, limit_s: float) -> None:
    """Does all jobs in a process of its own; see `run`."""
    run(
        f"import pathlib; from {__name__} import main; main(pathlib.Path({str(folder)!r}))",
        folder,
        limit_s,
    )


MARK = "TFMULTI_TEST_RAY"


def of_ray(mark: str) -> list[int]:
    """Returns the ids of the processes whose environment has the mark."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return [pid for pid in found if is_alive(pid)]


def run(code: str, folder: Path, limit_s: float) -> Finished:
    """Runs code that starts Ray, in a process of its own, and ends Ray's processes with it.

    Raises:
        AssertionError: it failed, took too long, or left processes. The message has its logs.
    """
    # The path of a socket has 107 characters at most, so Ray's folder needs a short name.
    temporary, mark = tempfile.mkdtemp(prefix="tfm-"), secrets.token_hex(8)
    env = {
        MARK: mark,
        "PYTHONPATH": str(ROOT),
        # With a token in the environment Ray writes none to the home folder.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(),
        "RAY_TMPDIR": temporary,
        # An actor less, whose start takes a second.
        "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    try:
        done = run_alone(["-c", code], folder / "logs", limit_s=limit_s, env=env, cwd=folder)
        assert done.returncode == 0, done.stdout + done.stderr
        deadline = time.monotonic() + 10
        while of_ray(mark) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not of_ray(mark), f"Ray left processes\n{done.stderr}"
        return done
    finally:
        while left := of_ray(mark):
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        shutil.rmtree(temporary)

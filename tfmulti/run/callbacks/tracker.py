"""`Tracker` logs a training to MLflow or Weights & Biases, as one run over all its restarts."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import keras
import numpy as np

from tfmulti.config.trackers import MLFLOW, WANDB, check_installed
from tfmulti.errors import ConfigError, did_you_mean
from tfmulti.launch.heartbeat import heartbeat
from tfmulti.training.state.trainer_state import state_of

# A run's id comes from a checkpoint, and becomes a part of addresses and folders.
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
# The most of a tracker's own message that is shown.
_MOST_CHARACTERS = 160
# All workers wait while the chief waits for a server. Without these settings the clients try for
# minutes before they say that the server does not answer. A user's own settings stay.
_MLFLOW_LIMITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
_WANDB_LIMITS = {"WANDB_INIT_TIMEOUT": "30"}
_MOST_WAIT_S = 120.0


class _Server(Protocol):
    """What a tracker's package can do."""

    def start(self, run_id: str | None, parameters: Mapping[str, Any]) -> str:
        """Starts a run, or goes on with the run of an id, and returns the run's id."""

    def log(self, metrics: Mapping[str, float], epoch: int) -> None:
        """Logs the metrics of an epoch."""

    def end(self, done: bool, files: Sequence[Path]) -> None:
        """Ends the run. `done`: whether it was trained to its end."""


class Tracker(keras.callbacks.Callback):
    """Logs the metrics of each epoch to a tracker, on the chief only.

    A training that resumes from a checkpoint goes on with the same run of the tracker. The epoch of
    the checkpoint may be logged a second time, with the same values. Another `fit` after the end of
    a run begins a new run. The server is chosen as the tracker's manual says, such as by
    `MLFLOW_TRACKING_URI` or `WANDB_MODE`. A server that does not answer costs a line on standard
    error, and not the training.

    Sources: the manuals "MLflow Tracking" (`mlflow.start_run`) and "Resume W&B runs"
    (`wandb.init`).

    Args:
        name: `mlflow` or `wandb`.
        parameters: the hyper-parameters of the run.
        at_end: whether the run of the tracker ends with `fit`. Otherwise `finish` ends it.

    Raises:
        ConfigError: the name is unknown, or the tracker's package is not installed.
    """

    chief_only = True

    def __init__(
        self, name: str, parameters: Mapping[str, Any] | None = None, *, at_end: bool = True
    ) -> None:
        super().__init__()
        if name not in _SERVERS:
            raise ConfigError(f"Tracker({name!r}): {did_you_mean(name, _SERVERS)}")
        check_installed(name)
        self._name, self._parameters, self._at_end = name, dict(parameters or {}), at_end
        self._run_id: str | None = None
        self._server: _Server | None = None
        self._failed = False

    def get_state(self) -> dict[str, Any]:
        """Returns the id of the tracker's run, for a checkpoint."""
        return {"run_id": self._run_id}

    def set_state(self, state: dict[str, Any]) -> None:
        """Continues the run whose `state` a checkpoint has saved."""
        run_id = state["run_id"]
        if isinstance(run_id, str) and _ID.fullmatch(run_id):
            self._run_id = run_id

    def on_train_begin(self, logs: Any = None) -> None:
        """Forgets the run of an earlier `fit` that has ended. A checkpoint's id is set later."""
        if self._server is None:
            self._run_id = None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Starts the run at the first step, when the state of the checkpoint is restored."""
        if self._server is None and not self._failed:
            self._try(self._start)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Logs the metrics of the epoch."""
        self.log(logs or {}, epoch)

    def on_train_end(self, logs: Any = None) -> None:
        """Ends the run, if it ends with `fit`.

        If the checkpoint has left no step to train, its run is still open, and goes on here.
        """
        if self._server is None and self._run_id is not None and not self._failed:
            self._try(self._start)
        if self._at_end:
            self.finish()

    def log(self, metrics: Mapping[str, Any], epoch: int) -> None:
        """Logs metrics. Those that are vectors are left out.

        Args:
            metrics: the values by name.
            epoch: the number of the epoch, counted from 0.
        """
        server = self._server
        numbers = {name: _as_number(value) for name, value in metrics.items()}
        values = {name: number for name, number in numbers.items() if number is not None}
        if server is not None and values:
            self._try(lambda: server.log(values, epoch))

    def finish(self, files: Sequence[Path] = ()) -> None:
        """Ends the run of the tracker.

        Args:
            files: files that the tracker keeps with the run.
        """
        server, self._server = self._server, None
        if server is not None:
            done = state_of(self.model).run.stopped_by is None
            self._try(lambda: server.end(done, files))

    def _start(self) -> None:
        server = _SERVERS[self._name]()
        self._run_id = server.start(self._run_id, self._parameters)
        self._server = server

    def _try(self, call: Any) -> None:
        """Calls a function of the tracker; says once if it fails."""
        try:
            with heartbeat().waiting_outside(_MOST_WAIT_S):
                call()
        except Exception as error:
            if not self._failed:
                # Some messages list all that the tracker can do.
                reason, *_ = str(error).strip().splitlines() or [type(error).__name__]
                reason = textwrap.shorten(reason, _MOST_CHARACTERS, placeholder=" …")
                print(
                    f"tfmulti: {self._name} does not take this run: {reason} The training goes on. "
                    "See docs/trackers.md.",
                    file=sys.stderr,
                    flush=True,
                )
            self._failed = True


def _as_number(value: Any) -> float | None:
    """Returns a metric that is one number of Python, NumPy or TensorFlow, or None."""
    with contextlib.suppress(TypeError, ValueError):
        if not isinstance(value, (str, bytes)) and np.ndim(value) == 0:
            return float(value)
    return None


def _limit_waits(settings: Mapping[str, str]) -> None:
    for name, value in settings.items():
        os.environ.setdefault(name, value)


class _MLflow:
    """A run of MLflow. The run that the user has started is used, and is left open."""

    def __init__(self) -> None:
        _limit_waits(_MLFLOW_LIMITS)
        import mlflow

        self._mlflow = mlflow
        self._is_own = mlflow.active_run() is None

    def start(self, run_id: str | None, parameters: Mapping[str, Any]) -> str:
        run = self._mlflow.active_run() or self._mlflow.start_run(run_id=run_id)
        if run_id is None and parameters:
            self._mlflow.log_params(dict(parameters))
        return str(run.info.run_id)

    def log(self, metrics: Mapping[str, float], epoch: int) -> None:
        # A slow server must not hold up the workers that wait for the chief.
        self._mlflow.log_metrics(dict(metrics), step=epoch, synchronous=False)

    def end(self, done: bool, files: Sequence[Path]) -> None:
        self._mlflow.flush_async_logging()
        for path in files:
            self._mlflow.log_artifact(str(path))
        if self._is_own:
            self._mlflow.end_run("FINISHED" if done else "KILLED")


class _Wandb:
    """A run of Weights & Biases. The run that the user has started is used, and is left open."""

    def __init__(self) -> None:
        _limit_waits(_WANDB_LIMITS)
        import wandb

        self._wandb = wandb
        self._is_own = wandb.run is None
        self._run: Any = None

    def start(self, run_id: str | None, parameters: Mapping[str, Any]) -> str:
        if self._is_own:
            self._wandb.init(id=run_id, resume="allow", config=dict(parameters))
        self._run = self._wandb.run
        # Its own count of steps must not go back, as epochs do after a restart.
        self._run.define_metric("epoch")
        self._run.define_metric("*", step_metric="epoch")
        return str(self._run.id)

    def log(self, metrics: Mapping[str, float], epoch: int) -> None:
        self._run.log({"epoch": epoch, **metrics})

    def end(self, done: bool, files: Sequence[Path]) -> None:
        for path in files:
            self._run.save(str(path), base_path=str(path.parent), policy="now")
        if self._is_own:
            self._run.finish(exit_code=0 if done else 1)


_SERVERS: dict[str, type[_Server]] = {MLFLOW: _MLflow, WANDB: _Wandb}

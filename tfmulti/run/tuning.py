"""Lets KerasTuner search with trials that train on all workers.

    import keras_tuner
    import tfmulti

    strategy = tfmulti.make_strategy()
    tuner = tfmulti.make_tuner(
        keras_tuner.RandomSearch, strategy, hypermodel=build, objective="val_loss", max_trials=10
    )
    tuner.search(x, y, epochs=3, validation_data=(xv, yv))

KerasTuner by itself has an oracle on each worker, and each worker writes the same project folder.
Here only the chief has a project folder and asks its oracle. The chief sends the state of the
oracle to the other workers when a trial begins and when it ends. Between these two collectives all
workers train the model of the trial. So the tuner returns the same values on every worker, and only
`search` and the loading of models need all workers.
"""

from __future__ import annotations

import io
import json
import os
import re
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import keras_tuner
import tensorflow as tf
from keras_tuner.engine import trial as trials

from tfmulti.distribution.agreement import from_chief
from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import ConfigError, DataError
from tfmulti.keras_patches.grid_search import restore_position


def make_tuner(
    kind: type[keras_tuner.Tuner], strategy: tf.distribute.Strategy, **arguments: Any
) -> keras_tuner.Tuner:
    """Returns a tuner whose trials train on all replicas of a strategy. Every worker calls it.

    A trial that fails on several workers ends the search on all of them, since the others may wait
    for the failed worker inside a step.

    Args:
        kind: the class of the tuner, such as `keras_tuner.RandomSearch`.
        strategy: the strategy of `make_strategy`.
        **arguments: the arguments of the class by name, with a `hypermodel` that returns a prepared
            model. `directory` and `project_name` count on the chief alone.

    Raises:
        ConfigError: `kind` or `strategy` is something else, or KerasTuner's own oracle for separate
            searches (KERASTUNER_ORACLE_IP) is in use.
    """
    if not (isinstance(kind, type) and issubclass(kind, keras_tuner.Tuner)):
        raise ConfigError(
            "make_tuner takes a class of KerasTuner, such as keras_tuner.RandomSearch, not "
            f"{kind!r}."
        )
    if not isinstance(strategy, tf.distribute.Strategy):
        raise ConfigError(f"strategy is {strategy!r}. Give what tfmulti.make_strategy() returns.")
    placement = placement_of(strategy)
    arguments["distribution_strategy"] = strategy
    if placement.workers == 1:
        return _restored(kind(**arguments))
    if "KERASTUNER_ORACLE_IP" in os.environ:
        raise ConfigError(
            "KERASTUNER_ORACLE_IP is set, but the chief of these workers has the oracle itself. "
            "Unset it, or search on one worker in each process."
        )
    own_folder = None
    name = arguments.get("project_name") or "untitled_project"
    project = Path(arguments.get("directory") or ".") / name
    if not placement.is_chief:
        own_folder = tempfile.TemporaryDirectory(prefix="tfmulti-not-chief-")
        arguments["directory"] = own_folder.name
        project = Path(own_folder.name) / name
    # A tuner that finds a project does not build the model, which needs all workers. So the others
    # find what the chief finds.
    is_new = arguments.get("overwrite") or not project.is_dir()
    _send(strategy, project, () if is_new else project.rglob("*.json"))
    tuner = _restored(type(kind.__name__, (_OnAllWorkers, kind), {})(**arguments))
    tuner.oracle = _ChiefsOracle(tuner.oracle, strategy)
    tuner.own_folder = own_folder
    return tuner


def _restored(tuner: keras_tuner.Tuner) -> keras_tuner.Tuner:
    """Returns a tuner whose grid search goes on with the trials that its folder has."""
    if isinstance(tuner.oracle, keras_tuner.oracles.GridSearchOracle):
        restore_position(tuner.oracle)
    return tuner


class _OnAllWorkers:
    """The methods of a tuner whose trials train on several workers."""

    distribution_strategy: tf.distribute.Strategy

    def run_trial(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        """Trains a trial. Every worker calls it."""
        # Hyperband begins with the weights of another trial.
        begins_from = trial.hyperparameters.values.get("tuner/trial_id")
        if begins_from is not None:
            self._fetch(begins_from)
        try:
            return super().run_trial(trial, *args, **kwargs)  # type: ignore[misc]
        except keras_tuner.errors.FatalError:
            raise
        except Exception as error:
            # KerasTuner would go on with the next trial on this worker alone.
            raise keras_tuner.errors.FatalError(
                f"trial {trial.trial_id} failed on this worker, which ends the search on all: "
                f"{type(error).__name__}: {error}"
            ) from error

    def load_model(self, trial: Any) -> Any:
        """Returns the model of a trial with its best weights. Every worker calls it."""
        self._fetch(trial.trial_id)
        return super().load_model(trial)  # type: ignore[misc]

    def _fetch(self, trial_id: str) -> None:
        """Copies the chief's files of a trial to the other workers. Every worker calls it."""
        folder = Path(self.get_trial_dir(trial_id))  # type: ignore[attr-defined]
        _send(self.distribution_strategy, folder, folder.glob("*"))


class _ChiefsOracle:
    """The oracle of the chief, and a copy of its state on the other workers."""

    def __init__(self, oracle: keras_tuner.Oracle, strategy: tf.distribute.Strategy) -> None:
        self._oracle, self._strategy = oracle, strategy
        self._is_chief = placement_of(strategy).is_chief

    def __getattr__(self, name: str) -> Any:
        return getattr(self._oracle, name)

    @property
    def verbose(self) -> Any:
        return self._oracle.verbose

    @verbose.setter
    def verbose(self, value: Any) -> None:
        self._oracle.verbose = value

    def create_trial(self, tuner_id: str) -> Any:
        """Returns the trial that the chief's oracle gives. Every worker calls it."""
        return self._share(lambda: self._oracle.create_trial(tuner_id))

    def update_trial(self, trial_id: str, metrics: dict[str, float], step: int = 0) -> None:
        """Reports the metrics of a trial, on the chief."""
        if self._is_chief:
            self._oracle.update_trial(trial_id, metrics, step=step)

    def end_trial(self, trial: Any) -> None:
        """Ends a trial on the chief, and tells all workers. Every worker calls it."""

        def ended() -> Any:
            self._oracle.end_trial(trial)
            return trial

        self._share(ended)

    def _share(self, ask: Callable[[], Any]) -> Any:
        """Asks the chief's oracle, gives its state to all workers, and returns the chief's trial.

        The oracle ends a search by an error, for example after three trials without a score.
        """
        oracle, trial = self._oracle, None

        def state() -> bytes:
            nonlocal trial
            trial = ask()
            trial_states = [known.get_state() for known in oracle.trials.values()]
            return json.dumps([trial.get_state(), trial_states, oracle.get_state()]).encode()

        sent = _from_chief(self._strategy, state)
        if self._is_chief:
            return trial
        trial_state, trial_states, oracle_state = json.loads(sent)
        all_trials = map(trials.Trial.from_state, trial_states)
        oracle.trials = {known.trial_id: known for known in all_trials}
        oracle.set_state(oracle_state)
        return trials.Trial.from_state(trial_state)


def _from_chief(strategy: tf.distribute.Strategy, make: Callable[[], bytes]) -> bytes:
    """Returns on every worker what `make` returns on the chief. Every worker calls it.

    Raises:
        FatalError: `make` has failed on the chief. Every worker raises it, so that none waits.
    """

    def make_or_fail() -> bytes:
        try:
            return make()
        except Exception as error:
            raise DataError(f"{type(error).__name__}: {error}") from error

    try:
        return from_chief(strategy, make_or_fail)
    except DataError as error:
        raise keras_tuner.errors.FatalError(
            f"the chief has ended the search on all workers: {error}"
        ) from error


def _send(strategy: tf.distribute.Strategy, folder: Path, files: Iterable[Path]) -> None:
    """Copies files of the chief's folder to the same places in the other workers' folders.

    This is a collective: every worker must call it. Only the chief's `files` count.
    """

    def packed() -> bytes:
        data = io.BytesIO()
        with zipfile.ZipFile(data, "w") as archive:
            for path in filter(Path.is_file, files):
                archive.write(path, path.relative_to(folder))
        return data.getvalue()

    sent = _from_chief(strategy, packed)
    if not placement_of(strategy).is_chief:
        unpack(sent, folder)


# A file of KerasTuner in its project's folder, or in that of a trial.
_FILE = re.compile(r"(trial_\w+/)?\w[\w.-]*", re.ASCII)


def unpack(data: bytes, folder: Path) -> None:
    """Writes the files of an archive into a folder, if all have names as KerasTuner gives them.

    Args:
        data: the archive, which the chief has sent.
        folder: the folder, which may not exist yet.

    Raises:
        DataError: a file has another name. No file is written.
    """
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            if not _FILE.fullmatch(name):
                raise DataError(f"the chief has sent a file with the name {name[:80]!r}")
        archive.extractall(folder)

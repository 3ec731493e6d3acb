"""A user's script that searches with KerasTuner on all workers, or on local replicas.

python -m tests.support.tuned_script FOLDER KIND [fails|unscored] [TRIALS]

It writes `found_RANK.json`: the scores of all trials, and what the best model predicts.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import keras
import keras_tuner
import numpy as np

import tfmulti

RANK = int(os.environ.get("RANK", "0"))


def build(hp: Any) -> keras.Model:
    """A small model with a width and a rate to search for."""
    keras.utils.set_random_seed(3)
    layers = [keras.layers.Dense(hp.Int("units", 2, 16), "tanh"), keras.layers.Dense(1)]
    model = tfmulti.prepare(keras.Sequential([keras.Input((4,)), *layers]), seed=1)
    model.compile(keras.optimizers.Adam(hp.Float("rate", 1e-3, 1e-1, sampling="log")), "mse")
    return model


class FailsOnOneWorker(keras_tuner.HyperModel):
    """Fails on the worker with rank 1, in its second trial."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def build(self, hp: Any) -> keras.Model:
        return build(hp)

    def fit(self, hp: Any, model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        if self.count == 2 and RANK == 1:
            raise ValueError("this row is damaged")
        return model.fit(*args, **kwargs)


def main(folder: Path, kind: str, fault: str = "", trials: str = "3") -> None:
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    # A score that is not a number is none for KerasTuner.
    y = x.sum(axis=1, keepdims=True) * (np.nan if fault == "unscored" else 1)
    name, _, replicas = kind.partition(":")
    strategy = (
        tfmulti.make_strategy(
            "mirrored" if int(replicas) > 1 else "one_device", replicas=int(replicas)
        )
        if replicas
        else tfmulti.make_strategy()
    )
    limits: dict[str, Any] = {"max_trials": int(trials), "seed": 7}
    if name == "Hyperband":
        limits = {"max_epochs": 3, "factor": 3, "seed": 7}
    if name == "BayesianOptimization":
        # Its model of the scores chooses all trials after the first two.
        limits |= {"num_initial_points": 2}
    tuner = tfmulti.make_tuner(
        getattr(keras_tuner, name),
        strategy,
        hypermodel=FailsOnOneWorker() if fault == "fails" else build,
        objective="val_loss",
        directory=folder / "search",
        project_name=name,
        **limits,
    )
    tuner.search(x, y, batch_size=16, epochs=2, validation_data=(x, y), verbose=0)
    [best] = tuner.get_best_models()
    found = {
        "scores": [trial.score for trial in tuner.oracle.get_best_trials(99)],
        "best": tuner.get_best_hyperparameters()[0].values,
        "predicted": best.predict(x[:8], verbose=0).tolist(),
        "remaining": tuner.remaining_trials,
    }
    (folder / f"found_{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])

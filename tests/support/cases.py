"""Training runs whose numbers tests compare: the same run by plain Keras and by tfmulti.

    python -m tests.support.cases OUT.npz STRATEGY [REPLICAS [CASE,…]]

runs the cases in one process (one strategy, one number of replicas) and writes what each
left: weights, optimizer slots, history, evaluation, prediction. STRATEGY `plain` is Keras
alone on one device, without tfmulti.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.support import data, models
from tests.support.data import Fit, arrays, validation_of
from tfmulti import make_strategy, prepare
from tfmulti.strategies import placement_of

EPOCHS = 2

OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "lion": lambda: keras.optimizers.Lion(0.001),
    "muon": lambda: keras.optimizers.Muon(0.01, exclude_layers=["dense_1"]),
    "clipvalue": lambda: keras.optimizers.SGD(0.5, clipvalue=0.01),
    "clipnorm": lambda: keras.optimizers.SGD(0.5, clipnorm=0.05),
    "global_clipnorm": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.1),
    "ema": lambda: keras.optimizers.Adam(
        0.01, use_ema=True, ema_momentum=0.7, ema_overwrite_frequency=3
    ),
    "accumulation": lambda: keras.optimizers.SGD(
        0.1, momentum=0.9, weight_decay=0.1, global_clipnorm=0.5, gradient_accumulation_steps=3
    ),
}


def _one_hot(labels: Any) -> Any:
    return tf.one_hot(tf.cast(labels, tf.int32), data.CLASSES)


def mean_loss(y_true: Any, y_pred: Any) -> Any:
    """A loss that is one number already."""
    return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y_true, y_pred))


def sum_loss(y_true: Any, y_pred: Any) -> Any:
    """One number that grows with the rows."""
    return tf.reduce_sum(keras.losses.sparse_categorical_crossentropy(y_true, y_pred))


def root_loss(y_true: Any, y_pred: Any) -> Any:
    """One number that is neither a sum nor a mean over rows."""
    return tf.sqrt(tf.reduce_mean(tf.square(_one_hot(y_true) - y_pred)))


def vector_loss(y_true: Any, y_pred: Any) -> Any:
    """A value for each row."""
    return tf.reduce_sum(tf.square(_one_hot(y_true) - y_pred), -1)


def _loss(reduction: str) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(reduction=reduction)


@dataclass(frozen=True)
class Case:
    """One run.

    `row` is the number of the promise in README's table that it belongs to. `compare` says
    what it must equal: Keras alone, or tfmulti on one device where Keras alone is not right.
    """

    row: int
    build: Callable[[], keras.Model] = models.functional
    optimizer: str = "sgd"
    feed: Callable[[int, int], Fit] = arrays
    rows: int = 96
    batch: int = 24
    compile: Callable[[], dict[str, Any]] = dict
    prepare: dict[str, Any] = field(default_factory=dict)
    prepare_first: bool = True
    precision: str = "float32"
    tolerance: float = 1e-6
    compare: str = "plain"


LAST_OF_ONE: dict[str, Any] = {"rows": 100, "batch": 33}  # 33, 33, 33, 1
UNEVEN: dict[str, Any] = {"rows": 100, "batch": 30}  # 30, 30, 30, 10: on 8 replicas 4 or 3, 2 or 1
FEW: dict[str, Any] = {"rows": 14, "batch": 2}  # on 3 and on 8 replicas some have no row ever
SIX: dict[str, Any] = {"rows": 31, "batch": 6}  # on 8 replicas two have none, then seven


def _compiled(**options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: options


def _one_row_shares() -> dict[str, Case]:
    return {
        "even": Case(1),
        "even-adam": Case(1, optimizer="adam"),
        "uneven": Case(1, **UNEVEN),
        "uneven-last of one": Case(1, **LAST_OF_ONE),
        "fewer rows than replicas": Case(1, **FEW),
        "convolution, recurrence, last of one": Case(1, models.convolutional, rows=25, batch=24),
    }


def _models() -> dict[str, Case]:
    return {
        "sequential": Case(1, models.sequential, prepare_first=False),
        "sequential-adam": Case(1, models.sequential, "adam"),
        "subclassed": Case(1, models.Subclassed, prepare_first=False),
        "subclassed-adam": Case(1, models.Subclassed, "adam"),
        "own train_step": Case(1, models.CustomStep, **LAST_OF_ONE),
        "own train_step-adam": Case(1, models.CustomStep, "adam", prepare_first=False),
        "eagerly": Case(1, compile=_compiled(run_eagerly=True), **UNEVEN),
    }


def _losses() -> dict[str, Case]:
    return {
        "sum": Case(2, compile=lambda: {"loss": _loss("sum")}, optimizer="clipvalue", **LAST_OF_ONE),
        "none": Case(2, compile=lambda: {"loss": _loss("none")}, optimizer="clipvalue", **UNEVEN),
        "mean_with_sample_weight": Case(
            2,
            feed=data.weighted,
            compile=lambda: {"loss": _loss("mean_with_sample_weight")},
            **LAST_OF_ONE,
        ),
        "function of one number, a mean": Case(2, compile=_compiled(loss=mean_loss), **LAST_OF_ONE),
        "function of one number, a sum": Case(
            2, compile=_compiled(loss=sum_loss), optimizer="clipvalue", **UNEVEN
        ),
        "function of one number, a root": Case(2, compile=_compiled(loss=root_loss), **LAST_OF_ONE),
        "function of one number, weighted": Case(
            2, feed=data.weighted, compile=_compiled(loss=root_loss), **UNEVEN
        ),
        "function of a vector": Case(2, compile=_compiled(loss=vector_loss), **UNEVEN),
        "add_loss": Case(2, models.with_added_losses, **UNEVEN),
        "regularizers": Case(2, models.regularized, **UNEVEN),
        "two outputs, loss weights": Case(
            2,
            models.of_two_outputs,
            feed=data.two_outputs,
            compile=lambda: {
                "loss": {"kind": "sparse_categorical_crossentropy", "size": "mse"},
                "loss_weights": {"kind": 1.0, "size": 0.3},
                "metrics": {"kind": "accuracy", "size": "mae"},
            },
            compare="one_device",  # Keras alone gives the last batch's outputs too much weight
            **UNEVEN,
        ),
        "sample_weight": Case(2, feed=data.weighted, **UNEVEN),
        "class_weight": Case(2, feed=data.class_weighted, **UNEVEN),
        "masked steps": Case(2, models.masked, feed=data.tokens, **LAST_OF_ONE),
        "masked steps, weighted": Case(
            2,
            models.masked,
            feed=data.weighted_tokens,
            compile=lambda: {"loss": _loss("mean_with_sample_weight")},
            **UNEVEN,
        ),
        "dict inputs": Case(2, models.of_two_inputs, feed=data.dictionaries, **UNEVEN),
        "ragged inputs": Case(2, models.OfRaggedRows, feed=data.ragged, **UNEVEN),
    }


def _optimizers() -> dict[str, Case]:
    cases = {name: Case(3, optimizer=name, **UNEVEN) for name in OPTIMIZERS if name != "sgd"}
    parts = {"prepare": {"microbatches": 3}}
    cases |= {
        "microbatches": Case(3, optimizer="global_clipnorm", **parts, **LAST_OF_ONE),
        "microbatches, even": Case(3, optimizer="adam", **parts),
        "microbatches, masked steps": Case(
            3, models.masked, feed=data.tokens, **parts, **LAST_OF_ONE
        ),
        "microbatches, sum": Case(
            3, optimizer="clipvalue", compile=lambda: {"loss": _loss("sum")}, **parts, **UNEVEN
        ),
        "microbatches, dropout": Case(3, models.dropped, **parts, **UNEVEN),
        "microbatches, own train_step": Case(3, models.CustomStep, **parts, **UNEVEN),
    }
    return cases


def _normalization() -> dict[str, Case]:
    sync = {"prepare": {"sync_batch_norm": True}}
    return {
        "BatchNormalization, synchronized, even": Case(4, models.batch_normalized, **sync),
        "BatchNormalization, synchronized, uneven": Case(
            4, models.batch_normalized, **sync, **LAST_OF_ONE
        ),
        "BatchNormalization, synchronized, empty": Case(4, models.batch_normalized, **sync, **SIX),
        "GroupNormalization, LayerNormalization": Case(4, models.group_normalized, **UNEVEN),
    }


def _randomness() -> dict[str, Case]:
    return {
        "dropout and noise": Case(5, models.dropped, **UNEVEN),
        "dropout and noise, even": Case(5, models.dropped),
        "dropout of recurrent layers": Case(5, models.recurrent_dropped, **UNEVEN),
        "random numbers of all kinds": Case(5, models.noisy, **LAST_OF_ONE),
        "augmentation": Case(5, models.augmented, **UNEVEN),
    }


def _precision() -> dict[str, Case]:
    # The same run in float32 and in bfloat16 differs by 7e-2: bfloat16 has 8 bits.
    return {"mixed_bfloat16": Case(6, precision="mixed_bfloat16", tolerance=2e-2, **UNEVEN)}


class Hits(keras.metrics.Metric):
    """A metric of the user's own: rows that are right, and rows."""

    def __init__(self) -> None:
        super().__init__(name="hits")
        self.right = self.add_weight(name="right", initializer="zeros")
        self.seen = self.add_weight(name="seen", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        right = tf.argmax(y_pred, -1) == tf.argmax(y_true, -1)
        self.right.assign_add(tf.reduce_sum(tf.cast(right, tf.float32)))
        self.seen.assign_add(tf.cast(tf.shape(y_true)[0], tf.float32))

    def result(self) -> Any:
        return self.right / self.seen


def spread(y_true: Any, y_pred: Any) -> Any:
    """A metric function of one number for a batch, neither a sum nor a mean over rows."""
    return tf.math.reduce_std(y_pred)


def _all_metrics() -> dict[str, Any]:
    return {
        "loss": "categorical_crossentropy",
        "metrics": [
            "accuracy",
            keras.metrics.AUC(name="auc"),
            keras.metrics.F1Score(name="f1"),
            keras.metrics.TopKCategoricalAccuracy(2, name="top2"),
            keras.metrics.MeanSquaredError(name="mse"),
            Hits(),
            spread,
        ],
        "weighted_metrics": [
            keras.metrics.CategoricalAccuracy(name="wacc"),
            keras.metrics.AUC(name="wauc"),
        ],
    }


def _metrics() -> dict[str, Case]:
    return {
        "metrics of all kinds": Case(
            7, feed=data.weighted_one_hot, compile=_all_metrics, **LAST_OF_ONE
        )
    }


def _executions() -> dict[str, Case]:
    def several(steps: int, **options: Any) -> Case:
        return Case(8, compile=_compiled(steps_per_execution=steps), **options)

    return {
        "7 steps an execution": several(7, rows=100, batch=10),
        "20 steps an execution": several(20, rows=100, batch=3),
        "3 steps an execution, BatchNormalization": several(
            3,
            build=models.batch_normalized,
            prepare={"sync_batch_norm": True},
            **LAST_OF_ONE,
        ),
    }


def _feeds() -> dict[str, Case]:
    return {
        "Dataset": Case(10, feed=data.dataset, **LAST_OF_ONE),
        "Dataset of unknown length": Case(10, feed=data.unknown_length, **UNEVEN),
        "repeated Dataset": Case(10, feed=data.repeated),
        "PyDataset": Case(10, feed=data.pydataset, **UNEVEN),
    }


CASES: dict[str, Case] = {
    **_one_row_shares(),
    **_models(),
    **_losses(),
    **_optimizers(),
    **_normalization(),
    **_randomness(),
    **_precision(),
    **_metrics(),
    **_executions(),
    **_feeds(),
}

# The core: one case of each kind, for a quick look.
CORE = [
    "uneven",
    "uneven-last of one",
    "mean_with_sample_weight",
    "function of one number, a root",
    "adam",
    "global_clipnorm",
    "microbatches",
    "BatchNormalization, synchronized, uneven",
    "dropout and noise",
]


def run_case(case: Case, strategy: tf.distribute.Strategy, plain: bool) -> dict[str, Any]:
    """Returns what some epochs of a case leave, as arrays by name."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    with strategy.scope():
        keras.config.set_dtype_policy(case.precision)
        model = case.build()
        keras.config.set_dtype_policy("float32")
        if case.prepare_first and not plain:
            prepare(model, **case.prepare)
        options = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}
        model.compile(OPTIMIZERS[case.optimizer](), **{**options, **case.compile()})
        if not case.prepare_first and not plain:
            prepare(model, **case.prepare)
    validation = validation_of(case.feed)
    history = model.fit(
        **case.feed(case.rows, case.batch),
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        validation_data=validation,
        validation_batch_size=None if isinstance(validation, tf.data.Dataset) else 16,
    ).history
    left = {f"history/{key}": np.array(values) for key, values in history.items()}
    left |= {f"weight/{i}": w for i, w in enumerate(model.get_weights())}
    left |= {
        f"slot/{i}": keras.ops.convert_to_numpy(v) for i, v in enumerate(model.optimizer.variables)
    }
    if case.row == 1:
        x, y = validation
        found = model.evaluate(x, y, batch_size=10, verbose=0, return_dict=True)
        left |= {f"evaluate/{key}": np.array(value) for key, value in found.items()}
        left["predict"] = model.predict(x, batch_size=10, verbose=0)
    return left


def main(out: str, kind: str, replicas: str | None = None, names: str | None = None) -> None:
    plain = kind == "plain"
    strategy = (
        tf.distribute.get_strategy()
        if plain
        else make_strategy(kind, replicas=int(replicas) if replicas else None)
    )
    results: dict[str, Any] = {}
    chosen = names.split("|") if names else CASES
    for name in chosen:
        started = time.perf_counter()
        left = run_case(CASES[name], strategy, plain)
        results |= {f"{name}|{key}": value for key, value in left.items()}
        print(f"{time.perf_counter() - started:6.2f} s  {name}", flush=True)
    np.savez(out.replace("RANK", str(placement_of(strategy).rank)), **results)


if __name__ == "__main__":
    main(*sys.argv[1:])

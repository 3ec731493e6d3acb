"""Training runs whose numbers tests compare: the same run by plain Keras and by tfmulti.

    python -m tests.support.cases OUT.npz STRATEGY [REPLICAS]

runs every case in one process (one strategy, one number of replicas) and writes what each
left: weights, optimizer slots, history, evaluation, prediction. STRATEGY `plain` is Keras
alone on one device, without tfmulti.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti import make_strategy, prepare
from tfmulti.strategies import placement_of

EVEN_ROWS, EVEN_BATCH = 96, 24  # divides by 1, 2, 3, 4 and 8 replicas
UNEVEN_ROWS, UNEVEN_BATCH = 100, 33  # 33, 33, 33 and a last batch of one row
CLASSES = 3

_rng = np.random.default_rng(11)
X = _rng.standard_normal((UNEVEN_ROWS, 8)).astype(np.float32)
Y = _rng.integers(CLASSES, size=UNEVEN_ROWS).astype(np.int32)
XV = _rng.standard_normal((41, 8)).astype(np.float32)
YV = _rng.integers(CLASSES, size=41).astype(np.int32)
WEIGHTS = _rng.uniform(0.2, 2.0, size=UNEVEN_ROWS).astype(np.float32)


def functional() -> keras.Model:
    inputs = keras.Input((8,))
    x = keras.layers.Dense(16, "tanh")(inputs)
    return keras.Model(inputs, keras.layers.Dense(CLASSES, "softmax")(x))


def sequential() -> keras.Model:
    return keras.Sequential(  # no Input: built by fit
        [keras.layers.Dense(16, "tanh"), keras.layers.Dense(CLASSES, "softmax")]
    )


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(16, "tanh")
        self.out = keras.layers.Dense(CLASSES, "softmax")

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))


class CustomStep(keras.Model):
    """A train_step of its own in the way of Keras' guide, with a loss tracker of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(16, "tanh")
        self.out = keras.layers.Dense(CLASSES, "softmax")
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.hits = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
        self.loss_object = keras.losses.SparseCategoricalCrossentropy()

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))

    @property
    def metrics(self) -> list[keras.metrics.Metric]:
        return [self.loss_tracker, self.hits]

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.loss_object(y, y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.loss_tracker.update_state(loss, sample_weight=tf.shape(x)[0])
        self.hits.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        y_pred = self(x, training=False)
        self.loss_tracker.update_state(self.loss_object(y, y_pred), sample_weight=tf.shape(x)[0])
        self.hits.update_state(y, y_pred)
        return {metric.name: metric.result() for metric in self.metrics}


def convolutional() -> keras.Model:
    """Layers that fail on a share without rows: convolution, pooling, recurrence."""
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Reshape((8, 1)),
            keras.layers.Conv1D(4, 3, activation="relu"),
            keras.layers.MaxPooling1D(2),
            keras.layers.LayerNormalization(),
            keras.layers.LSTM(5),
            keras.layers.Dense(CLASSES, "softmax"),
        ]
    )


def mean_loss(y_true: Any, y_pred: Any) -> Any:
    """A loss that is one number already."""
    return tf.reduce_mean(keras.losses.sparse_categorical_crossentropy(y_true, y_pred))


OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "clipped": lambda: keras.optimizers.SGD(0.5, global_clipnorm=0.1),
}

Fit = dict[str, Any]


def masked() -> keras.Model:
    """A loss a step, over the steps that are not masked."""
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Embedding(4, 6, mask_zero=True),
            keras.layers.LSTM(5, return_sequences=True),
            keras.layers.Dense(CLASSES, "softmax"),
        ]
    )


def steps_of(values: np.ndarray) -> np.ndarray:
    """Returns whole numbers 0..3 from the inputs; 0 is masked."""
    return np.clip(np.round(values) + 1, 0, 3).astype(np.int32)


def tokens(rows: int, batch: int) -> Fit:
    return {"x": steps_of(X[:rows]), "y": steps_of(X[:rows]) % CLASSES, "batch_size": batch}


def arrays(rows: int, batch: int) -> Fit:
    return {"x": X[:rows], "y": Y[:rows], "batch_size": batch}


def weighted(rows: int, batch: int) -> Fit:
    return {**arrays(rows, batch), "sample_weight": WEIGHTS[:rows]}


def class_weighted(rows: int, batch: int) -> Fit:
    return {**arrays(rows, batch), "class_weight": {0: 0.5, 2: 3.0}}


def dataset(rows: int, batch: int) -> Fit:
    return {"x": tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(batch)}


def unknown_length(rows: int, batch: int) -> Fit:
    return {"x": dataset(rows, batch)["x"].filter(lambda x, y: True)}


def repeated(rows: int, batch: int) -> Fit:
    return {"x": dataset(rows, batch)["x"].repeat(), "steps_per_epoch": 5}


class Batches(keras.utils.PyDataset):
    def __init__(self, rows: int, batch: int) -> None:
        super().__init__()
        self.rows, self.batch = rows, batch

    def __len__(self) -> int:
        return -(-self.rows // self.batch)

    def __getitem__(self, index: int) -> Any:
        part = slice(index * self.batch, min((index + 1) * self.batch, self.rows))
        return X[part], Y[part]


def pydataset(rows: int, batch: int) -> Fit:
    return {"x": Batches(rows, batch)}


@dataclass(frozen=True)
class Case:
    build: Callable[[], keras.Model]
    optimizer: str = "sgd"
    feed: Callable[[int, int], Fit] = arrays
    rows: int = EVEN_ROWS
    batch: int = EVEN_BATCH
    prepare_first: bool = True
    compile: dict[str, Any] = field(default_factory=dict)
    validation: Callable[[], tuple[np.ndarray, np.ndarray]] = lambda: (XV, YV)


def tokens_to_validate() -> tuple[np.ndarray, np.ndarray]:
    return steps_of(XV), steps_of(XV) % CLASSES


def _loss(reduction: str) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(reduction=reduction)


def _kinds() -> dict[str, Case]:
    builders = {
        "functional": functional,
        "sequential": sequential,
        "subclassed": Subclassed,
        "custom_step": CustomStep,
    }
    return {
        f"{kind}-{optimizer}": Case(build, optimizer, prepare_first=optimizer == "sgd")
        for kind, build in builders.items()
        for optimizer in ("sgd", "adam")
    }


UNEVEN: dict[str, Any] = {"rows": UNEVEN_ROWS, "batch": UNEVEN_BATCH}

CASES: dict[str, Case] = {
    **_kinds(),
    "uneven": Case(functional, **UNEVEN),
    "uneven-custom_step": Case(CustomStep, **UNEVEN),
    "clipped": Case(functional, "clipped", **UNEVEN),
    "sample_weight": Case(functional, feed=weighted),
    "class_weight": Case(functional, feed=class_weighted),
    "dataset": Case(functional, feed=dataset, **UNEVEN),
    "unknown_length": Case(functional, feed=unknown_length, **UNEVEN),
    "repeated": Case(functional, feed=repeated),
    "pydataset": Case(functional, feed=pydataset, **UNEVEN),
    "one_row_last": Case(convolutional, rows=25, batch=24),
    "scalar_loss": Case(functional, compile={"loss": mean_loss}, **UNEVEN),
    "sum": Case(functional, compile={"loss": _loss("sum")}, **UNEVEN),
    "mean_by_weight": Case(
        functional, feed=weighted, compile={"loss": _loss("mean_with_sample_weight")}, **UNEVEN
    ),
    "masked": Case(masked, feed=tokens, validation=tokens_to_validate, **UNEVEN),
    "several_steps": Case(functional, compile={"steps_per_execution": 3}, **UNEVEN),
    "eagerly": Case(functional, compile={"run_eagerly": True}),
}


# Run with every number of replicas; the others show what does not depend on it.
IN_ALL_SIZES = [
    "functional-sgd",
    "functional-adam",
    "uneven",
    "uneven-custom_step",
    "clipped",
    "one_row_last",
]


def run_case(
    name: str, case: Case, strategy: tf.distribute.Strategy, plain: bool
) -> dict[str, Any]:
    """Returns what three epochs of a case leave, as arrays by name."""
    keras.utils.set_random_seed(7)
    with strategy.scope():
        model = case.build()
        if case.prepare_first and not plain:
            prepare(model)
        model.compile(
            OPTIMIZERS[case.optimizer](),
            **{
                "loss": "sparse_categorical_crossentropy",
                "metrics": ["accuracy"],
                **case.compile,
            },
        )
        if not case.prepare_first and not plain:
            prepare(model)
    history = model.fit(
        **case.feed(case.rows, case.batch),
        epochs=3,
        shuffle=False,
        verbose=0,
        validation_data=case.validation(),
        validation_batch_size=16,
    ).history
    left = {f"history/{key}": np.array(values) for key, values in history.items()}
    left |= {f"weight/{i}": w for i, w in enumerate(model.get_weights())}
    left |= {
        f"slot/{i}": keras.ops.convert_to_numpy(v) for i, v in enumerate(model.optimizer.variables)
    }
    xv, yv = case.validation()
    found = model.evaluate(xv, yv, batch_size=10, verbose=0, return_dict=True)
    left |= {f"evaluate/{key}": np.array(value) for key, value in found.items()}
    left["predict"] = model.predict(xv, batch_size=10, verbose=0)
    return {f"{name}|{key}": value for key, value in left.items()}


def main(out: str, kind: str, replicas: str | None = None) -> None:
    plain = kind == "plain"
    strategy = (
        tf.distribute.get_strategy()
        if plain
        else make_strategy(kind, replicas=int(replicas) if replicas else None)
    )
    results: dict[str, Any] = {}
    names = IN_ALL_SIZES if strategy.num_replicas_in_sync > 2 and kind == "mirrored" else CASES
    for name in names:
        case = CASES[name]
        results |= run_case(name, case, strategy, plain)
    np.savez(out.replace("RANK", str(placement_of(strategy).rank)), **results)


if __name__ == "__main__":
    main(*sys.argv[1:])

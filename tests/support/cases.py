"""Training runs whose numbers tests compare: the same run by plain Keras and by tfmulti.

    python -m tests.support.cases OUT.npz PLACE 'CASE|CASE|…'

runs the cases in one process (one strategy, one number of replicas) and writes what each
left: weights, optimizer slots, history, evaluation, prediction. The place `plain` is Keras
alone on one device, without tfmulti.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.support import data, models
from tests.support.data import Fit, arrays, validation_of
from tests.support.places import BEFORE_RELEASE
from tfmulti import make_strategy, prepare
from tfmulti.distribution.strategies import placement_of

EPOCHS = 2

PLACES = ("one_device", "mirrored-2", "mirrored-3", "mirrored-8", "workers-2", "workers-3")
# More replicas than two cannot change these cases.
TWO: dict[str, Any] = {"replicas": "mirrored-2"}

OPTIMIZERS: dict[str, Callable[[], keras.optimizers.Optimizer]] = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "nesterov": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "lamb": lambda: keras.optimizers.Lamb(0.01),
    "adafactor": lambda: keras.optimizers.Adafactor(0.01),
    "lion": lambda: keras.optimizers.Lion(0.001),
    "muon": lambda: keras.optimizers.Muon(
        0.01, weight_decay=0.1, adam_weight_decay=0.9, exclude_layers=["dense_1"]
    ),
    "nadam": lambda: keras.optimizers.Nadam(0.01),
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


def contrastive_loss(y_true: Any, y_pred: Any) -> Any:
    """A value for each row, which depends on all others: which of them it is most like."""
    likeness = tf.matmul(y_pred, y_pred, transpose_b=True)
    same = tf.cast(tf.reshape(y_true, [-1, 1]) == tf.reshape(y_true, [1, -1]), y_pred.dtype)
    return tf.reduce_mean(tf.square(same - likeness), -1)


class OwnCall(keras.losses.Loss):
    """Returns one number past everything that Keras does around a loss."""

    def __call__(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        return root_loss(y_true, y_pred)


def _entropy_of_all() -> keras.losses.Loss:
    return keras.losses.CategoricalCrossentropy(reduction="sum")


class Together(keras.losses.Loss):
    """Losses within a loss, one of them of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.dice, self.entropy = keras.losses.Dice(), _entropy_of_all()

    def call(self, y_true: Any, y_pred: Any) -> Any:
        return self.dice(y_true, y_pred) + 0.1 * self.entropy(y_true, y_pred)


def _loss(reduction: str) -> keras.losses.Loss:
    return keras.losses.SparseCategoricalCrossentropy(reduction=reduction)


@dataclass(frozen=True)
class Case:
    """One run.

    `row` is the number of its promise in the table of docs/exactness.md. `compare` says
    what it must equal: Keras alone, or tfmulti on one device where Keras alone is not right.
    `replicas` is the place of several replicas that it runs at in CI, unless it runs on workers.
    `places` are all those that it runs at. Keras alone gets `plain_feed`, where it is another one.
    It `validates` where evaluation is a question. `alone` is how much one device may differ.
    """

    row: int
    build: Callable[[], keras.Model] = models.functional
    optimizer: str = "sgd"
    feed: Callable[[int, int], Fit] = arrays
    plain_feed: Callable[[int, int], Fit] | None = None
    rows: int = 96
    batch: int = 24
    compile: Callable[[], dict[str, Any]] = dict
    prepare: dict[str, Any] = field(default_factory=dict)
    prepare_first: bool = True
    precision: str = "float32"
    tolerance: float = 1e-6
    compare: str = "plain"
    replicas: str = "mirrored-3"
    places: tuple[str, ...] = PLACES
    validates: bool = False
    alone: float = 0.0


# The gradient of BatchNormalization is one kernel of TensorFlow's. It rounds otherwise than Keras'
# operations: 0.6e-7 to 2.3e-7 were seen, by the instructions that the processor has.
NORMALIZED: dict[str, Any] = {"build": models.batch_normalized, "alone": 4e-7}
LAST_OF_ONE: dict[str, Any] = {"rows": 100, "batch": 33}  # 33, 33, 33, 1
UNEVEN: dict[str, Any] = {"rows": 100, "batch": 30}  # 30, 30, 30, 10: on 8 replicas 4 or 3, 2 or 1
FEW: dict[str, Any] = {"rows": 14, "batch": 2}  # on 3 and on 8 replicas some have no row ever
SIX: dict[str, Any] = {"rows": 31, "batch": 6}  # on 8 replicas two have none, then seven


def _compiled(**options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: options


def _shares() -> dict[str, Case]:
    return {
        "even": Case(1),
        "uneven": Case(1, **UNEVEN),
        "uneven-last of one": Case(1, **LAST_OF_ONE),
        "fewer rows than replicas": Case(1, **FEW),
        "convolution, recurrence, last of one": Case(
            1, models.convolutional, alone=1e-7, rows=25, batch=24
        ),
    }


def _models() -> dict[str, Case]:
    return {
        "even-adam": Case(1, optimizer="adam"),
        "sequential": Case(1, models.sequential, prepare_first=False),
        "sequential-adam": Case(1, models.sequential, "adam"),
        "subclassed": Case(1, models.Subclassed, prepare_first=False),
        "subclassed-adam": Case(1, models.Subclassed, "adam"),
        "own train_step": Case(1, models.CustomStep, **LAST_OF_ONE),
        "own train_step-adam": Case(1, models.CustomStep, "adam", prepare_first=False),
        "own train_step, tracker of batches": Case(1, models.TracksBatches, **LAST_OF_ONE),
        "train_step of TensorFlow's guide": Case(1, models.GuideStep, **UNEVEN),
        "train_step of TensorFlow's guide, with a batch size": Case(
            1, models.GuideStepOf30, **TWO, **UNEVEN
        ),
        "eagerly": Case(1, compile=_compiled(run_eagerly=True), **UNEVEN),
    }


def _losses() -> dict[str, Case]:
    return {
        "sum": Case(
            2,
            validates=True,
            compile=lambda: {"loss": _loss("sum")},
            optimizer="clipvalue",
            **LAST_OF_ONE,
        ),
        "none": Case(
            2, **TWO, compile=lambda: {"loss": _loss("none")}, optimizer="clipvalue", **UNEVEN
        ),
        "mean_with_sample_weight": Case(
            2,
            validates=True,
            feed=data.weighted,
            compile=lambda: {"loss": _loss("mean_with_sample_weight")},
            **LAST_OF_ONE,
        ),
        "function of one number, a mean": Case(
            2, **TWO, compile=_compiled(loss=mean_loss), **LAST_OF_ONE
        ),
        "function of one number, a sum": Case(
            2, compile=_compiled(loss=sum_loss), optimizer="clipvalue", **UNEVEN
        ),
        "function of one number, a root": Case(
            2, validates=True, compile=_compiled(loss=root_loss), **LAST_OF_ONE
        ),
        "function of one number, weighted": Case(
            2, **TWO, feed=data.weighted, compile=_compiled(loss=root_loss), **UNEVEN
        ),
        "losses within a loss": Case(
            2,
            feed=data.one_hot,
            compile=lambda: {"loss": Together(), "metrics": [keras.losses.Dice()]},
            **LAST_OF_ONE,
        ),
        "a loss with its own __call__": Case(
            2, compile=lambda: {"loss": OwnCall()}, **TWO, **LAST_OF_ONE
        ),
        "function of a vector over all rows": Case(
            2,
            validates=True,
            compile=_compiled(loss=contrastive_loss, metrics=[contrastive_loss]),
            **LAST_OF_ONE,
        ),
        "Circle": Case(2, compile=lambda: {"loss": keras.losses.Circle(gamma=4)}, **TWO, **UNEVEN),
        "function of a vector": Case(2, compile=_compiled(loss=vector_loss), **UNEVEN),
        "add_loss": Case(2, build=models.with_added_losses, validates=True, **UNEVEN),
        "regularizers": Case(2, models.regularized, **UNEVEN),
        "two outputs, loss weights": Case(
            2,
            build=models.of_two_outputs,
            validates=True,
            feed=data.two_outputs,
            compile=lambda: {
                "loss": {"kind": "sparse_categorical_crossentropy", "size": "mse"},
                "loss_weights": {"kind": 1.0, "size": 0.3},
                "metrics": {"kind": "accuracy", "size": "mae"},
            },
            **UNEVEN,
        ),
        "sample_weight": Case(2, **TWO, feed=data.weighted, **UNEVEN),
        "class_weight": Case(2, **TWO, feed=data.class_weighted, **UNEVEN),
        "masked steps": Case(2, build=models.masked, **TWO, feed=data.tokens, **LAST_OF_ONE),
        "masked steps, weighted": Case(
            2,
            build=models.masked,
            validates=True,
            feed=data.weighted_tokens,
            compile=lambda: {"loss": _loss("mean_with_sample_weight")},
            **UNEVEN,
        ),
        "dict inputs": Case(
            2, build=models.of_two_inputs, validates=True, feed=data.dictionaries, **UNEVEN
        ),
        "ragged inputs": Case(
            2, build=models.OfRaggedRows, validates=True, feed=data.ragged, **UNEVEN
        ),
        "ragged inputs of Keras' own layers": Case(
            2, build=models.of_ragged_tokens, feed=data.ragged, **UNEVEN
        ),
        "sparse inputs of Keras' own layers": Case(
            2, build=models.of_sparse_rows, feed=data.sparse, **UNEVEN
        ),
    }


def _optimizers() -> dict[str, Case]:
    # An optimizer gets the global gradient at all places.
    replicas: dict[str, Any] = {"global_clipnorm": {}, "accumulation": {}, "adam": {}}
    cases = {
        name: Case(3, optimizer=name, **UNEVEN, **replicas.get(name, TWO))
        for name in OPTIMIZERS
        if name != "sgd"
    }
    parts: dict[str, Any] = {"prepare": {"microbatches": 2}}
    cases |= {
        "microbatches": Case(
            3, optimizer="global_clipnorm", prepare={"microbatches": 3}, **LAST_OF_ONE
        ),
        "microbatches, even": Case(3, **TWO, optimizer="adam", **parts),
        "microbatches, masked steps": Case(
            3, build=models.masked, **TWO, feed=data.tokens, **parts, **LAST_OF_ONE
        ),
        "microbatches, sum": Case(
            3,
            optimizer="clipvalue",
            compile=lambda: {"loss": _loss("sum")},
            **parts,
            **UNEVEN,
        ),
        "microbatches, dropout": Case(3, models.dropped, **parts, **UNEVEN),
        "microbatches, regularizers": Case(3, models.regularized, **parts, **TWO, **UNEVEN),
        "microbatches, own train_step": Case(3, build=models.CustomStep, **TWO, **parts, **UNEVEN),
    }
    return cases


def _normalization() -> dict[str, Case]:
    return {
        "BatchNormalization, synchronized, even": Case(4, **NORMALIZED),
        "BatchNormalization, synchronized, uneven": Case(
            4, **NORMALIZED, validates=True, **LAST_OF_ONE
        ),
        "BatchNormalization, synchronized, empty": Case(4, **NORMALIZED, **SIX),
        "BatchNormalization of images": Case(
            4, build=models.images_normalized, alone=1e-6, validates=True, **UNEVEN
        ),
        "GroupNormalization, LayerNormalization": Case(
            4, models.group_normalized, alone=1e-6, **UNEVEN
        ),
        "LayerNormalization, attention": Case(
            4, models.attentive, feed=data.tokens, alone=1e-6, validates=True, **UNEVEN
        ),
    }


def _randomness() -> dict[str, Case]:
    return {
        "dropout and noise": Case(5, models.dropped, **UNEVEN),
        "dropout and noise, even": Case(5, build=models.dropped, **TWO),
        "dropout of recurrent layers": Case(5, models.recurrent_dropped, **UNEVEN),
        "random numbers of all kinds": Case(5, models.noisy, **LAST_OF_ONE),
        "random numbers of all kinds, even": Case(5, models.noisy, **TWO),
        "augmentation": Case(5, models.augmented, **UNEVEN),
        "augmentation by histograms of all rows": Case(5, models.equalized, **UNEVEN),
    }


def _precision() -> dict[str, Case]:
    # bfloat16 keeps 8 bits of a number: one step between two of them is 2**-8 of its size.
    return {"mixed_bfloat16": Case(6, precision="mixed_bfloat16", tolerance=2**-8, **UNEVEN)}


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
            keras.metrics.AUC(50, name="auc"),
            keras.metrics.F1Score(name="f1"),
            keras.metrics.TopKCategoricalAccuracy(2, name="top2"),
            keras.metrics.MeanSquaredError(name="mse"),
            Hits(),
            spread,
        ],
        "weighted_metrics": [
            keras.metrics.CategoricalAccuracy(name="wacc"),
            keras.metrics.AUC(20, name="wauc"),
        ],
    }


def _metrics() -> dict[str, Case]:
    return {
        "metrics of all kinds": Case(
            7, validates=True, feed=data.weighted_one_hot, compile=_all_metrics, **LAST_OF_ONE
        )
    }


def _executions() -> dict[str, Case]:
    def several(steps: int, loss: Any = None, **options: Any) -> Case:
        compiled = {"steps_per_execution": steps, **({"loss": loss} if loss else {})}
        return Case(8, compile=lambda: compiled, **options)

    return {
        "7 steps an execution": several(7, rows=100, batch=10),
        "20 steps an execution": several(20, rows=100, batch=3),
        "3 steps an execution, function of one number": several(
            3, loss=root_loss, rows=100, batch=40
        ),
        "3 steps an execution, BatchNormalization": several(
            3,
            **NORMALIZED,
            **LAST_OF_ONE,
        ),
    }


def _feeds() -> dict[str, Case]:
    return {
        "Dataset": Case(10, **TWO, feed=data.dataset, **LAST_OF_ONE),
        "Dataset of unknown length": Case(
            10,
            models.dropped,
            "adam",
            feed=data.unknown_length,
            compare="one_device",  # Keras alone counts a step that finds no data
            **UNEVEN,
            **TWO,
        ),
        "repeated Dataset": Case(10, **TWO, feed=data.repeated),
        "PyDataset": Case(10, feed=data.pydataset, **UNEVEN),
        "Source": Case(
            10, models.dropped, feed=data.source, plain_feed=arrays, **TWO, **LAST_OF_ONE
        ),
        "Source, bad records left out": Case(
            10,
            models.dropped,
            feed=data.with_bad_rows,
            plain_feed=data.without_bad_rows,
            prepare={"skip_bad_records": len(data.BAD)},
            **UNEVEN,
        ),
        "Source, bad records left out, 3 steps an execution": Case(
            10,
            **NORMALIZED,
            feed=data.with_bad_rows,
            plain_feed=data.without_bad_rows,
            prepare={"skip_bad_records": len(data.BAD)},
            compile=_compiled(steps_per_execution=3),
            **UNEVEN,
            **TWO,
        ),
    }


CASES: dict[str, Case] = {
    **_shares(),
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

# The core: one case of each kind at some places, for a quick look.
CORE = [
    "uneven-last of one",
    "mean_with_sample_weight",
    "global_clipnorm",
    "BatchNormalization, synchronized, uneven",
    "dropout and noise",
]
CORE_PLACES = ["one_device", "mirrored-3", "mirrored-8", "workers-2"]

# In CI these cases run on two workers and the others on replicas, so that each kind of case runs at
# both kinds of places.
ON_WORKERS = {
    "even",
    "convolution, recurrence, last of one",
    "subclassed",
    "own train_step-adam",
    "sum",
    "function of one number, weighted",
    "a loss with its own __call__",
    "function of a vector over all rows",
    "add_loss",
    "dict inputs",
    "ragged inputs of Keras' own layers",
    "lamb",
    "clipnorm",
    "microbatches, sum",
    "microbatches, own train_step",
    "BatchNormalization, synchronized, even",
    "BatchNormalization of images",
    "GroupNormalization, LayerNormalization",
    "dropout of recurrent layers",
    "augmentation by histograms of all rows",
    "7 steps an execution",
    "3 steps an execution, function of one number",
    "Dataset of unknown length",
    "PyDataset",
    "Source",
    "Source, bad records left out",
}
# In CI these cases run at both kinds of places.
ON_BOTH = {*CORE, "eagerly", "accumulation", "mixed_bfloat16", "metrics of all kinds"}
# In CI these cases run on one device, too, where they must be equal to Keras alone.
ON_ONE_DEVICE = {
    *CORE,
    "even",
    "convolution, recurrence, last of one",
    "subclassed",
    "own train_step",
    "train_step of TensorFlow's guide",
    "eagerly",
    "function of one number, a root",
    "regularizers",
    "two outputs, loss weights",
    "ragged inputs",
    "sparse inputs of Keras' own layers",
    "accumulation",
    "microbatches",
    "microbatches, dropout",
    "BatchNormalization, synchronized, even",
    "BatchNormalization of images",
    "LayerNormalization, attention",
    "random numbers of all kinds",
    "augmentation",
    "mixed_bfloat16",
    "metrics of all kinds",
    "7 steps an execution",
    "Source",
    "Source, bad records left out",
}
# In CI these cases run with more replicas and workers, most of which have no row of some batches.
ON_MANY = {"uneven-last of one", "dropout and noise"}


def _places_in_ci(name: str, case: Case) -> tuple[str, ...]:
    places = {
        "one_device": name in ON_ONE_DEVICE,
        case.replicas: name not in ON_WORKERS,
        "mirrored-8": name in ON_MANY,
        "workers-2": name in ON_WORKERS | ON_BOTH,
        "workers-3": name in ON_MANY,
    }
    return tuple(place for place, runs in places.items() if runs)


assert CASES.keys() >= ON_WORKERS | ON_BOTH | ON_ONE_DEVICE | ON_MANY
# Before a release each case runs at each place, and is in the table.
if not BEFORE_RELEASE:
    CASES = {name: replace(case, places=_places_in_ci(name, case)) for name, case in CASES.items()}


def run_case(case: Case, strategy: tf.distribute.Strategy, plain: bool) -> dict[str, Any]:
    """Returns what some epochs of a case leave, as arrays by name."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(7)
    with strategy.scope():
        keras.config.set_dtype_policy(case.precision)
        model = case.build()
        keras.config.set_dtype_policy("float32")
        if case.prepare_first and not plain:
            prepare(model, **{"verify": False, **case.prepare})
        options = {"loss": "sparse_categorical_crossentropy", "metrics": ["accuracy"]}
        model.compile(OPTIMIZERS[case.optimizer](), **{**options, **case.compile()})
        if not case.prepare_first and not plain:
            prepare(model, **{"verify": False, **case.prepare})
    validation = validation_of(case.feed)
    batches = isinstance(validation, tf.data.Dataset)
    feed = case.plain_feed if plain and case.plain_feed else case.feed
    history = model.fit(
        **feed(case.rows, case.batch),
        epochs=EPOCHS,
        shuffle=False,
        verbose=0,
        validation_data=validation if case.validates or case.row == 1 else None,
        validation_batch_size=None if batches else 16,
    ).history
    left = {f"history/{key}": np.array(values) for key, values in history.items()}
    left |= {f"weight/{i}": w for i, w in enumerate(model.get_weights())}
    left |= {
        f"slot/{i}": keras.ops.convert_to_numpy(v) for i, v in enumerate(model.optimizer.variables)
    }
    if case.row == 1:
        x, y = validation
        found = model.evaluate(x, y, batch_size=16, verbose=0, return_dict=True)
        left |= {f"evaluate/{key}": np.array(value) for key, value in found.items()}
        left["predict"] = model.predict(x, batch_size=10, verbose=0)
    return left


def main(out: str, place: str, names: str) -> None:
    gc.freeze()  # Keras collects garbage before each: in vain among what was imported
    strategy = strategy_at(place)
    results: dict[str, Any] = {}
    for name in names.split("|"):
        started, before = time.perf_counter(), time.process_time()
        left = run_case(CASES[name], strategy, place == "plain")
        results |= {f"{name}|{key}": value for key, value in left.items()}
        seconds, busy = time.perf_counter() - started, time.process_time() - before
        print(f"{seconds:6.2f} s, {busy:6.2f} s of a core  {name}", flush=True)
    np.savez(out.replace("RANK", str(placement_of(strategy).rank)), **results)


def _parts_of_a_gpu(count: int) -> tf.distribute.Strategy:
    """Returns a strategy over parts of one GPU, without NCCL, which needs several."""
    part = tf.config.LogicalDeviceConfiguration(memory_limit=2000)
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("GPU")[0], [part] * count
    )
    return tf.distribute.MirroredStrategy(
        [f"GPU:{index}" for index in range(count)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def strategy_at(place: str) -> tf.distribute.Strategy:
    """Returns the strategy of a place; one of several workers has TF_CONFIG."""
    kind, _, count = place.partition("-")
    if kind == "plain":
        return tf.distribute.get_strategy()
    if kind == "workers":
        return make_strategy("multi_worker_mirrored")
    if kind == "gpus":
        return _parts_of_a_gpu(int(count))
    return make_strategy(kind, replicas=int(count) if count else None)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Models made outside the scope, and the comparison of the first steps with one device."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tests.support.behaviours.common import X, Y, behaviour, behaviour_at, fit, here
from tfmulti import prepare, verify
from tfmulti.distribution import global_values, replica_context
from tfmulti.distribution.lookup_gradients import Lookup
from tfmulti.errors import VerificationError
from tfmulti.keras_patches import layers, losses
from tfmulti.training.state import relocation
from tfmulti.training.state.trainer_state import state_of
from tfmulti.training.step.step_logs import StepLogs
from tfmulti.training.verification import comparison
from tfmulti.training.verification.comparison import Difference

SEVERAL = ("mirrored", "multi_worker_mirrored")
ONE_STEP = {"epochs": 1, "x": X[:18], "y": Y[:18], "batch_size": 15, "shuffle": False}


def _network(normalizes: bool = False) -> keras.Model:
    keras.utils.set_random_seed(1)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, "relu")(inputs)
    if normalizes:
        hidden = keras.layers.BatchNormalization()(hidden)
    hidden = keras.layers.Dropout(0.25, seed=3)(hidden)
    return keras.Model(inputs, keras.layers.Dense(3, "softmax")(hidden))


def _compile(made: keras.Model) -> None:
    optimizer = keras.optimizers.Adam(0.01, use_ema=True, ema_momentum=0.9)
    optimizer.exclude_from_weight_decay(var_names=["bias"])
    made.compile(optimizer, "sparse_categorical_crossentropy", metrics=["accuracy"])


def _numbers(made: keras.Model, **options: Any) -> list[Any]:
    """Returns what a model learns: history, weights, slots and predictions."""
    history = fit(made, x=X[:50], y=Y[:50], batch_size=15, shuffle=False, **options)
    variables = [*made.weights, *made.optimizer.variables]
    return [
        list(history.values()),
        [np.asarray(v).tolist() for v in variables],
        made.predict(X[:7], verbose=0).tolist(),
    ]


@behaviour
def all_of_it_outside_the_scope() -> Any:
    made = _network(normalizes=True)
    _compile(made)
    return _numbers(prepare(made))


@behaviour
def prepared_and_then_compiled_outside_the_scope() -> Any:
    made = prepare(_network())
    _compile(made)
    return _numbers(made)


@behaviour
def trained_and_then_prepared_outside_the_scope() -> Any:
    """Weights, slots, averages and metrics of an epoch of plain Keras are taken over."""
    made = _network()
    _compile(made)
    fit(made, x=X[:40], y=Y[:40], batch_size=20, shuffle=False, epochs=1)
    before = [np.asarray(v) for v in [*made.variables, *made.optimizer.variables]]
    prepare(made)
    after = [np.asarray(v) for v in [*made.variables, *made.optimizer.variables]]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    return _numbers(made)


@behaviour
def compiled_outside_the_scope() -> Any:
    with here.strategy.scope():
        made = prepare(_network())
    _compile(made)
    return _numbers(made)


@behaviour
def variables_of_its_own_outside_the_scope() -> Any:
    """A `train_step` with variables of TensorFlow's own, in attributes, lists and closures."""
    count = tf.Variable(0.0)

    class Counts(keras.Model):
        def __init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.doubled = [tf.Variable(1.0)]
            self.pair = {"both": (tf.Variable(1.0), tf.Variable(2.0))}

        def train_step(self, data: Any) -> Any:
            count.assign_add(1.0)
            self.doubled[0].assign(self.doubled[0] * 2.0)
            self.pair["both"][1].assign_add(self.pair["both"][0])
            return super().train_step(data)

    plain = _network()
    made = Counts(inputs=plain.inputs, outputs=plain.outputs)
    _compile(made)
    numbers = _numbers(prepare(made), epochs=1)
    step = Counts.train_step
    assert step.__closure__ is not None
    cells = dict(zip(step.__code__.co_freevars, step.__closure__, strict=True))
    own = [cells["count"].cell_contents, made.doubled[0], made.pair["both"][1]]
    return [numbers, [float(np.asarray(v)) for v in own]]


@behaviour
def trained_inside_the_scope() -> Any:
    """All of a program stands inside the scope, `fit` of two optimizers of its own too."""
    with here.strategy.scope():
        made = _own()
        history = fit(made, x=X[:50], y=Y[:50], batch_size=15, shuffle=False)
        return [list(history.values()), [np.asarray(v).tolist() for v in made.weights]]


@behaviour_at(*SEVERAL)
def made_in_the_scope_of_another_strategy() -> Any:
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        made = _network()
    with here.strategy.scope():
        _compile(made)
    assert made.distribute_strategy is not here.strategy
    prepare(made)


class Own(keras.Model):
    """A correct model of the user's own: two optimizers, its own metric, and chance."""

    def __init__(self, wrong: str | None = None) -> None:
        super().__init__()
        self.wrong = wrong
        self.hidden = keras.layers.Dense(8, "tanh")
        self.normalization = keras.layers.BatchNormalization()
        self.dropout = keras.layers.Dropout(0.25, seed=3)
        self.mixing = _Mixing(wrong == "rows are mixed")
        self.last = keras.layers.Dense(3)
        self.second = keras.optimizers.SGD(0.1, momentum=0.9)
        self.total = keras.metrics.Mean(name="total")
        self.largest = _Largest(sums=wrong != "metric")
        self.queue = tf.Variable(tf.zeros([4, 3]), trainable=False)

    @property
    def metrics(self) -> list[Any]:
        return [self.total, self.largest]

    def call(self, x: Any, training: bool = False) -> Any:
        hidden = self.normalization(self.hidden(x), training=training)
        hidden = self.dropout(hidden, training=training)
        return self.last(self.mixing(hidden))

    def train_step(self, data: Any) -> Any:
        x, y = data
        if self.wrong == "chance":
            x = x + tf.random.normal(tf.shape(x))
        with tf.GradientTape() as tape:
            outputs = self(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)
            loss = tf.reduce_mean(losses)
            if self.wrong == "loss":
                loss = loss / tf.distribute.get_strategy().num_replicas_in_sync
        weights = self.trainable_variables
        gradients = tape.gradient(loss, weights)
        self.optimizer.apply(gradients[:2], weights[:2])
        self.second.apply(gradients[2:], weights[2:])
        if self.wrong == "weights":
            weights[0].assign_sub(0.1 * gradients[0])
        if self.wrong == "queue":
            self.queue.assign(tf.concat([outputs, self.queue], 0)[:4])
        self.total.update_state(losses)
        self.largest.update_state(y, outputs)
        return {metric.name: metric.result() for metric in self.metrics}


class _Mixing(keras.layers.Layer):
    def __init__(self, mixes: bool) -> None:
        super().__init__(name="mixing")
        self.mixes = mixes

    def call(self, x: Any) -> Any:
        return x + tf.tensordot(x, x, [[0], [0]])[0] if self.mixes else x


class _Largest(keras.metrics.Metric):
    """Sums the rows' largest outputs; or wrongly keeps the largest of all."""

    def __init__(self, sums: bool) -> None:
        super().__init__(name="largest")
        self.sums = sums
        self.found = self.add_weight(name="found", initializer="zeros")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        rows = tf.reduce_max(y_pred, -1)
        if self.sums:
            self.found.assign_add(tf.reduce_sum(rows))
        else:
            self.found.assign(tf.maximum(tf.convert_to_tensor(self.found), tf.reduce_max(rows)))

    def result(self) -> Any:
        return self.found


def _own(wrong: str | None = None, **options: Any) -> keras.Model:
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        made = Own(wrong)
        made.compile(keras.optimizers.Adam(0.01))
    return prepare(made, **options)


def _state(made: keras.Model) -> list[np.ndarray]:
    variables = [*made.variables, *made.optimizer.variables, *made.second.variables]
    values = [*(v.value for v in variables), made.queue]
    of_each = here.strategy.experimental_local_results
    return [np.asarray(part) for value in values for part in of_each(value)]


@behaviour
def verified_and_then_as_if_not() -> Any:
    """Returns the verdict, and whether nothing is otherwise than without the comparison."""
    runs = []
    for asked in (True, False):
        made = _own(verify=asked, verify_steps=2)
        history = fit(made, **ONE_STEP)
        runs.append([history, _state(made), random.random(), np.random.rand()])
        if asked:
            found = state_of(made).verification
    same = [
        runs[0][0] == runs[1][0],
        all(np.array_equal(a, b) for a, b in zip(runs[0][1], runs[1][1], strict=True)),
        runs[0][2:] == runs[1][2:],
    ]
    before = _state(made)
    again = verify(made, X[:30], Y[:30], batch_size=15)
    same.append(all(np.array_equal(a, b) for a, b in zip(before, _state(made), strict=True)))
    return [found.verdict, found.steps, found.quantities > 20, again.verdict, same]


def _fails(wrong: str) -> Callable[[], Any]:
    def failing() -> Any:
        """Without what makes values of the global batch, most of these would be right."""
        made = _own(wrong)
        with mock.patch.object(global_values, "are_known", return_value=False):
            fit(made, **ONE_STEP)

    failing.__name__ = f"verify finds: {wrong}"
    return failing


for _wrong in ("loss", "rows are mixed", "metric", "chance", "weights", "queue"):
    behaviour_at(*SEVERAL)(_fails(_wrong))


def _compiled(made: keras.Model, **options: Any) -> keras.Model:
    with here.strategy.scope():
        made.compile(keras.optimizers.Adam(0.01), **options)
    return made


def _network_compiled() -> keras.Model:
    made = _network()
    made.compile(keras.optimizers.Adam(0.01), "sparse_categorical_crossentropy")
    return made


def _loss_before_normalization() -> keras.Model:
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, activity_regularizer=keras.regularizers.L2(0.1))(inputs)
    hidden = keras.layers.BatchNormalization()(hidden)
    made = keras.Model(inputs, keras.layers.Dense(3, "softmax")(hidden))
    return _compiled(made, loss="sparse_categorical_crossentropy")


def _same_lookups_on_all() -> keras.Model:
    class Positions(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.table = keras.layers.Embedding(6, 4)

        def call(self, x: Any) -> Any:
            return x[:, :, None] + self.table(tf.range(6))

    layers = [keras.Input((6,)), Positions(), keras.layers.Flatten(), keras.layers.Dense(3)]
    return _compiled(keras.Sequential(layers), loss=_from_logits)


def _from_logits(y: Any, outputs: Any) -> Any:
    return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)


def _loss_by_logits() -> keras.Model:
    def loss(y: Any, outputs: Any) -> Any:
        found = keras.losses.sparse_categorical_crossentropy(y, outputs)
        return tf.sqrt(tf.reduce_mean(found))

    layers = [keras.Input((6,)), keras.layers.Dense(3), keras.layers.Activation("softmax")]
    made = keras.Sequential(layers)
    made.layers[0].set_weights([np.full((6, 3), 9.0) * [[1, 2, 3]], np.zeros(3)])
    return _compiled(made, loss=loss)


def _result_under_another_name() -> keras.Model:
    class Named(keras.Model):
        def train_step(self, data: Any) -> Any:
            return {"score": super().train_step(data)["auc"]}

    inputs = keras.Input((6,))
    made = Named(inputs, keras.layers.Dense(1, "sigmoid")(inputs))
    return _compiled(made, loss="mse", metrics=["auc"])


class Mend(NamedTuple):
    """A model that goes wrong under `kinds` where each of `parts` is replaced."""

    make: Callable[[], keras.Model]
    parts: list[tuple[Any, str, Any]]
    kinds: tuple[str, ...] = SEVERAL


NOT_KNOWN = (global_values, "are_known", lambda share: False)
MENDS = {
    "losses left by other replicas": Mend(
        _loss_before_normalization,
        [(layers, "_left_by_trace", lambda layer: {})],
        kinds=("mirrored",),
    ),
    "rows of a table that all replicas look up": Mend(
        _same_lookups_on_all,
        [(replica_context, "lookups_in", lambda g: [Lookup(g.values, g.indices, False)])],
    ),
    "logits of gathered rows": Mend(_loss_by_logits, [NOT_KNOWN, (losses, "ATTACHED", ())]),
    "a result under another name": Mend(
        _result_under_another_name,
        [NOT_KNOWN, (StepLogs, "_result_of", lambda self, value: None)],
    ),
    "no scope": Mend(_network_compiled, [(relocation, "adopt", lambda model, strategy: 0)]),
}


def _without(name: str) -> Callable[[], Any]:
    def without() -> Any:
        """Returns what verify says with what mends it, and then without."""
        found = []
        mend = MENDS[name]
        for is_mended in (True, False):
            keras.utils.set_random_seed(1)
            with contextlib.nullcontext() if name == "no scope" else here.strategy.scope():
                made = mend.make()
            with contextlib.ExitStack() as replaced:
                for part in mend.parts if not is_mended else ():
                    replaced.enter_context(mock.patch.object(*part))
                try:
                    fit(prepare(made, verify=True), **{**ONE_STEP, "y": Y[:18] % 2})
                    found.append("same")
                except VerificationError as error:
                    found.append(str(error))
        return found

    without.__name__ = f"verify finds without the mend: {name}"
    return behaviour_at(*MENDS[name].kinds)(without)


for _name in MENDS:
    _without(_name)


@behaviour_at(*SEVERAL)
def verified_biases_before_normalizations() -> Any:
    """Their gradients are nothing but rounding, of which Adam makes whole steps."""

    class Steps(keras.Model):
        def train_step(self, data: Any) -> Any:
            return super().train_step(data)

    keras.utils.set_random_seed(1)
    images = np.random.default_rng(4).random((48, 24, 24, 3)).astype(np.float32)
    with here.strategy.scope():
        inputs = keras.Input((24, 24, 3))
        x = inputs
        for filters in (3, 1, 2, 1):
            x = keras.layers.Conv2D(filters, 3, padding="same", bias_initializer="uniform")(x)
            x = keras.layers.Activation("relu")(keras.layers.BatchNormalization()(x))
        outputs = keras.layers.Dense(3, "softmax")(keras.layers.Flatten()(x))
        made = prepare(Steps(inputs, outputs), verify=True)
        made.compile(keras.optimizers.Adam(), "sparse_categorical_crossentropy")
    made.fit(images, Y[:48], batch_size=48, shuffle=False, verbose=0)
    found = state_of(made).verification
    return [found.verdict, found.quantities > 30]


@behaviour_at(*SEVERAL)
def verified_again_from_other_weights() -> Any:
    """Returns how often it is compared where rounding decides once, and the state afterwards."""
    calls = []

    def first_of(found: Any) -> Any:
        calls.append(len(found))
        kink = Difference("weight", "a kernel", 1.0, 0.1, 1.0, 2.0)
        return kink if len(calls) == 1 else comparison_first_of(found)

    comparison_first_of = comparison.first_of
    made = _own()
    with here.strategy.scope():
        made(X[:2])
    before = [np.asarray(v) for v in made.variables]
    with mock.patch.object(comparison, "first_of", first_of):
        found = verify(made, X[:18], Y[:18], batch_size=15)
    after = [np.asarray(v) for v in made.variables]
    same = [np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
    return [found.verdict, len(calls), all(same)]


@behaviour_at(*SEVERAL)
def verify_leaves_the_state_when_it_fails() -> Any:
    made = _own("loss")
    with here.strategy.scope():
        made(X[:2])
    before = [np.asarray(v) for v in made.variables]
    raised = ""
    try:
        fit(made, **ONE_STEP)
    except Exception as error:
        raised = type(error).__name__
    after = [np.asarray(v) for v in made.variables]
    same = [np.array_equal(a, b) for a, b in zip(before, after, strict=True)]
    return [raised, all(same), int(made.optimizer.iterations.numpy())]


@behaviour_at(*SEVERAL)
def verify_with_a_learning_rate_of_nothing() -> Any:
    """A warm-up begins with 0: a wrong gradient shows although no weight would move."""
    keras.utils.set_random_seed(1)
    with here.strategy.scope():
        made = Own("loss")
        made.second.learning_rate = 0.0
        warm_up = keras.optimizers.schedules.CosineDecay(0.0, 10, 0.0, warmup_target=0.1)
        made.compile(keras.optimizers.SGD(warm_up))
    fit(prepare(made), **ONE_STEP)


@behaviour_at(*SEVERAL)
def verify_of_what_is_not_comparable() -> Any:
    """Returns why models are left alone, and whether one of Keras' own is."""
    keras.utils.set_random_seed(1)
    reasons = []
    for options in ({"sync_batch_norm": False}, {"microbatches": 2}):
        with here.strategy.scope():
            made = prepare(_network(normalizes=True), verify=True, **options)
            made.compile("sgd", "sparse_categorical_crossentropy")
        reasons.append(verify(made, X, Y).reason)
    with here.strategy.scope():
        plain = prepare(_network())
        plain.compile("sgd", "sparse_categorical_crossentropy")
    fit(plain, **ONE_STEP)
    return [*reasons, state_of(plain).verification]


@behaviour
def verified_data_is_not_taken() -> Any:
    """Returns whether each kind of data gives the same batches as without the comparison."""

    class Rows(keras.utils.PyDataset):
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return X[index * 12 :][:12], Y[index * 12 :][:12]

    def generated() -> Any:
        for index in range(6):
            noise = np.random.normal(size=(12, 6)).astype(np.float32)
            yield X[index % 3 * 12 :][:12] + noise, Y[index % 3 * 12 :][:12]

    def shuffled() -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices((X[:36], Y[:36])).shuffle(36, seed=1)

    kinds: dict[str, Callable[[], dict[str, Any]]] = {
        "dataset": lambda: {"x": shuffled().batch(12)},
        "of unknown length": lambda: {"x": shuffled().filter(lambda x, y: y < 3).batch(12)},
        "pydataset": lambda: {"x": Rows()},
        "generator": lambda: {"x": generated(), "steps_per_epoch": 3},
    }
    same = {}
    for name, data in kinds.items():
        found = []
        for asked in (True, False):
            keras.utils.set_random_seed(1)
            with here.strategy.scope():
                made = prepare(
                    keras.Sequential([keras.Input((6,)), keras.layers.Dense(3, "softmax")]),
                    verify=asked,
                )
                at_once = 2 if name == "dataset" else 1
                made.compile("sgd", "sparse_categorical_crossentropy", steps_per_execution=at_once)
            given = {"y": None, "batch_size": None, "shuffle": False, **data()}
            history = fit(made, **given)
            found.append([history, [np.asarray(w).tolist() for w in made.weights]])
            if asked:
                verdict = state_of(made).verification.verdict
        same[name] = [verdict, found[0] == found[1]]
    return same

"""Tests, for each patch of Keras, that Keras still needs the patch.

When one fails after an upgrade of Keras, try to remove the function that the test names.
"""

from __future__ import annotations

import random
import threading
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.distribute.values import DistributedVariable

from tests.support.behaviours import behaviour, upstream
from tests.support.places import ONE_DEVICE, SEVERAL, TWO_REPLICAS, TWO_WORKERS
from tfmulti.keras_patches import datasets, installation, random_numbers
from tfmulti.keras_patches.classes import derived_class
from tfmulti.keras_patches.datasets import kind_of, parts_of
from tfmulti.keras_patches.model_structure import (
    flush_tensorboard,
    function_of,
    initial_epoch_of,
    is_built,
    last_operations,
    moving_statistics,
    operations_of,
)
from tfmulti.keras_patches.random_numbers import _next_global_seed, global_seed
from tfmulti.keras_patches.tracing import traces_of
from tfmulti.keras_patches.variables import (
    array_of,
    attributes_of,
    exchange_keys,
    new_tf_variable,
    restore_keys,
    set_strategy,
    set_tf_variable,
    strategy_of,
    tf_variable_of,
    variable_keys,
)
from tfmulti.keras_patches.versions import warn_of_untested
from tfmulti.training.state import relocation

pytestmark = pytest.mark.mirrored


def test_upstream_tensorflow_still_has_no_options_for_some_passes() -> None:
    """This is the reason for `optimized_once`."""
    documented = str(tf.config.optimizer.set_experimental_options.__doc__)
    assert "layout_optimizer" in documented
    assert not {"memory", "iterations"} & set(documented.replace("_", " ").split())


@behaviour(upstream.fit_by_keras, at=[TWO_WORKERS])
def test_upstream_fit_still_fails_on_several_workers(errors: list[list[str]]) -> None:
    """keras#20585 is the reason for `build_from_specs`, and for the `fit` of tfmulti."""
    assert [error for error, _ in errors] == ["ValueError"] * 2


def test_upstream_tensorflow_still_hides_whether_operations_are_deterministic() -> None:
    """This is the reason for `is_for_xla`."""
    public = [*dir(tf.config), *dir(tf.config.experimental)]
    assert [name for name in public if "determinism" in name] == ["enable_op_determinism"]


def test_upstream_numpy_still_cannot_read_a_number_in_bfloat16() -> None:
    """This is the reason for `array_of`."""
    number = tf.constant(1.5, tf.bfloat16)
    with pytest.raises(ValueError, match="not producing an array"):
        np.asarray(number)
    assert array_of(number).shape == ()
    assert float(array_of(number)) == 1.5


@behaviour(upstream.fit_by_keras_with_an_uneven_first_batch, at=[TWO_REPLICAS])
def test_upstream_fit_still_fails_on_an_uneven_first_batch(errors: list[list[str]]) -> None:
    assert "AddN" in errors[0][1]


@behaviour(upstream.mean_squared_error_on_a_replica, at=SEVERAL)
def test_upstream_still_divides_losses_by_the_replicas(results: list[Any]) -> None:
    """The reason for the scaling of losses."""
    assert all(worker == [0.5, 1.0] for worker in results)


@behaviour(upstream.weights_after_a_scalar_loss, at=[TWO_REPLICAS])
def test_upstream_still_counts_a_scalar_loss_for_each_replica(results: list[Any]) -> None:
    """The reason for `Loss.__call__`: two replicas move the weights twice as far."""
    keras_alone, patched = map(np.asarray, results[0])
    assert keras_alone - 1 == pytest.approx(2 * (patched - 1), rel=1e-4)


@behaviour(upstream.weights_after_added_losses_of_rows, at=[TWO_REPLICAS])
def test_upstream_still_divides_the_losses_that_rows_add(
    results: list[Any], one_device: Any
) -> None:
    """The reason for `_aggregate_additional_loss`: a sum over rows is halved on two replicas."""
    keras_alone, patched = map(np.asarray, results[0])
    keras_on_one_device, patched_on_one_device = one_device
    assert keras_on_one_device == patched_on_one_device
    assert patched == pytest.approx(np.asarray(patched_on_one_device), abs=1e-6)
    assert np.abs(keras_alone - keras_on_one_device).max() > 1e-2


@pytest.mark.parametrize("case", ["fit", "train_on_batch"])
@behaviour(upstream.weights_after_a_schedule_free_step, at=SEVERAL)
def test_upstream_still_loses_what_an_optimizer_assigns_when_it_builds(results: list[Any]) -> None:
    """The reason for `warn_of_kept_slots`, and for the row about optimizers in docs/limits.md.

    Plain Keras builds the optimizer while it traces the first step, and drops the assignment.
    """
    for rank, (of_keras, of_tfmulti) in enumerate(results):
        assert of_keras == [pytest.approx(0), 0]
        assert of_tfmulti == [pytest.approx(1), rank == 0]


def test_upstream_still_cannot_order_existing_operations() -> None:
    """The reason for `_add_control_inputs`: its public counterpart can only be read."""
    names = [name for name in dir(tf.Operation) if "control_input" in name]
    assert {"control_inputs", "_add_control_inputs"} <= set(names)
    assert [name for name in names if not name.startswith("_")] == ["control_inputs"]
    # A property without a setter only returns the operations.
    assert isinstance(tf.Operation.control_inputs, property)


class CountingCell(keras.layers.Layer):
    state_size = 2

    def build(self, shape: Any) -> None:
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x: Any, states: Any) -> Any:
        self.count.assign_add(1.0)
        return x, [x]


def test_upstream_still_calls_a_cell_once_more_before_its_loop() -> None:
    """The reason for the call in `_unrolled`, which updates the states of the cell once more."""
    counts = []
    for unroll in (False, True):
        layer = keras.layers.RNN(CountingCell(), unroll=unroll)
        layer(np.zeros((4, 3, 2), np.float32))
        before = float(layer.cell.count)
        layer(np.zeros((4, 3, 2), np.float32))
        counts.append(float(layer.cell.count) - before)
    assert counts == [4, 3]


class CellThatIsNoLayer:
    compute_dtype = "float32"
    state_size = 2

    def get_initial_state(self, batch_size: Any) -> Any:
        return keras.ops.zeros((batch_size, 2))

    def __call__(self, x: Any, states: Any) -> Any:
        return self.call(x, states)

    def call(self, x: Any, states: Any) -> Any:
        return x + states[0], [x + states[0]]


def test_a_cell_need_not_be_a_layer() -> None:
    installation.install()
    x = np.ones((4, 3, 2), np.float32)
    np.testing.assert_array_equal(keras.layers.RNN(CellThatIsNoLayer())(x), np.full((4, 2), 3.0))


@behaviour(upstream.operations_of_a_function, at=[TWO_REPLICAS])
def test_upstream_functions_are_still_one_operation(results: list[Any]) -> None:
    """The reason for `Function.__call__`: nothing tells how such an operation treats the rows."""
    [((outside, inside), *values)] = results
    assert "PartitionedCall" in outside
    assert inside == "Neg"
    assert values == [-2.0, -2.0]


def test_upstream_still_takes_a_number_for_each_row_for_a_bias() -> None:
    """The reason for `backend.tensorflow.numpy.add`."""
    keras_alone, patched = upstream.sums_with_a_number_for_each_row()
    assert keras_alone[0].tolist() == patched[:, 0].tolist() == [0, 1, 2, 3]
    assert keras_alone[:, 0].tolist() == patched[0].tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("case", ["4", "8"])
@behaviour(upstream.training_with_a_number_for_each_row, at=[TWO_REPLICAS])
def test_a_number_for_each_row_is_added_to_its_row(results: list[Any], case: str) -> None:
    """Each replica has four of the eight rows. Only the rows of the batch matter for Keras."""
    [((in_graph, in_eager_mode), told)] = results
    assert in_graph == pytest.approx(in_eager_mode, rel=1e-5)
    assert len(told) == 2 * (case == "8")


@pytest.mark.parametrize("case", ["5", "8"])
@behaviour(
    upstream.warnings_of_predictions_with_a_number_for_each_row, at=[ONE_DEVICE, TWO_REPLICAS]
)
def test_predictions_that_plain_keras_computes_otherwise_are_told(
    results: list[Any], case: str, place: str
) -> None:
    """On one device plain Keras knows the rows in predict alone. Each model tells it once."""
    in_evaluate = place == TWO_REPLICAS
    assert results == [[0, 0] if case == "5" else [in_evaluate, not in_evaluate]]


@behaviour(upstream.metric_function_of_a_batch, at=[TWO_REPLICAS])
def test_upstream_metric_functions_still_see_one_replica(results: list[Any]) -> None:
    """The reason for `MeanMetricWrapper.update_state`."""
    [(keras_alone, patched, expected)] = results
    assert patched == pytest.approx(expected, abs=1e-6)
    assert abs(keras_alone - expected) > 0.1


@behaviour(upstream.dropout_masks_of_replicas, at=[TWO_REPLICAS])
def test_upstream_masks_are_still_the_same_on_all_replicas(results: list[Any]) -> None:
    """The reason for the functions of `backend.random`."""
    (keras_alone, patched), (keras_on_second, patched_on_second) = results[0]
    assert keras_alone == keras_on_second
    assert patched != patched_on_second


@behaviour(upstream.moving_means_of_replicas, at=[TWO_REPLICAS])
def test_upstream_statistics_of_replicas_still_differ(results: list[Any]) -> None:
    """The reason for `moving_statistics`."""
    first, second = map(np.asarray, results[0])
    assert np.abs(first - second).max() > 1e-3


def test_moving_statistics_of_trained_and_unsynchronized_layers() -> None:
    """They belong to layers that train and are not synchronized, and are no weights or seeds."""
    frozen, moving, together = (
        keras.layers.BatchNormalization(name=name) for name in ("frozen", "moving", "together")
    )
    frozen.trainable, together.synchronized = False, True
    inner = keras.Sequential([keras.Input((2,)), moving, keras.layers.Dropout(0.5)])
    made = keras.Sequential([keras.Input((2,)), frozen, inner, together, keras.layers.Dense(2)])
    made.compile("sgd", "mse", metrics=["mae"])
    found = moving_statistics(made, sync_batch_norm=False)
    assert {id(v) for v in found} == {id(moving.moving_mean), id(moving.moving_variance)}
    assert moving_statistics(made, sync_batch_norm=True) == []


@behaviour(upstream.synchronized_variance, at=[TWO_REPLICAS])
def test_upstream_synchronized_statistics_still_lose_digits(results: list[Any]) -> None:
    """A reason for `BatchNormalization._moments`: 0, 1, 2, 3 and any offset have variance 1.25."""
    [(keras_alone, patched)] = results
    assert patched == [1.25]
    assert abs(keras_alone[0] - 1.25) > 0.1


@behaviour(
    upstream.fit_by_keras_with_averages_that_overwrite,
    upstream.fit_by_keras_with_gradient_accumulation,
    upstream.update_by_keras_in_a_condition,
    upstream.weight_decay_by_keras_in_a_condition,
    at=[TWO_REPLICAS],
)
def test_upstream_still_needs_merge_call(errors: list[list[str]]) -> None:
    """The reason for `_UpdatesReplica`, `_backend_update_step` and `_apply_weight_decay`.

    Gradient accumulation calls the last two inside a condition.
    """
    assert "merge_call" in errors[0][1]


@behaviour(upstream.update_and_weight_decay_in_a_condition, at=[TWO_REPLICAS])
def test_patched_optimizers_need_no_merge_call(results: list[Any]) -> None:
    [(updated, decayed)] = results
    assert updated == [[0.5], [0.5]]
    assert decayed == [[0.75], [0.75]]


@behaviour(upstream.loss_functions_of_custom_loops, at=[TWO_REPLICAS])
def test_upstream_functions_of_loops_still_divide_for_a_sum(results: list[Any]) -> None:
    """The reason for `distribution.custom_steps`: two of four rows, 1 and 3, of two replicas.

    tfmulti averages the gradients of the replicas, so their losses must be 2 (the mean of the
    rows) and 4 (not halved).
    """
    assert results == [[[1.0, 2.0], [2.0, 4.0]]]


@behaviour(upstream.step_with_clipped_gradients, at=[TWO_REPLICAS])
def test_upstream_still_clips_before_reducing(results: list[Any]) -> None:
    """The reason for `take_reduced_gradients`.

    The gradients of the replicas are 3 and 0, their mean is 1.5, and values are clipped at 2. The
    global gradient is not clipped. Keras clips the part of replica 0 to 2 before it sums.
    """
    [(keras_alone, patched)] = results
    assert patched == pytest.approx(-1.5)
    assert keras_alone == pytest.approx(-2.0)


def test_data_adapters_are_still_not_exported() -> None:
    assert not hasattr(keras.utils, "get_data_adapter")
    assert callable(datasets.data_adapters.get_data_adapter)


def test_backup_and_restore_still_uses_a_private_name() -> None:
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    assert initial_epoch_of(model, 2) == 2
    model._initial_epoch = 5
    assert initial_epoch_of(model, 2) == 5


def test_tensorboard_still_has_no_flush_of_its_own(tmp_path: Path) -> None:
    """The reason for `flush_tensorboard`."""
    callback = keras.callbacks.TensorBoard(str(tmp_path))
    assert not hasattr(callback, "flush")
    flush_tensorboard(callback)


def test_draws_without_a_seed_still_have_a_generator_in_each_thread() -> None:
    """The reason for `step_generator`: each replica is traced in its own thread."""
    found = [random_numbers.global_seed_generator()]
    thread = threading.Thread(target=lambda: found.append(random_numbers.global_seed_generator()))
    thread.start()
    thread.join()
    assert found[0] is random_numbers.global_seed_generator()
    assert found[0] is not found[1]


def test_tensorflow_still_does_not_tell_what_a_dataset_is_made_of() -> None:
    """The reason for `parts_of` and `kind_of`: resuming depends on the shuffles of a Dataset."""
    assert not hasattr(tf.data.Dataset, "inputs")
    dataset = tf.data.Dataset.range(3).shuffle(3).cache().repeat()
    kinds = []
    while dataset is not None:
        kinds.append(kind_of(dataset))
        dataset = next(iter(parts_of(dataset)), None)
    assert kinds == ["_RepeatDataset", "CacheDataset", "_ShuffleDataset", "_RangeDataset"]
    both = tf.data.Dataset.zip(tf.data.Dataset.range(3), tf.data.Dataset.random())
    assert list(map(kind_of, parts_of(both))) == [
        "_RangeDataset",
        "_RandomDataset",
    ]


def test_keras_still_makes_its_generator_by_a_draw_from_pythons() -> None:
    """The reason for `_next_global_seed`, which returns the state without that draw."""
    keras.utils.clear_session()
    random.seed(1)
    before = random.getstate()
    expected = _next_global_seed()
    assert random.getstate() == before
    assert random_numbers.global_seed_generator().state.numpy().tolist() == expected
    assert random.getstate() != before
    assert _next_global_seed() is random_numbers.global_seed_generator().state


def test_keras_still_has_no_public_name_for_what_makes_a_tensor() -> None:
    """The reason for `last_operations`, which shows if a model returns probabilities or logits."""
    inputs = keras.Input((2,))
    outputs = keras.layers.Dense(3, "softmax")(inputs)
    assert not hasattr(outputs, "operation")
    inner = keras.Model(inputs, outputs)
    layer = keras.layers.Activation("linear", dtype="float32")
    for model in (inner, keras.Sequential([inputs, inner]), keras.Sequential([inner, layer])):
        assert last_operations(model) == [inner.layers[-1]]
    assert last_operations(keras.Model()) is None


def test_a_variables_value_still_has_no_public_setter() -> None:
    """The reason for `_value` and `_initialize`: no public name replaces the value's variable."""
    variable = keras.Variable([1.0, 2.0], trainable=False)
    other = new_tf_variable(variable, np.array([3.0, 4.0], np.float32))
    assert isinstance(other, tf.Variable)
    assert np.asarray(variable).tolist() == [1.0, 2.0]
    set_tf_variable(variable, other)
    assert np.asarray(variable).tolist() == [3.0, 4.0]
    assert tf_variable_of(variable) is other
    with pytest.raises(AttributeError):
        variable.value = other


def test_variables_with_copies_still_have_no_conversions() -> None:
    """If this fails, TensorFlow has them, and `variables.install` can go."""
    installation.install()
    for name in ("__float__", "__int__", "__array__"):
        assert getattr(DistributedVariable, name).__module__.startswith("tfmulti.")


def test_layers_still_hold_nodes_and_tracked_parts_among_their_attributes() -> None:
    """The reason for `attributes_of`."""
    layer = keras.layers.Dense(1)
    layer(keras.Input((2,)))
    assert {"_inbound_nodes", "_outbound_nodes"} <= set(vars(layer))
    names = [name for name, _ in attributes_of(layer)]
    assert not {"_inbound_nodes", "_outbound_nodes"} & set(names)
    tracked = [name.startswith("_self_") for name in names]
    assert any(tracked)
    assert tracked == sorted(tracked)


def test_optimizers_still_know_variables_by_keys_of_their_own() -> None:
    """The reason for `exchange_keys`: an optimizer does not find re-created variables."""
    variable = keras.Variable([1.0, 2.0])
    optimizer = keras.optimizers.SGD(0.5, momentum=0.5)
    optimizer.build([variable])
    keys = variable_keys([optimizer], [variable])
    value = np.array([1.0, 2.0], np.float32)
    set_tf_variable(variable, new_tf_variable(variable, value))
    gradient = tf.ones(2)
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply([gradient], [variable])
    before = exchange_keys([optimizer], keys)
    optimizer.apply([gradient], [variable])
    assert np.asarray(variable).tolist() == [0.5, 1.5]
    restore_keys(before)
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer.apply([gradient], [variable])


def test_registered_names_still_belong_to_one_class_alone() -> None:
    """The reason for the entry that `derived_class` makes in Keras' table of names."""
    own = type("Own", (keras.layers.Layer,), {})
    keras.saving.register_keras_serializable("tests", "own")(own)
    assert keras.saving.get_registered_name(type("Own", (own,), {})) == "Own"
    assert keras.saving.get_registered_name(derived_class(own, (own,))) == "tests>own"


def test_models_and_optimizers_still_keep_their_first_strategy() -> None:
    model, optimizer = keras.Sequential(), keras.optimizers.SGD()
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    for each in (model, optimizer):
        assert strategy_of(each) is None
        set_strategy(each, strategy)
        assert strategy_of(each) is strategy
        set_strategy(each, None)
        assert strategy_of(each) is None


def test_a_scope_still_cannot_be_left_in_public() -> None:
    """The reason for `eager_mode`: TensorFlow refuses the default strategy's scope there."""
    default = tf.distribute.get_strategy()
    with tf.distribute.OneDeviceStrategy("CPU:0").scope():
        with pytest.raises(RuntimeError, match="nest"), default.scope():
            pass
        with relocation.without_strategy("CPU:0"):
            assert not tf.distribute.has_strategy()
            assert tf.executing_eagerly()


def test_a_metric_and_a_tensor_still_have_private_parts() -> None:
    """The reason for the patches of metrics and losses to read them."""
    metric = keras.metrics.MeanMetricWrapper(keras.losses.huber, delta=2.0)
    assert metric._fn_kwargs == {"delta": 2.0}
    assert keras.layers.Masking()(tf.ones([1, 2, 3]))._keras_mask.shape == (1, 2)
    assert keras.activations.sigmoid(tf.ones([1]))._keras_logits.shape == (1,)


def test_operations_metrics_and_traces_are_still_private() -> None:
    inputs = keras.Input((3,))
    made = keras.Model(inputs, keras.ops.flip(keras.layers.Dense(3)(inputs), 0))
    assert [type(o).__name__ for o in operations_of(made)] == ["Flip"]
    # If Keras has a public attribute one day, it has the same operations.
    assert not hasattr(made, "operations") or made.operations
    metric = keras.metrics.MeanMetricWrapper(keras.losses.mean_squared_error)
    assert function_of(metric) is keras.losses.mean_squared_error
    function = tf.function(lambda x: x + 1)
    assert traces_of(function) == []
    function(tf.constant(1))
    assert len(traces_of(function)) == 1


def test_a_tape_still_does_not_tell_which_operations_it_has_recorded() -> None:
    """This is the reason for the patches of `GradientTape._push_tape` and `_pop_tape`."""
    public = {name for name in dir(tf.GradientTape) if not name.startswith("_")}
    assert public == {
        *("batch_jacobian", "gradient", "jacobian", "reset", "stop_recording", "watch"),
        "watched_variables",
    }
    calls: list[str] = []

    class Noted(tf.GradientTape):
        def _push_tape(self) -> None:
            calls.append("push")
            super()._push_tape()

        def _pop_tape(self) -> None:
            calls.append("pop")
            super()._pop_tape()

    with Noted(persistent=True) as tape:
        assert tape._tape is not None
        with tape.stop_recording():
            assert calls == ["push", "pop"]
        tape.reset()
    assert calls == ["push", "pop", "push", "pop", "push", "pop"]


def test_the_mask_of_a_tensor_still_has_no_public_setter() -> None:
    """This is the reason for `set_keras_mask` in `keras_patches.layers`."""
    public = [*dir(keras), *dir(keras.utils), *dir(keras.ops)]
    assert not [name for name in public if "keras_mask" in name]


def test_upstream_loops_that_call_the_same_functions_are_still_not_both_differentiated() -> None:
    """The reason for `_named_anew`."""

    @tf.function
    def slopes(x: tf.Tensor) -> Any:
        first = tf.while_loop(lambda i, v: i < 3, lambda i, v: (i + 1, v * v), (0, x))[1]
        loop = first.op
        attributes = {n: a for n, a in loop.node_def.attr.items() if not n.startswith("_")}
        types = [output.dtype for output in loop.outputs]
        inputs = [2.0 * x if i == first.value_index else t for i, t in enumerate(loop.inputs)]
        again = x.graph.create_op(loop.type, inputs, types, attrs=attributes)
        return tf.gradients([first, again.outputs[first.value_index]], x)

    with pytest.raises(tf.errors.InvalidArgumentError, match="duplicate function"):
        slopes(tf.constant(1.1))


def test_a_metric_still_does_not_tell_whether_it_has_all_its_variables() -> None:
    """The reason for `is_built`."""
    metric = keras.metrics.R2Score()
    assert metric.variables
    assert not hasattr(metric, "built")
    assert not is_built(metric)
    metric.update_state(np.ones((2, 1)), np.ones((2, 1)))
    assert is_built(metric)


def test_a_graph_still_does_not_tell_which_gradients_are_recomputed() -> None:
    """The reason for `_recomputed`."""
    spec = tf.TensorSpec([], tf.float32)
    recomputed = tf.recompute_grad(lambda x: tf.tanh(x))
    graph = tf.function(lambda x: recomputed(x)).get_concrete_function(spec).graph
    [result] = [op for op in graph.get_operations() if op.type == "IdentityN"]
    assert "recompute" not in str(result.node_def)


def test_the_global_seed_is_still_private() -> None:
    keras.utils.set_random_seed(7)
    assert global_seed() == 7
    assert not hasattr(tf.random, "get_global_seed")


def test_an_untested_version_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    warn_of_untested.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_untested()
    monkeypatch.setattr(keras, "__version__", "3.16.2")
    warn_of_untested.cache_clear()
    with pytest.warns(UserWarning, match=r"tested with Keras 3\.15 .* here is Keras 3\.16\.2\."):
        warn_of_untested()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_untested()

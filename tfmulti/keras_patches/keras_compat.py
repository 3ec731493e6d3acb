"""Every touch of a private name of Keras, each with the reason and when it can go.

Written against Keras 3.12 to 3.16. `tests/mirrored/test_keras_compat.py` holds a test for
each line below that fails when Keras no longer needs it, or no longer has the name. What
takes the place of Keras' own is written elsewhere (`losses`, `randomness`, `normalization`,
`replicas`); here is only where it is put in.

| what | private name | upstream | can go when |
|---|---|---|---|
| `build_from_specs` | `Trainer._symbolic_build` | keras#20585 | `fit` builds on MultiWorkerMirroredStrategy |
| losses | `losses.loss.scale_loss_for_distribution`, `unscale_…`, `reduce_weighted_values`, `Loss.__call__` | keras#20585 | losses say by which rows they are averaged |
| `add_loss` of a vector | `Trainer._aggregate_additional_loss` | keras#20585 | the same |
| metrics of one number a batch | `MeanMetricWrapper._fn`, and `Mean.update_state` | none | a metric can be told what it is computed from |
| random numbers | `backend.tensorflow.random.*`, `_cast_seed`, `draw_seed`, `global_seed_generator`, `make_default_seed`, `GLOBAL_SEED_GENERATOR`, `global_state` | none | replicas have different masks |
| batch statistics | `BatchNormalization._moments`, `_reduction_axes` | none | counts may differ from replica to replica |
| moving statistics | `Layer._flatten_layers`, `_non_trainable_variables` | none | they are averaged over replicas |
| `sublayers`, `own_variables` | the same, `_trainable_variables`, `_seed_generators` | none | a variable's path is that of its place in the model |
| attention in fewer operations | `backend.tensorflow.nn._dot_product_attention_xla` | none | Keras' own takes products of matrices, not `einsum` |
| `float(variable)` | public: `keras.Variable.__float__`, `__int__`, `__array__` | none | they read a mirrored variable |
| `last_operations` | `KerasTensor._keras_history` | none: not exported | Keras tells which layer made a tensor |
| layers in fewer operations | public: `call` of `kernels.LAYERS` | none | Keras' own are as fast |
| layers that look at all rows | public: `call` of `mixing.LAYERS` | none | they know of shares |
| steps of the user's own | public: `tf.nn.compute_average_loss`, `tf.nn.scale_regularization_loss`, `tf.clip_by_global_norm`, `tf.linalg.global_norm` | none | they know of shares |
| `take_reduced_gradients` | `TFOptimizer._all_reduce_sum_gradients`, `_backend_update_step`, `_apply_weight_decay`, `_backend_increment_gradient_accumulators`, `_overwrite_model_variables_with_average_value` | keras#20585 | optimizers take global gradients, and update without `merge_call` |
| states of steps | public: `keras.Variable.assign`; `DistributedVariable.assign`, `assign_add`, `assign_sub` | none | a variable that a step changes gets the value of the global batch |
| gradients | public: `tf.GradientTape.gradient`, `Layer.__call__` | none | a tape knows of shares |
| traces of layers | public: `tf.distribute.ReplicaContext.merge_call`; `Layer._losses`, `_loss_ids` | none | replicas of one process are traced one after the other |
| `_compute_before_waits` | `tf.Operation._add_control_inputs` | none | TensorFlow has a public way to order operations that are there |
| `updates` | `BaseOptimizer._get_variable_index`, `Adam._momentums`, `_velocities` | none | Keras' SGD updates by one kernel, and Keras' Adam computes only once what all variables share |
| recurrent cells where replicas meet | public: `RNN.inner_loop`; `Layer._flatten_layers`, `_call_has_training_arg` | none | replicas of one process can meet inside a loop |
| `by_autograph` | `tf.__internal__.autograph.tf_convert`, `control_status_ctx` | none | TensorFlow has a public way to convert one part of a function |
| `batches_of` | `trainers.data_adapters.get_data_adapter` | none: not exported | Keras exports it |
| `flush_tensorboard` | `TensorBoard._writers` | none | the callback can be flushed, or a public writer given to it |
| `relocation`: variables | `Variable._value`, `Variable._initialize` | none | a Keras variable can be given another `tf.Variable` |
| `relocation`: strategies | `Trainer._distribute_strategy`, `TFOptimizer._distribution_strategy`, `_var_key` | none | models and optimizers can change their strategy |
| `function_of`, `operations_of`, `traces_of` | `MeanMetricWrapper._fn`, `Functional._operations`, `tf.function`'s `_list_all_concrete_functions` | none | Keras and TensorFlow tell them |
| `eager_mode` | `tf.__internal__.eager_context.eager_mode` | none | TensorFlow has a public way to leave a strategy's scope |
| `initial_epoch_of` | `Trainer._initial_epoch` | none | BackupAndRestore has a public way |
"""  # noqa: E501

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import nn as nn_module
from keras.src.backend.tensorflow import random as random_module
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.losses import loss as loss_module
from keras.src.optimizers.base_optimizer import BaseOptimizer
from keras.src.random.seed_generator import (
    GLOBAL_SEED_GENERATOR,
    draw_seed,
    global_seed_generator,
    make_default_seed,
)
from keras.src.trainers import data_adapters
from keras.src.trainers.trainer import Trainer
from tensorflow.python.distribute.values import DistributedVariable

from tfmulti.distribution import (
    batch_dependent_layers,
    collectives,
    custom_steps,
    global_values,
    losses,
    normalization,
    randomness,
    row_labels,
)
from tfmulti.distribution.replica_context import metric_variables
from tfmulti.distribution.replica_slice import (
    PerThread,
    ReplicaSlice,
    computing,
    current,
    partial,
    refuse_to_compile,
)
from tfmulti.distribution.row_rules import Kind
from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import ModelError
from tfmulti.keras_patches.cpu_speed import kernels, updates

Gradients = Sequence[Any]
# What Keras leaves on a tensor: the logits of a softmax or sigmoid, and which steps count.
ATTACHED = ("_keras_logits", "_keras_mask")


def build_from_specs(model: keras.Model, specs: Any) -> None:
    """Builds layers, losses, metrics and optimizer from the form of one batch.

    Keras does this in `fit` from a real batch, which fails on a tuple of PerReplica values
    (`_maybe_symbolic_build`). `specs` is one batch's `(x, y, sample_weight)`, each leaf with
    `shape` and `dtype`. Call it inside the strategy's scope, on every worker.
    """
    model._symbolic_build(data_batch=specs)


def by_autograph(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that AutoGraph reads, and what it calls, when a graph is traced."""
    autograph = tf.__internal__.autograph
    converted: Callable[..., Any] = autograph.tf_convert(function, autograph.control_status_ctx())
    return converted


# What the private names here were tested with.
TESTED = {"Keras": "3.15", "TensorFlow": "2.21"}


@functools.cache
def warn_of_untested() -> None:
    """Says once where another version of Keras or TensorFlow is installed than was tested."""
    installed = {"Keras": keras.__version__, "TensorFlow": tf.__version__}
    others = [
        f"{name} {installed[name]}"
        for name, tested in TESTED.items()
        if installed[name].split(".")[:2] != tested.split(".")
    ]
    if others:
        tested_with = " and ".join(f"{name} {version}" for name, version in TESTED.items())
        warnings.warn(
            f"tfmulti is tested with {tested_with}, and here is {' and '.join(others)}. Compare "
            "the first step with one device: prepare(model, verify=True).",
            stacklevel=2,
        )


def install() -> None:
    """Puts what knows of shares in the place of Keras' functions that do not.

    Outside a prepared model's step they are Keras' own, and with one replica, but for the layers
    that take fewer operations.
    """
    warn_of_untested()
    for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
        _replace(loss_module, name, _only_outside)
    _replace(loss_module, "reduce_weighted_values", _part_of_global)
    _replace(tf.GradientTape, "gradient", _gradient)
    _replace(tf.distribute.ReplicaContext, "merge_call", _keeping_traces)
    _replace(keras.layers.Layer, "__call__", _labelled_layer)
    for variable in (keras.Variable, DistributedVariable):
        for name in ("assign", "assign_add", "assign_sub"):
            if name == "assign" or variable is DistributedVariable:  # Keras' others call it
                _replace(variable, name, _assigned)
    _replace(keras.losses.Loss, "__call__", _loss_of_all_rows)
    _replace(keras.metrics.MeanMetricWrapper, "update_state", _metric_of_all_rows)
    for metric in (keras.metrics.Mean, keras.metrics.Sum):
        _replace(metric, "update_state", _mean_of_shares)
    _replace(Trainer, "_aggregate_additional_loss", _added_loss)
    _replace(keras.layers.BatchNormalization, "_moments", _moments_of_share)
    _replace(keras.layers.BatchNormalization, "call", _fused)
    _replace(keras.layers.RNN, "inner_loop", _unrolled)
    _replace(TFOptimizer, "_all_reduce_sum_gradients", _unless_unknown)
    for name in ("__float__", "__int__", "__array__"):
        _replace(keras.Variable, name, _of_one_copy)
    for name in (
        "_backend_update_step",
        "_apply_weight_decay",
        "_backend_increment_gradient_accumulators",
        "_overwrite_model_variables_with_average_value",
    ):
        _replace(TFOptimizer, name, _on_each_replica)
    for name, draw in randomness.DRAWS.items():
        _replace(random_module, name, _drawn_by(draw))
    for owner, name, function in custom_steps.FUNCTIONS:
        _replace(owner, name, _in_share(function))
    for layer in batch_dependent_layers.LAYERS:
        _replace(layer, "call", _in_share(batch_dependent_layers.mixed))
    for layer, function in kernels.LAYERS.items():
        _replace(layer, "call", _on_cpus(function))
    if hasattr(nn_module, "_dot_product_attention_xla"):
        _replace(nn_module, "_dot_product_attention_xla", _on_cpus(kernels.attention))


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    original = getattr(owner, name)
    if not hasattr(original, "_tfmulti"):
        new = functools.wraps(original)(make(original))
        vars(new)["_tfmulti"] = True
        setattr(owner, name, new)


def _in_share(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Returns what makes TensorFlow's function call `function(original, share, …)` in a share."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            share = partial()
            if share is None:
                return original(*args, **kwargs)
            return function(original, share, *args, **kwargs)

        return call

    return make


def _on_cpus(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Returns what makes Keras' function call `function(original, …)` in a step on CPUs."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if current() is None or _is_on_gpu():
                return original(*args, **kwargs)
            return function(original, *args, **kwargs)

        return call

    return make


def _of_one_copy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keras asks the value of a variable for a number; TensorFlow's mirrored ones have no such way.

    Outside of a step, as in a callback, the copies of all replicas are the same.
    """

    def converted(self: Any, *args: Any) -> Any:
        value = self.value
        if isinstance(value, tf.distribute.DistributedValues) and tf.executing_eagerly():
            return getattr(value.numpy(), original.__name__)(*args)
        return original(self, *args)

    return converted


def last_operations(model: keras.Model) -> list[Any] | None:
    """Returns the layer or operation that makes each output; None where Keras cannot tell.

    A model within the model is looked into, and so are layers that do nothing.
    """
    try:
        outputs = keras.tree.flatten(model.outputs)
    except (AttributeError, ValueError):
        return None
    found = []
    for output in outputs or []:
        operation = output._keras_history.operation
        if isinstance(operation, keras.Model):
            inner = last_operations(operation)
            if inner is None or len(inner) != 1:
                return None
            operation = inner[0]
        elif _does_nothing(operation):
            inner = last_operations(keras.Model(model.inputs, operation.input))
            if inner is None:
                return None
            operation = inner[0]
        found.append(operation)
    return found or None


def _does_nothing(operation: Any) -> bool:
    linear = getattr(operation, "activation", None) is keras.activations.linear
    return isinstance(operation, keras.layers.Activation) and linear


def _only_outside(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda value: original(value) if current() is None else value


def _part_of_global(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        loss = original(values, sample_weight, mask, reduction, dtype)
        one_number = tf.convert_to_tensor(values).shape.rank == 0
        losses.note_reduction(one_number)
        share = partial()
        if share is None or one_number or not _is_by_rows(share, values):
            return loss  # `_loss_of_all_rows` makes the loss of the global batch of it
        same_rank = loss_module.squeeze_or_expand_to_same_rank
        part = losses.scaled_to_global(
            share,
            loss,
            reduction,
            lambda: losses.divisor_of(values, sample_weight, mask, reduction, same_rank),
        )
        if part.shape.rank == 0:
            row_labels.mark(part, row_labels.MEAN)
        return part

    return reduce


def _is_by_rows(share: ReplicaSlice, values: Any) -> bool:
    """Whether a loss has a value for each row, or it is not known that it has none."""
    kinds = (Kind.ROWS, Kind.LOCAL)
    return (
        _of_keras_by_rows.get()
        or not global_values.are_known(share)
        or row_labels.label_of(values).kind in kinds
    )


_of_keras_by_rows = PerThread(False)


def _have_rows(*values: Any) -> bool:
    """Whether all values are rows, of which Keras' own losses and metrics take one by one."""
    leaves = tf.nest.flatten(values)
    return all(row_labels.label_of(leaf).kind is Kind.ROWS for leaf in leaves)


def _loss_of_all_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a loss' `__call__` whose result stands for the loss of the global batch."""

    def call(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        share = partial()
        if share is None:
            return original(self, y_true, y_pred, sample_weight)
        if global_values.are_known(share):
            function = getattr(self, "fn", type(self))
            with _of_keras_by_rows.set_to(_is_of_keras(function) and _have_rows(y_true, y_pred)):
                found = original(self, y_true, y_pred, sample_weight)
            kind = row_labels.label_of(found).kind
            if kind is not Kind.LOCAL and found.shape.rank != 0:
                return found  # what takes its values makes those of the global batch of them
            if kind is not Kind.LOCAL:
                return global_values.averaged(share, found)
        seen = losses.Seen()
        with losses.watching(seen), computing(share.alone()):
            found = original(self, y_true, y_pred, sample_weight)  # to see; not in the step
        by_rows = not seen.scalar and (seen.reduced or found.shape.rank)
        if by_rows and _is_of_keras(getattr(self, "fn", type(self))):
            return original(self, y_true, y_pred, sample_weight)
        compute = functools.partial(original, self)
        return losses.from_all_rows(share, compute, y_true, y_pred, sample_weight, ATTACHED)

    return call


def _is_of_keras(function: Any) -> bool:
    """Whether a function or class is Keras' own, whose value of a row is computed from that row."""
    module = getattr(function, "__module__", "")
    return module.startswith("keras.src.") and function is not keras.losses.circle


def _metric_of_all_rows(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_state(self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        share = partial()
        if share is None:
            return original(self, y_true, y_pred, sample_weight)
        values = functools.partial(self._fn, **self._fn_kwargs)
        with computing(share.alone()):
            found = tf.convert_to_tensor(values(y_true, y_pred))
        one_number = found.shape.rank == 0
        known = global_values.are_known(share)
        kind = row_labels.label_of(found).kind if known else Kind.LOCAL
        unknown = kind is Kind.LOCAL
        trusted = _is_of_keras(self._fn) and (unknown or _have_rows(y_true, y_pred))
        if kind is Kind.ROWS or (trusted and not one_number):
            with _of_keras_by_rows.set_to(True):
                return original(self, y_true, y_pred, sample_weight)
        if not unknown:
            mask = getattr(y_pred, "_keras_mask", None)
            weights = loss_module.apply_mask(sample_weight, mask, self.dtype, "sum")
            return keras.metrics.Mean.update_state(self, found, weights)
        if share.is_local and not losses.in_passes():
            return original(self, y_true, y_pred, sample_weight)
        # The numbers are of the whole batch; the replicas' states are summed later.
        context = tf.distribute.get_replica_context()
        counts = tf.cast(context.replica_id_in_sync_group == 0, tf.float32)

        def update(y_true: Any, y_pred: Any, weights: Any) -> Any:
            if weights is None:
                weights = tf.ones([] if one_number else tf.shape(y_pred)[:1])
            original(self, y_true, y_pred, counts * tf.cast(weights, tf.float32))
            return tf.zeros([])

        return losses.from_all_rows(share, update, y_true, y_pred, sample_weight, ATTACHED)

    return update_state


def _mean_of_shares(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `update_state` of a metric that adds values up, or their mean by weights."""

    def update_state(self: Any, values: Any, sample_weight: Any = None) -> Any:
        share = partial()
        if share is not None:
            values, sample_weight = _counted_once(share, values, sample_weight)
        return original(self, values, sample_weight)

    return update_state


def _counted_once(share: ReplicaSlice, values: Any, weight: Any) -> tuple[Any, Any]:
    """Returns what a metric gets on this replica, so that the replicas' states add up.

    What is no value of rows, such as a batch's loss, counts once, whoever computed it.
    """
    tensor = tf.convert_to_tensor(values)
    if _of_keras_by_rows.get() and tensor.shape.rank != 0:
        return values, weight
    if not global_values.are_known(share):
        return values, share.part if tensor.shape.rank == 0 and weight is None else weight
    kind = row_labels.label_of(tensor).kind
    if kind is Kind.LOCAL:
        share.note_unknown(row_labels.label_of(tensor).reason)
    if kind is Kind.ROWS or (kind is Kind.LOCAL and tensor.shape.rank != 0):
        return values, weight
    weighs = Kind.ALIKE if weight is None else row_labels.label_of(weight).kind
    if weighs is Kind.LOCAL:  # such as the rows of a ragged tensor
        global_values.note_unknown(share, weight)
    if weighs in (Kind.COUNT, Kind.LOCAL):  # of its rows: the replicas' mean by rows is meant
        return global_values.averaged(share, tensor), weight
    if weighs is Kind.ALIKE:
        found = global_values.averaged(share, tensor)
        if weight is not None:
            return found, share.part * tf.cast(weight, share.part.dtype)
        # Without weights each value of a vector counts by itself, with one for all their mean.
        return found, tf.fill(tf.shape(found)[:1], share.part) if found.shape.rank else share.part
    if weighs is Kind.SUM:  # a part of the whole weight
        return global_values.of_one_device(share, tensor), weight
    whole = global_values.of_one_device(share, weight)
    part = tf.cast(whole, share.part.dtype) * share.part
    return global_values.of_one_device(share, tensor), part


def _added_loss(original: Callable[..., Any]) -> Callable[..., Any]:
    def aggregate(self: Any, loss: Any) -> Any:
        share = partial()
        if share is not None and not global_values.are_known(share):
            loss = losses.added_loss(share, loss)
        return original(self, loss)

    return aggregate


def _gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    def gradient(
        self: Any,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        options = {
            "output_gradients": output_gradients,
            "unconnected_gradients": unconnected_gradients,
        }
        share = partial()
        if share is None or output_gradients is not None:
            return original(self, target, sources, **options)
        if not row_labels.are_kept() and not share.is_local:
            target = tf.nest.map_structure(lambda t: losses.summed_gradient(share, t), target)
        compute = functools.partial(original, self)
        return global_values.gradient(share, compute, target, sources, **options)

    return gradient


def states_of_its_own(model: keras.Model) -> dict[int, str]:
    """Returns what changes by the user's own code in a step: `Share.states`."""
    found: dict[int, str] = {}
    for layer in layers_of(model):
        found |= {id(v): "layer" for v in own_variables(layer) if not is_seed(v)}
    metrics = [*model.metrics, *keras.Model.metrics.fget(model)]
    while metrics:
        metric = metrics.pop()
        inner = list(getattr(metric, "metrics", ()))  # of the metrics that `compile` was given
        metrics += inner
        if not inner:
            kind = "" if _is_of_keras(type(metric)) else "metric"
            found |= {id(v): kind for v in metric.variables}
    return found


def _assigned(original: Callable[..., Any]) -> Callable[..., Any]:
    def assign(self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        share = partial()
        # Keras' own layers see to their states by themselves.
        asks = share is not None and not _in_layer_of_keras.get()
        kind = share.states.get(id(self)) if share is not None and asks else None
        if share is not None and kind == "layer":
            value = global_values.of_one_device(share, value)
        elif share is not None and kind == "metric":
            value = global_values.part_of_sum(share, value)
        return original(self, value, *args, **kwargs)

    return assign


def _keeping_traces(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `merge_call` after which the layers hold what this replica's trace left on them.

    While a replica waits in it the others trace the same layers, and leave their losses there.
    """

    def merge_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        share = partial()
        if share is None or share.model is None or tf.executing_eagerly():
            return original(self, *args, **kwargs)
        left = [(layer, _left_by_trace(layer)) for layer in layers_of(share.model)]
        found = original(self, *args, **kwargs)
        for layer, state in left:
            vars(layer).update(state)
        return found

    return merge_call


def _left_by_trace(layer: Any) -> dict[str, Any]:
    """Returns copies of a layer's attributes that hold tensors of the graph that is traced.

    Keras' own layers keep their losses alone.
    """
    losses = {"_losses": list(layer._losses), "_loss_ids": set(layer._loss_ids)}
    if _is_of_keras(type(layer)):
        return losses
    found = {}
    for name, value in vars(layer).items():
        parts = value.values() if isinstance(value, dict) else value
        many = isinstance(value, (dict, list, tuple))
        if any(map(_is_symbolic, parts if many else [value])):
            found[name] = type(value)(value) if type(value) in (dict, list) else value
    return found | losses


def _is_symbolic(value: Any) -> bool:
    return isinstance(value, tf.Tensor) and hasattr(value, "graph")


_in_layer_of_keras = PerThread(False)


def _labelled_layer(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = type(self).__module__.startswith("keras.src.layers.")
        with _in_layer_of_keras.set_to(own and not isinstance(self, keras.layers.Lambda)):
            outputs = original(self, *args, **kwargs)
        if row_labels.are_kept() and _works_by_rows(self):
            row_labels.mark_call((args, kwargs), outputs)
        return outputs

    return call


def _needs_meetings(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the layer's method with an error of ours where replicas cannot meet."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(self, *args, **kwargs)
        except RuntimeError as error:
            if "merge_call" not in str(error) or partial() is None:
                raise
            raise ModelError(
                f"the layer {self.name!r} normalizes by the rows of all replicas, but it stands in "
                "a loop (such as a cell of keras.layers.RNN) or a tf.function of its own, where "
                "replicas cannot meet. Make the RNN with unroll=True, use LayerNormalization "
                "there, or train on one device."
            ) from None

    return call


def _works_by_rows(layer: Any) -> bool:
    """Whether a layer and all in it are Keras' own, which compute a row from that row alone.

    `mixing` and BatchNormalization see to those that do not.
    """
    parts = [layer, *layer._flatten_layers(include_self=False)]
    return all(
        type(part).__module__.startswith("keras.src.layers.")
        and not isinstance(part, keras.layers.Lambda)
        and _is_of_keras(getattr(part, "activation", keras.activations.linear))
        for part in parts
    )


def _fused(original: Callable[..., Any]) -> Callable[..., Any]:
    """Keras' layer is many operations on all values, and their gradients many more."""

    def call(self: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        share = current()
        if share is None or mask is not None or not _can_be_fused(self, inputs, training):
            return original(self, inputs, training=training, mask=mask)
        channels = inputs.shape[-1]
        gamma = tf.convert_to_tensor(self.gamma) if self.scale else tf.ones([channels])
        beta = tf.convert_to_tensor(self.beta) if self.center else tf.zeros([channels])
        of_all = self.synchronized or share.sync_batch_norm
        by_itself = not share.is_whole and (share.is_local or not of_all)
        group = share.alone() if by_itself else share
        outputs, count, *found = normalization.normalized(group, inputs, gamma, beta, self.epsilon)
        if by_itself:
            count *= tf.cast(share.own_rows > 0, count.dtype)
        moving = (self.moving_mean, self.moving_variance)
        for variable, value in zip(moving, found, strict=True):
            before = tf.convert_to_tensor(variable.value)
            moved = before * self.momentum + value * (1.0 - self.momentum)
            variable.assign(tf.where(count > 0, moved, before))  # of no rows nothing is learned
        return outputs

    return _needs_meetings(call)


def _can_be_fused(layer: Any, inputs: Any, training: Any) -> bool:
    known = tf.is_tensor(inputs) and inputs.shape.rank is not None and inputs.shape.rank > 1
    return bool(
        known
        and not _is_on_gpu()
        and training is True
        and layer.trainable
        and not layer.renorm
        and layer.axis in (-1, inputs.shape.rank - 1)
        and inputs.shape[-1] is not None
        and inputs.dtype == layer.compute_dtype == layer.variable_dtype == "float32"
    )


def _is_on_gpu() -> bool:
    """Whether this replica is on a GPU, whose kernels are others and were not measured."""
    if tf.distribute.has_strategy():
        return bool(placement_of(tf.distribute.get_strategy()).gpus)
    return bool(tf.config.list_logical_devices("GPU"))


def _unrolled(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the loop of a recurrent layer, unrolled where replicas meet in its cell.

    Keras calls the cell once before its loop, to learn what the cell returns. That call changes the
    cell's states, so it is made here, too.
    """

    def inner_loop(self: Any, sequences: Any, initial_state: Any, mask: Any, training: Any) -> Any:
        may_unroll = not self.unroll and sequences.shape[1] is not None
        if partial() is None or not may_unroll or not _normalizes(self.cell):
            return original(self, sequences, initial_state, mask, training)
        options = {"training": training} if self.cell._call_has_training_arg else {}
        states = initial_state if keras.tree.is_nested(initial_state) else [initial_state]
        self.cell(sequences[:, -1 if self.go_backwards else 0], states, **options)
        self.unroll = True
        try:
            return original(self, sequences, initial_state, mask, training)
        finally:
            self.unroll = False

    return inner_loop


def _normalizes(cell: Any) -> bool:
    """Whether a recurrent cell, which need not be a layer, holds a BatchNormalization."""
    return isinstance(cell, keras.layers.Layer) and any(
        isinstance(part, keras.layers.BatchNormalization) for part in layers_of(cell)
    )


def _moments_of_share(original: Callable[..., Any]) -> Callable[..., Any]:
    def moments(self: Any, inputs: Any, mask: Any) -> Any:
        share = current()
        if share is None or (mask is not None and share.is_whole):
            return original(self, inputs, mask)
        context = tf.distribute.get_replica_context()
        synchronized = (self.synchronized or share.sync_batch_norm) and not share.is_local
        if synchronized and context.num_replicas_in_sync > 1:
            return normalization.global_moments(share, inputs, mask, self._reduction_axes)
        if share.is_whole:  # Keras' own for several replicas loses digits, and is not needed
            return keras.ops.moments(inputs, self._reduction_axes)
        # What reads a row that does not count learns nothing from it.
        known = (tf.cast(v, inputs.dtype) for v in (self.moving_mean, self.moving_variance))
        if share.is_local and mask is None:  # Keras' own might be synchronized
            own = keras.ops.moments(inputs, self._reduction_axes)
        else:
            own = original(self, inputs, mask)
        return tuple(
            tf.where(share.own_rows > 0, found, before)
            for found, before in zip(own, known, strict=True)
        )

    return moments


_GENERATOR = "_tfmulti_generator"  # an attribute of a strategy
_drawn_from: weakref.WeakSet[keras.random.SeedGenerator] = weakref.WeakSet()


def step_generator(model: keras.Model) -> keras.random.SeedGenerator | None:
    """Returns the generator of draws without a seed in the steps of a model; None: Keras' own.

    Keras has one for all such draws, but keeps one a thread, and replicas are traced in threads of
    their own. This one has a copy on each replica and takes the place of Keras': at once, or, where
    Keras has made none yet, when a step has drawn from it (`share_generator`).
    """
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync == 1:
        return None
    made = global_generator()
    generator: keras.random.SeedGenerator | None = vars(strategy).get(_GENERATOR)
    if generator is not None and generator is made:
        return generator
    if generator is None or generator in _drawn_from:
        with strategy.scope():
            generator = keras.random.SeedGenerator(0)  # draws nothing: it has a seed
        vars(strategy)[_GENERATOR] = generator
    generator.state.assign(_next_global_seed())
    if made is not None:
        _drawn_from.add(generator)
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
    return generator


def share_generator(generator: keras.random.SeedGenerator | None) -> None:
    """Makes a generator Keras' own, if a step has drawn from it.

    Call it after the step was traced, where Keras would have made its own, by a draw from Python's.
    """
    made = global_generator()
    if generator is None or generator is made or generator not in _drawn_from:
        return
    has_drawn = tf.executing_eagerly()
    with tf.init_scope():
        made = global_seed_generator()
        if not has_drawn:
            generator.state.assign(made.state)
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)


def _next_global_seed() -> Any:
    """Returns the state of Keras' generator, or the one that it would begin with if made now.

    Keras makes it at the first draw without a seed, by a draw from Python's generator.
    """
    made = global_generator()
    if made is not None:
        return made.state
    python = random.getstate()
    try:
        return [make_default_seed(), 0]
    finally:
        random.setstate(python)


@contextlib.contextmanager
def with_global_generator() -> Iterator[None]:
    """Inside, Keras' generator of draws without a seed is made; afterwards it is as it was."""
    before = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    python = random.getstate()
    try:
        global_seed_generator()
        random.setstate(python)
        yield
    finally:
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, before)


def global_generator() -> keras.random.SeedGenerator | None:
    """Returns Keras' generator of draws without a seed; None: Keras has made none yet."""
    return global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)


def made_global_generator() -> keras.random.SeedGenerator:
    """Returns Keras' generator of draws without a seed, which is made now if there is none."""
    return global_seed_generator()


def _seed(share: ReplicaSlice, seed: Any) -> tf.Tensor:
    if seed is not None:
        return random_module._cast_seed(draw_seed(seed))
    generator = share.seeds or global_seed_generator()
    _drawn_from.add(generator)
    return random_module._cast_seed(generator.next(ordered=False))


def _drawn_by(draw: Callable[..., Any]) -> Callable[[Any], Any]:
    """Returns what makes Keras' function one that calls `draw(share, seed, its arguments)`."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)
        mine = functools.partial(draw, original)

        def drawn(*args: Any, **kwargs: Any) -> Any:
            refuse_to_compile("draws random numbers, and XLA's are others")
            share = partial()
            if share is None:
                return original(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = bound.arguments
            if "dtype" in arguments:
                arguments["dtype"] = arguments["dtype"] or keras.config.floatx()
            seed = _seed(share, arguments.pop("seed"))
            return randomness.by_parts(mine, share, seed, arguments)

        return drawn

    return make


def all_metric_variables(model: keras.Model) -> list[Any]:
    """Returns the Keras variables of all metrics of a model, named in its `metrics` or not."""
    known = {id(v): v for v in metric_variables(model)}
    for metric in keras.Model.metrics.fget(model):
        known.update({id(v): v for v in metric.variables})
    return list(known.values())


def seed_variables(model: keras.Model) -> list[Any]:
    """Returns the Keras variables that hold where a model's random numbers go on."""
    return [v for v in model.non_trainable_variables if is_seed(v)]


def layers_of(model: keras.Model) -> list[Any]:
    """Returns the model, its layers, and theirs."""
    return list(model._flatten_layers(include_self=True, recursive=True))


SEED = "seed_generator_state"  # Keras' name of the variable of a generator


def sublayers(layer: Any) -> list[Any]:
    """Returns the layers that a layer or model holds itself."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def own_variables(layer: Any) -> list[Any]:
    """Returns the Keras variables of a layer but those of its sublayers, the seeds' last."""
    seeds = [generator.state for generator in layer._seed_generators]
    return [*layer._trainable_variables, *layer._non_trainable_variables, *seeds]


def is_seed(variable: Any) -> bool:
    """Whether a Keras variable holds where random numbers go on."""
    return bool(variable.name == SEED)


def moving_statistics(
    model: keras.Model, *, sync_batch_norm: bool, is_local: bool = False
) -> list[Any]:
    """Returns the Keras variables that layers update by themselves while they train.

    Those of floating point type, of layers that are not frozen, and not synchronized (in local
    steps none are): each replica has its own.
    """
    found = {}
    for layer in layers_of(model):
        normalizes = isinstance(layer, keras.layers.BatchNormalization)
        meets = normalizes and not is_local and (sync_batch_norm or layer.synchronized)
        if layer.trainable and not meets:
            for variable in layer._non_trainable_variables:
                if tf.as_dtype(variable.dtype).is_floating:
                    found[id(variable)] = variable
    metrics = {id(v) for v in metric_variables(model)}
    return [v for key, v in found.items() if key not in metrics]


def watch_losses(model: keras.Model) -> None:
    """Puts what sees a loss of one number also around `__call__` of the user's own classes."""
    for loss in keras.tree.flatten(model.loss):
        if isinstance(loss, keras.losses.Loss):
            owner = next(cls for cls in type(loss).__mro__ if "__call__" in vars(cls))
            _replace(owner, "__call__", _loss_of_all_rows)


def _unless_unknown(original: Callable[..., Any]) -> Callable[..., Any]:
    def reduce(optimizer: Any, grads_and_vars: Any) -> Any:
        if partial() is not None:
            raise ModelError(
                f"the train_step applies gradients with a {type(optimizer).__name__} that is not "
                "part of the model, so they would be summed, not averaged. Keep it as an "
                "attribute of the model."
            )
        return original(optimizer, grads_and_vars)

    return reduce


class _UpdatesReplica:
    """An optimizer whose gradients are global: each replica updates its own copy by itself.

    Keras reduces here, and updates in cross-replica context (`merge_call`), which cannot be
    inside a condition: gradient accumulation and overwriting by averages are conditions.
    """

    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> Any:
        return list(grads_and_vars)

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        step = super().update_step  # type: ignore[misc]
        context = tf.distribute.get_replica_context()
        several = context is not None and context.num_replicas_in_sync > 1
        update = updates.of_step(step) if several else None
        if update is None or not update(self, gradient, _updated(self, variable), learning_rate):
            step(gradient, variable, learning_rate)


def _updated(optimizer: Any, variable: Any) -> list[Any]:
    """Returns a variable and what an SGD or an Adam keeps for it."""
    index = optimizer._get_variable_index(variable)
    if isinstance(optimizer, keras.optimizers.Adam):
        return [variable, optimizer._momentums[index], optimizer._velocities[index]]
    return [variable, optimizer.momentums[index]] if optimizer.momentum else [variable]


def _on_each_replica(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns Keras' method for all backends in place of TensorFlow's, for `_UpdatesReplica`.

    It stands where TensorFlow's stood, so what an optimizer's class puts around it stays.
    """
    plain = getattr(BaseOptimizer, original.__name__)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = tf.distribute.get_replica_context()
        several = context is not None and context.num_replicas_in_sync > 1
        if several and isinstance(self, _UpdatesReplica):
            return plain(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return method


class _ReducesFirst(_UpdatesReplica):
    _tfmulti_reduce: Callable[[Gradients], list[Any]]
    _tfmulti_take: Callable[[Any, Gradients, Any], bool]

    def apply(self, grads: Gradients, trainable_variables: Any = None) -> Any:
        if tf.distribute.get_replica_context() is not None:
            grads = _gradients_of_global_batch(grads)
            if self._tfmulti_take(self, grads, trainable_variables):
                return None
            _compute_before_waits(grads)
            grads = self._tfmulti_reduce(grads)
        with updates.of_all_variables():
            return super().apply(grads, trainable_variables)  # type: ignore[misc]


def _gradients_of_global_batch(gradients: Gradients) -> list[Any]:
    """Returns gradients that a step changed by itself such that their mean over replicas is right.

    A gradient as the tape gives it stays. One that was clipped or normalized on each replica would
    not be that of the global batch.
    """
    share = partial()
    if share is None or not global_values.are_known(share):
        return list(gradients)
    return [
        global_values.averaged(share, gradient) if isinstance(gradient, tf.Tensor) else gradient
        for gradient in gradients
    ]


def _compute_before_waits(gradients: Gradients) -> None:
    """Has the gradients of variables computed before a wait for other workers that follows them.

    A wait is that of a BatchNormalization's gradient: the layers before it need what comes of it,
    and the gradients of the variables behind it need not wait. A worker that left these for later
    would itself be waited for.
    """
    waits = set(collectives.waits())
    if not waits:
        return
    found, rest = set(), [g.op for g in gradients if isinstance(g, tf.Tensor)]
    for operation in rest:  # it grows: a regularizer's part is added to the layer's
        found.add(operation)
        if operation.type == "AddN":
            rest += [value.op for value in operation.inputs]
    ready: list[tf.Operation] = []
    for operation in tf.compat.v1.get_default_graph().get_operations():
        if operation in found:
            ready.append(operation)
        elif operation in waits:
            operation._add_control_inputs(ready)
            ready = []


def take_reduced_gradients(
    optimizer: keras.optimizers.Optimizer,
    reduce: Callable[[Gradients], list[Any]],
    take: Callable[[Any, Gradients, Any], bool],
) -> None:
    """Makes `optimizer.apply` reduce the gradients by `reduce` first, and never again.

    Clipping, finite checks and loss scaling inside the optimizer then see the gradient of
    the global batch; Keras reduces after them. Where `take(optimizer, gradients, variables)`
    returns True, it has kept them and nothing is updated. The optimizer keeps its class'
    name and module, so that it is saved as before.
    """
    for inner in inner_optimizers(optimizer):
        _mix_in(inner, _UpdatesReplica)
    _mix_in(optimizer, _ReducesFirst)
    vars(optimizer)["_tfmulti_reduce"] = reduce
    vars(optimizer)["_tfmulti_take"] = take


def inner_optimizers(optimizer: keras.optimizers.Optimizer) -> list[Any]:
    """Returns the optimizers that another one hands its gradients to."""
    inner = getattr(optimizer, "inner_optimizer", None)
    return list(getattr(optimizer, "optimizers", [])) if inner is None else [inner]


def _mix_in(thing: Any, mixin: type) -> None:
    if not isinstance(thing, mixin):
        object.__setattr__(thing, "__class__", derived_class(type(thing), (mixin, type(thing))))


_derived: dict[tuple[type, ...], type] = {}
_original: dict[type, type] = {}


def derived_class(original: type, bases: tuple[type, ...]) -> type:
    """Returns a class over `bases` that bears the name and module of `original`."""
    if bases not in _derived:
        names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
        _derived[bases] = type(original.__name__, bases, names | {"__doc__": original.__doc__})
        _original[_derived[bases]] = original
    return _derived[bases]


@contextlib.contextmanager
def original_classes(*things: Any) -> Iterator[None]:
    """Inside, the objects have the classes that they had before tfmulti derived from them.

    Keras writes public classes by identity; what is saved inside is as plain Keras saves it.
    """
    changed: list[tuple[Any, type]] = []
    for thing in things:
        while (original := _original.get(type(thing))) is not None:
            changed.append((thing, type(thing)))
            object.__setattr__(thing, "__class__", original)
    try:
        yield
    finally:
        for thing, derived in reversed(changed):
            object.__setattr__(thing, "__class__", derived)


def batches_of(x: Any, class_weight: Any = None) -> Any:
    """Returns Keras' own adapter of a Dataset, PyDataset, generator or DataLoader.

    It has `get_tf_dataset()`, `num_batches`, `on_epoch_begin()` and `on_epoch_end()`.
    """
    return data_adapters.get_data_adapter(x=x, class_weight=class_weight)


def parts_of(dataset: tf.data.Dataset) -> tuple[tf.data.Dataset, ...]:
    """Returns the Datasets that a Dataset is made of; no public name of TensorFlow tells."""
    return tuple(dataset._inputs())


def kind_of(dataset: tf.data.Dataset) -> str:
    """Returns what made a Dataset: `_ShuffleDataset`, `_RepeatDataset`, …"""
    return type(dataset).__name__


def flush_tensorboard(callback: keras.callbacks.TensorBoard) -> None:
    """Writes the events that a TensorBoard callback holds in memory to its files."""
    for writer in callback._writers.values():
        writer.flush()


def initial_epoch_of(model: keras.Model, initial_epoch: int) -> int:
    """Returns the epoch that a BackupAndRestore callback wants to start from, or the given one."""
    return int(getattr(model, "_initial_epoch", None) or initial_epoch)


def function_of(metric: Any) -> Any:
    """Returns the function that a metric takes the mean of, if it takes one."""
    return getattr(metric, "_fn", None)


def operations_of(model: keras.Model) -> list[Any]:
    """Returns the operations of functional models that are no layers."""
    return [
        operation
        for each in layers_of(model)
        for operation in getattr(each, "_operations", [])
        if not isinstance(operation, keras.layers.Layer)
    ]


def traces_of(function: Any) -> list[Any]:
    """Returns what a `tf.function` was traced to so far."""
    return list(function._list_all_concrete_functions())


@contextlib.contextmanager
def step_replaced(model: keras.Model, step: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, another function is a model's `train_step`."""
    vars(model)["train_step"] = step
    try:
        yield
    finally:
        del vars(model)["train_step"]


def eager_mode() -> contextlib.AbstractContextManager[None]:
    """Inside, operations run at once, whatever graph is the default one."""
    mode: contextlib.AbstractContextManager[None] = tf.__internal__.eager_context.eager_mode()
    return mode


def tf_variable_of(variable: Any) -> Any:
    """Returns the `tf.Variable` that holds a Keras variable's value; None before it is built."""
    return variable._value


def set_tf_variable(variable: Any, value: tf.Variable) -> None:
    """Makes a Keras variable hold its value in another `tf.Variable`."""
    variable._value = value


def new_tf_variable(variable: Any, value: Any) -> tf.Variable:
    """Returns what Keras makes for a variable in the scope in effect, and leaves it as it is."""
    before = variable._value
    variable._initialize(value)
    made, variable._value = variable._value, before
    return made


def strategy_of(thing: Any) -> tf.distribute.Strategy | None:
    """Returns the strategy that a model or an optimizer was made in; None: in no scope."""
    if isinstance(thing, keras.Model):
        found = thing._distribute_strategy
    else:
        found = vars(thing).get("_distribution_strategy")
    # Keras keeps the default strategy for an optimizer that was made outside every scope.
    is_default = found is not None and not _is_real(found)
    return None if is_default else found


def _is_real(strategy: tf.distribute.Strategy) -> bool:
    return type(strategy).__name__ != "_DefaultDistributionStrategy"


def set_strategy(thing: Any, strategy: tf.distribute.Strategy | None) -> None:
    """Gives a model or an optimizer a strategy; None: the default one."""
    if isinstance(thing, keras.Model):
        thing._distribute_strategy = strategy
        return
    if strategy is None:
        with tf.Graph().as_default():  # inside no scope
            strategy = tf.distribute.get_strategy()
    vars(thing)["_distribution_strategy"] = strategy


Keys = dict[Any, Any]


def variable_keys(optimizers: Sequence[Any], variables: Sequence[Any]) -> Keys:
    """Returns the variables by the keys under which optimizers know them now."""
    if not optimizers:
        return {}
    built = [v for v in variables if v._value is not None]
    return {optimizers[0]._var_key(v): v for v in built}


def exchange_keys(optimizers: Sequence[Any], keys: Keys) -> list[tuple[Any, str, Any]]:
    """Makes optimizers know variables that were re-created; `keys` are from before.

    Returns:
        For `restore_keys`: each attribute that was exchanged, and what it was.
    """
    before = []
    for optimizer in optimizers:
        new = {old: optimizer._var_key(v) for old, v in keys.items()}
        for name, value in list(vars(optimizer).items()):
            if not isinstance(value, (dict, set)) or not any(_in(key, new) for key in value):
                continue
            if isinstance(value, dict):
                changed: Any = {new[k] if _in(k, new) else k: v for k, v in value.items()}
            else:
                changed = {new[k] if _in(k, new) else k for k in value}
            before.append((optimizer, name, value))
            vars(optimizer)[name] = changed
    return before


def _in(key: Any, keys: Keys) -> bool:
    return isinstance(key, str) and key in keys


def restore_keys(before: Sequence[tuple[Any, str, Any]]) -> None:
    """Gives optimizers back what `exchange_keys` replaced."""
    for optimizer, name, value in before:
        vars(optimizer)[name] = value

"""Access to the parts of a model: layers, variables, metrics, and the layer that made a tensor.

| what | private name | upstream | can go when |
|---|---|---|---|
| `build_from_specs` | `Trainer._symbolic_build` | keras#20585 | `fit` builds on MultiWorkerMirroredStrategy |
| `has_unbuilt_losses` | `Trainer._compile_loss` | none | plain Keras builds the losses before the first step |
| `last_operations` | `KerasTensor._keras_history` | none: not exported | Keras tells which layer made a tensor |
| `layers_of`, `sublayers`, `own_variables` | `Layer._flatten_layers`, `_trainable_variables`, `_non_trainable_variables`, `_seed_generators` | none | a variable's path is that of its place in the model |
| `function_of`, `operations_of` | `MeanMetricWrapper._fn`, `Functional._operations` | none | Keras tells them |
| `is_built` | `R2Score._built` | none | a metric tells whether it has made all of its variables |
| `is_along_rows`, `input_rank_of` | `MeanMetricWrapper._fn_kwargs`, `Operation._inbound_nodes` | none | Keras tells the arguments of a metric's function, and the shape that a layer was called with |
| `flush_tensorboard` | `TensorBoard._writers` | none | the callback can be flushed, or takes a public writer |
| `values_of_metrics` | `Trainer._flatten_metrics_in_order` | none | Keras tells the order in which `evaluate` lists its results |
| `is_for_xla` | `keras.src.trainers.trainer.model_supports_jit` | none | TensorFlow or Keras tells whether operations are deterministic |
| `IN_FIT` | the argument `_use_cached_eval_dataset` of `evaluate` | none | Keras tells an `evaluate` of the user's own that `fit` calls it |
| `initial_epoch_of` | `Trainer._initial_epoch` | none | BackupAndRestore has a public way |
"""  # noqa: E501

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.trainers.trainer import model_supports_jit

from tfmulti.distribution.replica_context import metric_variables
from tfmulti.keras_patches.patching import is_of_keras

# The argument by which `fit` tells `evaluate` to take the data of the earlier validations. A model
# that overrides `evaluate` to prepare its data, such as those of KerasHub, reads it.
IN_FIT = "_use_cached_eval_dataset"


def has_unbuilt_losses(model: keras.Model, targets: Any) -> bool:
    """Returns whether a model has several compiled losses, which are not built.

    Each of several losses has a log of its own as soon as Keras has built them. Plain Keras builds
    them when a step first computes them.

    Args:
        model: the compiled model.
        targets: the targets of a batch.
    """
    losses = model._compile_loss
    is_unbuilt = losses is not None and not losses.built
    return is_unbuilt and (tf.nest.is_nested(model.loss) or tf.nest.is_nested(targets))


def build_from_specs(model: keras.Model, specs: Any, *, with_losses: bool) -> None:
    """Builds layers, metrics and maybe the losses, without the optimizer, by the specs of a batch.

    Keras does this in `fit` from a real batch, in `_maybe_symbolic_build`, which fails on a tuple
    of PerReplica values. Call this function inside the strategy's scope, on every worker.

    Args:
        model: the compiled model.
        specs: `(x, y, sample_weight)` of one batch; each leaf has a `shape` and a `dtype`.
        with_losses: whether to build the compiled losses.
    """
    optimizer, losses = model.optimizer, model._compile_loss
    try:
        model.optimizer = None
        if not with_losses:
            model._compile_loss = None
        model._symbolic_build(data_batch=specs)
    finally:
        model.optimizer, model._compile_loss = optimizer, losses


def last_operations(model: keras.Model) -> list[Any] | None:
    """Returns the layer or operation that makes each output, or None if Keras cannot tell.

    For an output of a nested model it is the last operation inside that model. A linear Activation
    changes nothing, so the operation before it is returned.
    """
    try:
        outputs = keras.tree.flatten(model.outputs)
    except (AttributeError, ValueError):
        return None
    operations = []
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
        operations.append(operation)
    return operations or None


def _does_nothing(operation: Any) -> bool:
    """Returns whether an operation is an Activation layer that returns its inputs unchanged."""
    linear = getattr(operation, "activation", None) is keras.activations.linear
    return isinstance(operation, keras.layers.Activation) and linear


def metrics_one_by_one(model: keras.Model) -> list[Any]:
    """Returns the metrics of a model, and those given to `compile` in place of what holds them."""
    return [part for metric in model.metrics for part in getattr(metric, "metrics", [metric])]


def all_metric_variables(model: keras.Model) -> list[Any]:
    """Returns the Keras variables of all metrics of a model.

    They include metrics that a `metrics` property of the user's own does not list.
    """
    variables = {id(v): v for v in metric_variables(model)}
    for metric in keras.Model.metrics.fget(model):
        variables.update({id(v): v for v in metric.variables})
    return list(variables.values())


def seed_variables(model: keras.Model) -> list[Any]:
    """Returns the Keras variables that hold the states of a model's seed generators."""
    return [v for v in model.non_trainable_variables if is_seed(v)]


def layers_of(model: keras.Model) -> list[Any]:
    """Returns the model itself, its layers, and the layers within these at any depth."""
    return list(model._flatten_layers(include_self=True, recursive=True))


def is_for_xla(model: keras.Model) -> bool:
    """Returns whether Keras would compile a model by XLA.

    It does not if a layer does not support XLA, or if TensorFlow's operations are deterministic,
    because some of these have no deterministic form for XLA.
    """
    return bool(model_supports_jit(model))


# Keras' name for the variable that holds the state of a seed generator.
SEED = "seed_generator_state"


def sublayers(layer: Any) -> list[Any]:
    """Returns the layers that a layer or model holds directly, without those within them."""
    return list(layer._flatten_layers(include_self=False, recursive=False))


def own_variables(layer: Any) -> list[Any]:
    """Returns the Keras variables of a layer without those of its sublayers, seeds last."""
    seeds = [generator.state for generator in layer._seed_generators]
    return [*layer._trainable_variables, *layer._non_trainable_variables, *seeds]


def is_seed(variable: Any) -> bool:
    """Returns whether a Keras variable holds the state of a seed generator."""
    return bool(variable.name == SEED)


def moving_statistics(model: keras.Model, *, sync_batch_norm: bool) -> list[Any]:
    """Returns the Keras variables that each replica updates from its own rows while it trains.

    They are the non-trainable floating point variables of layers that are not frozen. Variables of
    metrics are left out. So are those of a synchronized BatchNormalization, because all replicas
    compute the same values for them.

    Args:
        model: the model.
        sync_batch_norm: whether every BatchNormalization is synchronized.
    """
    statistics = {}
    for layer in layers_of(model):
        normalizes = isinstance(layer, keras.layers.BatchNormalization)
        is_synchronized = normalizes and (sync_batch_norm or layer.synchronized)
        if layer.trainable and not is_synchronized:
            for variable in layer._non_trainable_variables:
                if tf.as_dtype(variable.dtype).is_floating:
                    statistics[id(variable)] = variable
    metrics = {id(v) for v in metric_variables(model)}
    return [v for key, v in statistics.items() if key not in metrics]


def flush_tensorboard(callback: keras.callbacks.TensorBoard) -> None:
    """Writes the events that a TensorBoard callback holds in memory into its files."""
    for writer in callback._writers.values():
        writer.flush()


def initial_epoch_of(model: keras.Model, initial_epoch: int) -> int:
    """Returns the epoch from which a BackupAndRestore callback resumes, or the given epoch.

    Args:
        model: the model, on which the callback leaves its epoch.
        initial_epoch: what `fit` was given.
    """
    return int(getattr(model, "_initial_epoch", None) or initial_epoch)


def values_of_metrics(model: keras.Model, logs: dict[str, Any]) -> Any:
    """Returns the values of logs as a list in Keras' order, or the only value.

    Args:
        model: the model, whose metrics come first.
        logs: the logs by name.
    """
    return model._flatten_metrics_in_order(logs)


def is_built(metric: Any) -> bool:
    """Returns whether a metric has its variables, which some make in their first update."""
    return bool(metric.variables) and getattr(metric, "_built", True)


def function_of(metric: Any) -> Any:
    """Returns the function whose values a metric averages, or None if it has no such function."""
    return getattr(metric, "_fn", None)


def operations_of(model: keras.Model) -> list[Any]:
    """Returns the operations in a model, and in the models within it, that are not layers."""
    return [
        operation
        for layer in layers_of(model)
        for operation in getattr(layer, "_operations", [])
        if not isinstance(operation, keras.layers.Layer)
    ]


@contextlib.contextmanager
def step_replaced(model: keras.Model, step: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces the `train_step` of a model by another function inside the context."""
    attributes, name = vars(model), "train_step"
    before = {name: attributes[name]} if name in attributes else {}
    # So `has_own_step` gives the same answer as before.
    step.__module__ = method_of(model, name).__module__
    attributes[name] = step
    try:
        yield
    finally:
        del attributes[name]
        attributes.update(before)


def method_of(model: keras.Model, name: str) -> Any:
    """Returns a method of a model: an attribute of the model itself, or else of its class."""
    return vars(model).get(name, getattr(type(model), name, None))


def has_own_step(model: keras.Model, name: str) -> bool:
    """Returns whether a model's `train_step`, `test_step` or `predict_step` is the user's own."""
    return not is_of_keras(method_of(model, name))


def has_own_activation(layer: Any) -> bool:
    """Returns whether an activation of a layer is the user's own, which may use other rows."""
    return not all(map(is_of_keras, activations_of(layer)))


def activations_of(layer: Any) -> list[Any]:
    """Returns the activation functions of a layer, of which a recurrent cell has two."""
    return [v for name, v in vars(layer).items() if name.endswith("activation") and callable(v)]


# The base class of Keras' layers that change images.
_LAYER_OF_IMAGES = keras.layers.RandomFlip.__base__


def is_along_rows(part: Any, rank: int | None) -> bool:
    """Returns whether a layer, a loss or a metric computes along the axis of the rows.

    Args:
        part: the layer, the loss or the metric. Its `axis` or `attention_axes` may be one number or
            several.
        rank: the number of axes of the values, or None if it is not known.
    """
    # Its `axis` is that of the rows, over which every metric adds up.
    if isinstance(part, keras.metrics.FBetaScore):
        return False
    if isinstance(part, keras.layers.EinsumDense):
        # The first axis of the outputs must be that of the inputs, which has no weights.
        inputs, weights, outputs = re.split(",|->", part.equation)
        return inputs[0] != outputs[0] or inputs[0] in weights
    if isinstance(part, keras.layers.Attention):
        # It compares the entries of the axis before the last one.
        return rank == 2
    if isinstance(part, keras.layers.TextVectorization):
        # The longest text of a batch decides how many tokens each text has.
        options = part.get_config()
        return options["output_mode"] == "int" and options["output_sequence_length"] is None
    is_category_layer = getattr(part, "output_mode", None) in ("multi_hot", "count")
    if rank == 1 and (is_category_layer or isinstance(part, keras.layers.Activation)):
        # These layers take a batch without further axes for one example.
        return True
    if isinstance(part, _LAYER_OF_IMAGES) and rank == 3:
        # These layers take three axes for one image.
        return True
    axis = getattr(part, "_fn_kwargs", {}).get("axis", getattr(part, "axis", None))
    axis = getattr(part, "attention_axes", axis)
    axes = axis if isinstance(axis, (list, tuple)) else [axis]
    return any(type(each) is int and each in (0, -(rank or 0)) for each in axes)


def input_rank_of(layer: Any) -> int | None:
    """Returns the number of axes of a layer's first symbolic input, or None if it has none."""
    nodes = getattr(layer, "_inbound_nodes", None)
    inputs = nodes[0].input_tensors if nodes else None
    return len(inputs[0].shape) if inputs else None

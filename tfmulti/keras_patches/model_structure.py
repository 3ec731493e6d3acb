"""What a model consists of: layers, variables, metrics, and which layer made a tensor.

| what | private name | upstream | can go when |
|---|---|---|---|
| `build_from_specs` | `Trainer._symbolic_build` | keras#20585 | `fit` builds on MultiWorkerMirroredStrategy |
| `last_operations` | `KerasTensor._keras_history` | none: not exported | Keras tells which layer made a tensor |
| `layers_of`, `sublayers`, `own_variables` | `Layer._flatten_layers`, `_trainable_variables`, `_non_trainable_variables`, `_seed_generators` | none | a variable's path is that of its place in the model |
| `function_of`, `operations_of` | `MeanMetricWrapper._fn`, `Functional._operations` | none | Keras tells them |
| `flush_tensorboard` | `TensorBoard._writers` | none | the callback can be flushed, or takes a public writer |
| `initial_epoch_of` | `Trainer._initial_epoch` | none | BackupAndRestore has a public way |
"""  # noqa: E501

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from tfmulti.distribution.replica_context import metric_variables


def build_from_specs(model: keras.Model, specs: Any) -> None:
    """Builds layers, losses, metrics and optimizer from the form of one batch.

    Keras does this in `fit` from a real batch, which fails on a tuple of PerReplica values
    (`_maybe_symbolic_build`). `specs` is one batch's `(x, y, sample_weight)`, each leaf with
    `shape` and `dtype`. Call it inside the strategy's scope, on every worker.
    """
    model._symbolic_build(data_batch=specs)


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


@contextlib.contextmanager
def step_replaced(model: keras.Model, step: Callable[[Any], Any]) -> Iterator[None]:
    """Inside, another function is a model's `train_step`."""
    vars(model)["train_step"] = step
    try:
        yield
    finally:
        del vars(model)["train_step"]

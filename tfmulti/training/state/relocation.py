"""Re-creates the variables of a model for another strategy, with their values.

    adopt(model, strategy)   re-creates inside a strategy's scope what was made outside it
    on_one_device(state)     replaces all variables by plain ones for a while, as in plain Keras

Both keep every Keras `Variable` object and give it another `tf.Variable`. So layers, optimizers and
metrics do not notice. A user may also hold `tf.Variable`s directly, and these are replaced where
they are held. `model_search.find` searches the model for all of them.
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti.cluster.environments import described
from tfmulti.distribution import strategies
from tfmulti.distribution.strategies import Placement, placement_of
from tfmulti.errors import ClusterError, ModelError
from tfmulti.keras_patches.tracing import eager_mode
from tfmulti.keras_patches.variables import (
    array_of,
    exchange_keys,
    new_tf_variable,
    restore_keys,
    set_strategy,
    set_tf_variable,
    strategy_of,
    tf_variable_of,
    variable_keys,
)
from tfmulti.training.state.model_search import State, find

SCOPE_ADVICE = (
    "Write 'strategy = tfmulti.make_strategy()' once, and 'with strategy.scope():' around the "
    "lines that build and compile the model."
)


def components(variable: tf.Variable) -> list[tf.Variable]:
    """Returns one plain variable for each local replica of a variable."""
    if isinstance(variable, tf.distribute.DistributedValues):
        return list(variable.values)
    return [variable]


def values_of(state: State) -> dict[str, list[np.ndarray]]:
    """Returns the value of every variable on each local replica, by name, in arrays to read.

    On CPUs an array shares its memory with the variable until the variable gets a new value. This
    is not a collective.
    """
    return {
        name: [value_of(part) for part in components(variable)]
        for name, variable in state.named().items()
    }


def value_of(variable: tf.Variable) -> np.ndarray:
    """Returns the present value of a variable, in an array to read."""
    # Reading the variable itself would copy it.
    return array_of(variable.read_value())


def set_values(state: State, values: Mapping[str, Sequence[np.ndarray]]) -> None:
    """Sets every variable to the values that `values_of` returned, to the bit.

    This is not a collective.
    """
    for name, variable in state.named().items():
        for part, value in zip(components(variable), values.get(name, ()), strict=False):
            part.assign(value)


@contextlib.contextmanager
def without_strategy(device: str | None) -> Iterator[None]:
    """Leaves every strategy's scope inside the context, and runs operations at once.

    A strategy's scope belongs to the default graph, so it does not reach another graph. TensorFlow
    does not allow entering the scope of the default strategy within another scope. The operations
    run on `device`; None leaves it to TensorFlow.
    """
    with tf.Graph().as_default(), eager_mode(), tf.device(device):
        yield


@contextlib.contextmanager
def on_one_device(state: State, device: str | None = None) -> Iterator[Mapping[int, tf.Variable]]:
    """Replaces all variables inside the context by plain ones on one device.

    The plain variables begin with the values of this process' first replica. Models and optimizers
    belong to no strategy inside. Afterwards the model has its original variables again, with their
    values. A `device` of None leaves it to TensorFlow.

    Yields:
        Each plain variable, by the id of the `tf.Variable` that it replaces.
    """
    original = [(v, tf_variable_of(v)) for v in state.variables]
    original = [(v, tf_variable) for v, tf_variable in original if tf_variable is not None]
    strategies = [(owner, strategy_of(owner)) for owner in state.models_and_optimizers]
    with without_strategy(device):
        plain: dict[int, tf.Variable] = {}
        keys = variable_keys(state.optimizers, state.variables)
        exchanged: list[Any] = []
        try:
            for variable, tf_variable in original:
                if id(tf_variable) not in plain:
                    plain[id(tf_variable)] = _plain(tf_variable, variable)
                set_tf_variable(variable, plain[id(tf_variable)])
            for holder in state.holders:
                if id(holder.variable) not in plain:
                    plain[id(holder.variable)] = _plain(holder.variable, holder.variable)
                holder.put(plain[id(holder.variable)])
            for owner, _ in strategies:
                set_strategy(owner, None)
            exchanged = exchange_keys(state.optimizers, keys)
            yield plain
        finally:
            for variable, tf_variable in original:
                set_tf_variable(variable, tf_variable)
            for holder in state.holders:
                holder.put(holder.variable)
            for owner, strategy in strategies:
                set_strategy(owner, strategy)
            restore_keys(exchanged)


def _plain(variable: tf.Variable, like: Any) -> tf.Variable:
    """Returns a plain variable with the name and the value of the first local replica's.

    `like` tells `trainable`. An optimizer of the user's own may look for "bias" in the name.
    """
    value = value_of(components(variable)[0])
    trainable = bool(getattr(like, "trainable", False))
    name = variable.name.partition(":")[0]
    return tf.Variable(value, dtype=variable.dtype, trainable=trainable, name=name)


def enter(model: keras.Model) -> None:
    """Moves a model into the strategy of this process, if it was made outside every scope.

    That strategy is the one whose scope is entered, or the one that `make_strategy` has made. A
    model that has a strategy keeps it. Variables that were made outside the scope of the model's
    strategy are re-created inside it. Every worker calls this function.

    Raises:
        ClusterError: the environment names several workers, but this process has made no strategy.
        ModelError: a variable was made in the scope of another strategy.
    """
    strategy = strategy_of(model)
    if strategy is None and tf.distribute.has_strategy():
        strategy = tf.distribute.get_strategy()
    if strategy is None:
        strategy = strategies.made()
    if strategy is not None:
        adopt(model, strategy)
    elif not strategies.is_alone():
        environment = described(os.environ)
        is_evaluator = environment and getattr(environment.job, "is_evaluator", False)
        if environment is not None and environment.job.size > 1 and not is_evaluator:
            name = "TF_CONFIG" if environment.name == "tf_config" else environment.name
            raise ClusterError(
                f"{name} names {environment.job.size} workers, but this process has made no "
                "strategy, so each worker would train alone. Call 'strategy = "
                "tfmulti.make_strategy()' first, before any other TensorFlow operation."
            )
        _warn_of_unused_devices()


@functools.cache
def _warn_of_unused_devices() -> None:
    """Warns once if a model without a strategy trains on one of several devices.

    The user may have made a strategy by tf.distribute, and nothing in its scope.
    """
    devices = tf.config.get_visible_devices("GPU") or tf.config.get_visible_devices("CPU")
    count = sum(len(tf.config.get_logical_device_configuration(d) or [d]) for d in devices)
    if count > 1:
        warnings.warn(
            f"the model trains on one of {count} devices, because it is in the scope of no "
            f"strategy. {SCOPE_ADVICE} make_strategy('one_device') says that one is enough.",
            stacklevel=4,
        )


def adopt(model: keras.Model, strategy: tf.distribute.Strategy) -> int:
    """Moves a model into a strategy, and returns how many variables were re-created there.

    Variables of the model, its optimizers and its metrics that were made outside the strategy's
    scope are re-created inside it, with their values. Every worker calls this function: with
    several workers a new variable gets the chief's value. If all variables are in the scope, no
    variable changes.

    Raises:
        ModelError: a variable was made in the scope of another strategy.
    """
    state = find(model)
    for owner in state.models_and_optimizers:
        if strategy_of(owner) is not strategy:
            set_strategy(owner, strategy)
    created = strategy.extended.variable_created_in_scope
    outside = [
        v for v in state.variables if (old := tf_variable_of(v)) is not None and not created(old)
    ]
    holders = [holder for holder in state.holders if not created(holder.variable)]
    if not outside and not holders:
        return 0
    _check_plain([*map(tf_variable_of, outside), *(holder.variable for holder in holders)])
    placement = placement_of(strategy)
    keys = variable_keys(state.optimizers, state.variables)
    with strategy.scope():
        new: dict[int, tf.Variable] = {}
        for variable in outside:
            old = tf_variable_of(variable)
            if id(old) not in new:
                new[id(old)] = _in_scope(variable, array_of(old), placement)
            set_tf_variable(variable, new[id(old)])
        for holder in holders:
            old = holder.variable
            if id(old) not in new:
                new[id(old)] = tf.Variable(
                    array_of(old),
                    dtype=old.dtype,
                    trainable=old.trainable,
                    synchronization=old.synchronization,
                    aggregation=old.aggregation,
                )
            holder.put(new[id(old)])
    exchange_keys(state.optimizers, keys)
    return len(new)


def _in_scope(variable: Any, value: np.ndarray, placement: Placement) -> tf.Variable:
    """Returns a new `tf.Variable` for a Keras variable, in the current scope."""
    new = new_tf_variable(variable, value)
    if variable.synchronization == "on_read" and variable.aggregation == "sum":
        # The replicas' parts are added up, so only the first replica may hold the value.
        for local, part in enumerate(components(new)):
            if placement.first_replica + local:
                part.assign(np.zeros_like(value))
    return new


def _check_plain(variables: Sequence[Any]) -> None:
    """Raises ModelError if a variable was made in the scope of a strategy."""
    for variable in variables:
        if isinstance(variable, tf.distribute.DistributedValues):
            raise ModelError(
                f"the variable {variable.name!r} was made in the scope of another strategy than "
                f"the model's. {SCOPE_ADVICE}"
            )

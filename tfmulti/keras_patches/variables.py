"""Access to the variables and the strategy of a model or optimizer that moves to another strategy.

| what | name | upstream | can go when |
|---|---|---|---|
| `float(variable)` | `DistributedVariable.__float__`, `__int__`, `__array__` | none | it has them, as TensorFlow's other variables do |
| variables | `Variable._value`, `Variable._initialize` | none | a Keras variable can be given another `tf.Variable` |
| `attributes_of` | `Operation._inbound_nodes`, `_outbound_nodes`, and `_self_…` of TensorFlow's tracking | none | never: a search for variables looks at all attributes |
| `array_of` | none | none | `numpy.asarray` reads a tensor that is one number in bfloat16 |
| strategies | `Trainer._distribute_strategy`, `TFOptimizer._distribution_strategy`, `_var_key` | none | models and optimizers can change their strategy |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.values import DistributedVariable

from tfmulti.distribution.python_attributes import values_of


def install() -> None:
    """Makes `float`, `int` and `numpy.asarray` read a variable that has a copy on each replica.

    Keras' variables pass these calls on to TensorFlow's.
    """
    conversions: dict[str, Callable[..., Any]] = {
        "__float__": float,
        "__int__": int,
        "__array__": np.asarray,
    }
    for name, convert in conversions.items():
        if not hasattr(DistributedVariable, name):
            setattr(DistributedVariable, name, _of_one_copy(convert))


def _of_one_copy(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a conversion method for variables with copies.

    Outside a step, for example in a callback, the copies of all replicas are the same.
    """
    return lambda variable, *args, **options: convert(variable.numpy(), *args, **options)


def array_of(value: Any) -> np.ndarray:
    """Returns a tensor, a variable or a number as an array, which shares the memory if it can.

    `numpy.asarray` cannot read a tensor that is one number in bfloat16.
    """
    is_number = tf.is_tensor(value) and value.dtype == tf.bfloat16 and not value.shape.rank
    return np.asarray(value.numpy() if is_number else value)


def tf_variable_of(variable: Any) -> Any:
    """Returns the `tf.Variable` behind a Keras variable, or None before the variable is built."""
    return variable._value


def set_tf_variable(variable: Any, value: tf.Variable) -> None:
    """Makes a Keras variable keep its value in another `tf.Variable`."""
    variable._value = value


def new_tf_variable(variable: Any, value: Any) -> tf.Variable:
    """Returns a new `tf.Variable` as Keras makes it for a Keras variable in the current scope.

    The Keras variable itself keeps its `tf.Variable`.

    Args:
        variable: the Keras variable.
        value: the first value of the new `tf.Variable`.
    """
    old_variable = variable._value
    variable._initialize(value)
    new_variable, variable._value = variable._value, old_variable
    return new_variable


def strategy_of(owner: Any) -> tf.distribute.Strategy | None:
    """Returns the strategy whose scope a model or optimizer was made in, or None for no scope."""
    if isinstance(owner, keras.Model):
        strategy = owner._distribute_strategy
    else:
        strategy = vars(owner).get("_distribution_strategy")
    # Keras stores TensorFlow's default strategy in an optimizer that was made outside every scope.
    is_default = type(strategy).__name__ == "_DefaultDistributionStrategy"
    return None if is_default else strategy


def set_strategy(owner: Any, strategy: tf.distribute.Strategy | None) -> None:
    """Sets the strategy of a model or optimizer; None stands for "made in no scope"."""
    if isinstance(owner, keras.Model):
        owner._distribute_strategy = strategy
        return
    if strategy is None:
        # A new graph is inside no strategy's scope.
        with tf.Graph().as_default():
            strategy = tf.distribute.get_strategy()
    vars(owner)["_distribution_strategy"] = strategy


def attributes_of(owner: Any) -> list[tuple[str, Any]]:
    """Returns the attributes of an object that may hold variables, by name.

    The nodes of a symbolic call are left out: they lead to every layer of the graph. TensorFlow
    keeps lists of an object's parts for its checkpoints. They come last, so that a search finds a
    variable first under the user's own name.
    """
    nodes = ("_inbound_nodes", "_outbound_nodes")
    attributes = [(name, value) for name, value in values_of(owner).items() if name not in nodes]
    return sorted(attributes, key=lambda item: item[0].startswith("_self_"))


Keys = dict[Any, Any]


def variable_keys(optimizers: Sequence[Any], variables: Sequence[Any]) -> Keys:
    """Returns the variables that are built, by the keys under which optimizers know them."""
    if not optimizers:
        return {}
    built = [v for v in variables if v._value is not None]
    return {optimizers[0]._var_key(v): v for v in built}


def exchange_keys(optimizers: Sequence[Any], keys: Keys) -> list[tuple[Any, str, Any]]:
    """Makes optimizers find their variables after these got new `tf.Variable`s.

    Args:
        optimizers: the optimizers to change.
        keys: what `variable_keys` returned before the variables were re-created.

    Returns:
        The optimizer, name and old value of each changed attribute, for `restore_keys`.
    """
    old_attributes = []
    for optimizer in optimizers:
        new_keys = {old_key: optimizer._var_key(v) for old_key, v in keys.items()}
        for name, value in list(vars(optimizer).items()):
            if not isinstance(value, (dict, set)) or not any(_in(key, new_keys) for key in value):
                continue
            if isinstance(value, dict):
                changed: Any = {new_keys[k] if _in(k, new_keys) else k: v for k, v in value.items()}
            else:
                changed = {new_keys[k] if _in(k, new_keys) else k for k in value}
            old_attributes.append((optimizer, name, value))
            vars(optimizer)[name] = changed
    return old_attributes


def _in(key: Any, keys: Keys) -> bool:
    """Returns whether an item of an optimizer's attribute is one of its keys of variables."""
    return isinstance(key, str) and key in keys


def restore_keys(old_attributes: Sequence[tuple[Any, str, Any]]) -> None:
    """Undoes `exchange_keys`.

    Args:
        old_attributes: what `exchange_keys` returned.
    """
    for optimizer, name, value in old_attributes:
        vars(optimizer)[name] = value

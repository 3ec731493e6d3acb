"""Variables and strategies of models and optimizers that move to another strategy.

| what | name | upstream | can go when |
|---|---|---|---|
| `float(variable)` | public: `keras.Variable.__float__`, `__int__`, `__array__` | none | they read a mirrored variable |
| variables | `Variable._value`, `Variable._initialize` | none | a Keras variable can be given another `tf.Variable` |
| strategies | `Trainer._distribute_strategy`, `TFOptimizer._distribution_strategy`, `_var_key` | none | models and optimizers can change their strategy |
"""  # noqa: E501

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf

from tfmulti.keras_patches.patching import replace


def install() -> None:
    for name in ("__float__", "__int__", "__array__"):
        replace(keras.Variable, name, _of_one_copy)


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

"""Captures the state of a run from a model, and restores it.

`capture` and `restore` run on every worker, because each replica holds its own part of the metrics.
The state is a tree of plain values and NumPy arrays, which goes into a checkpoint
(`file_format.Record`). Variables are known by the names of `variable_names`.
"""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from tfmulti.distribution import replica_context
from tfmulti.distribution.connections import exchange
from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import ResumeError
from tfmulti.keras_patches.model_structure import SEED
from tfmulti.keras_patches.random_numbers import global_generator, made_global_generator
from tfmulti.keras_patches.variables import array_of
from tfmulti.training.state.model_checks import optimizers_of
from tfmulti.training.state.relocation import components
from tfmulti.training.state.trainer_state import state_of
from tfmulti.training.state.variable_names import (
    OUTSIDE,
    named_variables,
    places_of,
    variables_outside,
)

Tree = dict[str, Any]


def capture(model: keras.Model) -> Tree:
    """Returns the state that is not trained: metrics, random generators and other variables.

    An evaluation changes nothing besides this state. Every worker calls it: it is a collective.
    """
    state = state_of(model)
    generator = global_generator()
    named = named_variables(model)
    others = variables_outside(model, named)
    untrained = _variables(model, named, trained=False) | others
    variables = {name: _value(v) for name, v in untrained.items()}
    return {
        "variables": state.saved_variables | variables,
        "metrics": metric_states(model, _metrics_of_training(model)),
        "generator": None if generator is None else _value(generator.state),
        "random": random_states(),
    }


def capture_trained(model: keras.Model) -> Tree:
    """Returns the trainable weights and the optimizers' slots, by name.

    Every worker calls it, since a variable may be synchronized when it is read.
    """
    trained = _variables(model, named_variables(model), trained=True)
    return {name: _value(v) for name, v in trained.items()}


def _variables(model: keras.Model, named: Tree, *, trained: bool) -> Tree:
    """Returns the named variables that are trained, or the others; an optimizer's scalar is not."""
    weights = {id(v) for v in model.trainable_variables}
    weights |= {id(v) for o in optimizers_of(model) for v in o.variables if len(v.shape)}
    return {n: v for n, v in named.items() if (id(v) in weights) is trained}


def restore(model: keras.Model, tree: Tree, trained: Tree) -> None:
    """Restores what `capture` and `capture_trained` returned, in a built model.

    A layer that only training calls may not have made its seeds yet, and the user's code may not
    have made a variable outside of the model. `restore_late` restores them when they are there.

    Raises:
        ResumeError: the model, its optimizer or its metrics have other variables.
    """
    saved, state = tree["variables"] | trained, state_of(model)
    named = named_variables(model)
    # A checkpoint of an older version has no variables outside of the model.
    others = {n: v for n, v in variables_outside(model, named).items() if n in saved}
    variables = named | others
    late = {name: value for name, value in saved.items() if _is_late(model, name, variables)}
    _check_same(variables, {name: v for name, v in saved.items() if name not in late})
    for name, variable in variables.items():
        variable.assign(saved[name])
    state.saved_variables = late
    _set_metric_states(model, tree["metrics"])
    if tree.get("generator") is not None:
        made_global_generator().state.assign(np.asarray(tree["generator"], np.int64))
    set_random_states(tree["random"])


def _is_late(model: keras.Model, name: str, variables: Mapping[str, Any]) -> bool:
    """Returns whether a saved variable is not there yet: outside, or of a layer that is not built.

    Of a layer these are the seeds alone.
    """
    if name not in variables and name.startswith(OUTSIDE):
        return True
    if name in variables or not re.search(rf"/{SEED}( \d+)?$", name):
        return False
    layers = places_of(model).items()
    return any(not layer.built for path, layer in layers if name.startswith(f"{path}/"))


def restore_late(model: keras.Model) -> None:
    """Restores the variables that layers have made since `restore`."""
    saved = state_of(model).saved_variables
    if not saved:
        return
    named = named_variables(model)
    variables = named | variables_outside(model, named)
    for name in [name for name in saved if name in variables]:
        variables[name].assign(saved.pop(name))


def _check_same(variables: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Raises ResumeError where names, types or shapes of variables differ from the saved ones."""
    for name in [*variables, *saved]:
        current = _form(variables[name]) if name in variables else "not there"
        before = _form(saved[name]) if name in saved else "not there"
        if current != before:
            raise ResumeError(
                f"the model has changed: its variable {name!r} is {before} in the checkpoint and "
                f"{current} now. Build the same model and optimizer, or give a new folder."
            )


def _form(value: Any) -> str:
    return f"{keras.backend.standardize_dtype(value.dtype)} of shape {tuple(value.shape)}"


def _value(variable: Any) -> np.ndarray:
    # Every worker reads, because a variable that is synchronized on reading takes a collective.
    return np.array(array_of(keras.ops.convert_to_tensor(variable)))


@contextlib.contextmanager
def evaluating(model: keras.Model) -> Iterator[None]:
    """Notes the metrics that an evaluation makes after training has begun.

    They begin anew in each evaluation, and a run that resumes has not made them yet. So checkpoints
    leave them out. An evaluation before all training also builds the metrics of `compile`, which
    training uses.
    """
    before = {id(v) for v in replica_context.metric_variables(model)}
    try:
        yield
    finally:
        if model.train_function is not None:
            state_of(model).evaluation_metrics += [
                v for v in replica_context.metric_variables(model) if id(v) not in before
            ]


def _metrics_of_training(model: keras.Model) -> list[Any]:
    """Returns the variables of the model's metrics that no evaluation has made.

    `evaluating` notes the variables that an evaluation makes.
    """
    others = {id(v) for v in state_of(model).evaluation_metrics}
    return [v for v in replica_context.metric_variables(model) if id(v) not in others]


def metric_states(model: keras.Model, variables: list[Any]) -> Tree:
    """Returns the values of variables of metrics on all replicas as [replicas, …], by name.

    Every worker calls it: it is a collective.
    """
    own_values = [
        np.stack([array_of(part) for part in components(variable.value)]) for variable in variables
    ]
    data = b"".join(values.tobytes() for values in own_values)
    placement = placement_of(model.distribute_strategy)
    # The caller has told the launcher that this worker may wait for others.
    all_data = exchange(placement, "states of metrics", data) if placement.workers > 1 else [data]
    states, start = {}, 0
    for name, values in zip(_names(variables), own_values, strict=True):
        end = start + values.nbytes
        parts = [np.frombuffer(each[start:end], values.dtype) for each in all_data]
        count = len(parts) * len(values)
        states[name] = np.concatenate(parts).reshape(count, *values.shape[1:])
        start = end
    return states


def _set_metric_states(model: keras.Model, saved: Tree) -> None:
    """Restores each replica's part of the metrics, on any number of replicas."""
    placement = placement_of(model.distribute_strategy)
    variables = _metrics_of_training(model)
    names = _names(variables)
    if set(names) != set(saved):
        raise ResumeError(
            f"the metrics have changed: {', '.join(sorted(saved))} in the checkpoint, "
            f"{', '.join(sorted(names))} now. Compile with the same, or give a new folder."
        )
    for name, variable in zip(names, variables, strict=True):
        values = _of_replicas(saved[name], variable, placement.replicas)
        for replica, part in enumerate(components(variable.value), placement.first_replica):
            part.assign(values[replica])


def _of_replicas(states: np.ndarray, variable: Any, count: int) -> np.ndarray:
    """Returns a metric variable's value for each of `count` replicas, [count, …].

    If the number of replicas has changed, the first replica gets the sum of the saved values. All
    replicas get a mean, or a value that counts on the first replica only.
    """
    if len(states) == count:
        return states
    value = merged(states, variable)
    is_sum = variable.aggregation not in ("mean", "only_first_replica")
    return np.stack([value, *[np.zeros_like(value) if is_sum else value] * (count - 1)])


def merged(states: np.ndarray, variable: Any) -> Any:
    """Returns a metric variable's value over all replicas, from its values [replicas, …]."""
    if variable.aggregation == "mean":
        return states.mean(0, dtype=states.dtype)
    if variable.aggregation == "only_first_replica":
        return states[0]
    return states.sum(0, dtype=states.dtype)


def _names(variables: Sequence[Any]) -> list[str]:
    """Returns names of metric variables, which are unique because each begins with a number."""
    return [f"{number} {variable.name}" for number, variable in enumerate(variables)]


def random_states() -> Tree:
    """Returns the states of Python's and NumPy's generators, for `set_random_states`."""
    kind, numbers, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, python_numbers, next_gauss = random.getstate()
    return {
        "numpy": [str(kind), np.asarray(numbers), int(position), int(has_gauss), float(gauss)],
        "python": [version, np.array(python_numbers, np.uint64), next_gauss],
    }


def set_random_states(saved: Tree) -> None:
    """Sets Python's and NumPy's generators to the states that `random_states` returned.

    Raises:
        ValueError: NumPy's position is not within its numbers.
    """
    kind, numbers, position, has_gauss, gauss = saved["numpy"]
    # NumPy does not check it, and would read memory outside of the numbers.
    if not 0 <= position <= len(numbers):
        raise ValueError(f"the position in NumPy's random numbers is {position!r:.40}")
    np.random.set_state((kind, numbers, position, has_gauss, gauss))
    version, python_numbers, next_gauss = saved["python"]
    random.setstate((version, tuple(int(number) for number in python_numbers), next_gauss))

"""The values in Python that a compiled step keeps from the time when it was traced.

A step may read attributes of the model's objects, and values outside of its functions: globals,
values of a closure, and attributes of the user's own modules, classes and objects. The graph of the
step keeps the values of the time when TensorFlow traced it. `KeptValues` has copies of these
values, and compares the copies with the values of now.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np

from tfmulti.distribution.python_attributes import (
    all_values_of,
    attributes_of_keras,
    classes_of_user,
)
from tfmulti.training.state import code_names, model_search, step_code
from tfmulti.training.state.step_code import Owner, StepCode
from tfmulti.training.state.value_copies import ABSENT, copied, has_changed

# Private attributes of Keras' parts that hold what their public properties set.
_BEHIND_PROPERTIES = ("_trainable", "_learning_rate", "activity_regularizer")
# Parts of Keras that hold numbers for a step, and no variables.
_RULES = (
    keras.regularizers.Regularizer,
    keras.constraints.Constraint,
    keras.optimizers.schedules.LearningRateSchedule,
)
_OF_FUNCTIONS = (keras.losses.Loss, keras.metrics.Metric)
# The classes of Keras whose methods use names that a user's attribute may also have.
_BASES = (
    *(keras.Model, keras.layers.Layer, keras.losses.Loss, keras.metrics.Metric),
    *(keras.optimizers.Optimizer, *keras.Model.__mro__[1:]),
)

# A function that reads values by name, one that puts a name into words, and `_Kept.was_built`.
_Reader = tuple[Callable[[], Mapping[str, Any]], Callable[[str], str], bool]


class _Kept(NamedTuple):
    """Some values that a step may have read.

    Attributes:
        read: returns the values as they are now, by name.
        words: returns a name in words.
        before: for each name the copy of its value, as `value_copies` makes it.
        is_outside: whether the values are outside of the model, such as globals.
        was_built: whether the owner of the values had its weights when they were copied.
    """

    read: Callable[[], Mapping[str, Any]]
    words: Callable[[str], str]
    before: dict[str, Any]
    is_outside: bool
    was_built: bool


class KeptValues:
    """The values that a step reads if it is traced now.

    Attributes:
        code: the functions that the step may call.
    """

    def __init__(self, found: model_search.State, step: str) -> None:
        """Copies the values.

        Args:
            found: what `model_search.find` found from the model.
            step: such as `train_step`.
        """
        self.code = code = StepCode(found, step)
        part = functools.partial
        objects = {id(o): o for o in found.objects}
        objects |= {id(rule): rule for rule in _rules_in(found, code)}
        of_model: list[_Reader] = [
            *((part(_attributes, o, code), part(_of, o), _is_built(o)) for o in objects.values()),
            *((part(_rules_of_variable, v), part(_of, v), True) for v in found.variables),
        ]
        outside: list[_Reader] = [
            *((part(code_names.outside, f), part(_read_by, f), True) for f in code.functions),
            *(
                (part(code.attributes_of, o.value), part(_of_owner, o), True)
                for o in code.owners.values()
            ),
        ]
        self._kept = [
            _Kept(read, words, {n: copied(v) for n, v in read().items()}, is_outside, was_built)
            for readers, is_outside in ((of_model, False), (outside, True))
            for read, words, was_built in readers
        ]

    def of_types(self, kinds: tuple[type, ...]) -> dict[str, Any]:
        """Returns the objects of some types that are values, or in a list, tuple or dict of them.

        Returns:
            The objects by their names in words. Of several in a list the last one has the name.
        """
        found: dict[str, Any] = {}
        for kept in self._kept:
            for name, value in kept.read().items():
                inside = value.values() if isinstance(value, dict) else value
                inside = inside if isinstance(value, (list, tuple, dict)) else ()
                items = [v for v in (value, *inside) if issubclass(type(v), kinds)]
                found |= {kept.words(name).rstrip(","): item for item in items}
        return found

    def changed(self) -> tuple[list[str], str | None]:
        """Returns the values that differ from the copies.

        Returns:
            The names in words of all such values, and the first one that
            `python_attributes.first_change` does not tell, or None. That function tells numbers
            that become other numbers, and texts, in the model's own objects.
        """
        changes = list(self._changes())
        others = (
            words
            for words, *kinds, is_outside in changes
            if is_outside or kinds not in (["number", "number"], ["text", "text"])
        )
        return [words for words, *_ in changes], next((name.rstrip(",") for name in others), None)

    def first_new(self, ignored: Container[str]) -> str | None:
        """Returns the first value that differs from its copy, or None.

        A change of a layer's `trainable` counts, too.

        Args:
            ignored: names in words of values that are left out.

        Returns:
            The value in words, such as `Dropout.rate of 'dropout_1'`.
        """
        return next((words for words, *_ in self._changes() if words not in ignored), None)

    def _changes(self) -> Iterator[tuple[str, str, str, bool]]:
        """Yields each value that differs: its name in words, both kinds, and `is_outside`."""
        for read, words, before, is_outside, was_built in self._kept:
            now = read()
            for name in {**before, **now}:
                old, new = before.get(name, ABSENT), copied(now.get(name))
                is_new = old == ABSENT and isinstance(now.get(name), keras.Variable)
                if has_changed(old, new) and not (is_new and not was_built):
                    yield words(name), old[0], new[0], is_outside


def _of(owner: Any, name: str) -> str:
    """Returns an attribute in words, such as `Dropout.rate of 'dropout_1'`."""
    has_name = isinstance(owner, (keras.layers.Layer, keras.Variable))
    of = f" of {owner.name!r}" if has_name else ""
    return f"{type(owner).__name__}.{name.removeprefix('_')}{of}"


def _read_by(function: types.FunctionType, name: str) -> str:
    """Returns a value outside of a function in words, such as `rate, which Critic.call reads,`."""
    return f"{name}, which {function.__qualname__.rpartition('<locals>.')[2]} reads,"


def _of_owner(owner: Owner, name: str) -> str:
    """Returns an attribute of an object outside of the model in words, as `_read_by` does."""
    return _read_by(owner.reader, f"{owner.name}.{name}")


def _attributes(owner: Any, code: StepCode) -> dict[str, Any]:
    """Returns the attributes of an object that a step may read.

    Of an object of the user's own these are the ones that are named by the functions of steps. Of a
    part of Keras they are the settings that Keras' code names, such as an activation.
    """
    kind: type = type(owner)
    own = classes_of_user(kind)
    values = all_values_of(owner)
    ignored = attributes_of_keras()

    def may_be_read(name: str, value: Any) -> bool:
        # TensorFlow counts in an attribute with `_self_` how often a checkpoint was written.
        if name in ignored or name.startswith("_self_" if own else "_"):
            # Losses and metrics of Keras keep the arguments of their function in a dict.
            has_arguments = isinstance(owner, _OF_FUNCTIONS) and isinstance(value, dict)
            return name in _BEHIND_PROPERTIES or has_arguments
        if own and code.may_read(name, value):
            return True
        # Keras takes some attributes for False if they are absent, and sets them to False later.
        is_unset = value is None or value is False
        is_data = isinstance(value, (np.ndarray, list, tuple, dict, set))
        is_data = is_data and not isinstance(owner, _RULES)
        return not (is_unset or is_data) and name in _named_by_keras(kind)

    return {name: value for name, value in values.items() if may_be_read(name, value)}


@functools.cache
def _named_by_keras(cls: type) -> frozenset[str]:
    """Returns the names in the methods of the classes of Keras that a class is, or inherits from.

    If the class is the user's own, the most general classes of Keras do not count.
    """
    left_out = _BASES if classes_of_user(cls) else ()
    return frozenset(step_code.names_of_classes(cls, left_out))


def _is_built(owner: Any) -> bool:
    """Returns whether an object of a model is no layer, or a layer that has its weights."""
    return not isinstance(owner, keras.layers.Layer) or bool(owner.built)


def _rules_in(found: model_search.State, code: StepCode) -> Iterator[Any]:
    """Yields the regularizers, constraints and schedules of the parts of a model."""
    values = [
        *(value for owner in found.objects for value in _attributes(owner, code).values()),
        *(rule for variable in found.variables for rule in _rules_of_variable(variable).values()),
    ]
    return (value for value in values if issubclass(type(value), _RULES))


def _rules_of_variable(variable: Any) -> dict[str, Any]:
    """Returns what Keras reads of a variable while it traces a step."""
    return {"regularizer": variable.regularizer, "constraint": variable.constraint}

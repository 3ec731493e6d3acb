"""Searches a model for its variables, and for the objects and functions that hold them.

Keras knows the variables of its own parts. A user may also hold variables in attributes, in lists
and dictionaries, or in the closures and globals of functions.
"""

from __future__ import annotations

import contextlib
import functools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti.distribution.python_attributes import set_value, slots_of
from tfmulti.errors import ModelError
from tfmulti.keras_patches.patching import is_of_keras
from tfmulti.keras_patches.variables import attributes_of, tf_variable_of
from tfmulti.training.state import trainer_state
from tfmulti.training.state.code_names import globals_in, names_in
from tfmulti.training.state.user_lines import is_module_of_user, is_of_library

# The search enters objects of these packages only if they are one of `_OF_KERAS`.
_LIBRARIES = ("keras", "tensorflow", "numpy", "tfmulti", "builtins")
_OF_KERAS = (
    keras.layers.Layer,
    keras.losses.Loss,
    keras.metrics.Metric,
    keras.optimizers.Optimizer,
    keras.random.SeedGenerator,
)
# A longer list that begins with a number, a text or an array is taken for data without variables.
_SHORT_LIST = 1000


@dataclass
class VariableHolder:
    """A place that holds a `tf.Variable` directly, without a Keras variable around it.

    Attributes:
        name: a name of the place that a user understands.
        variable: the `tf.Variable` that the place held when it was found.
        put: puts another value into the place.
    """

    name: str
    variable: tf.Variable
    put: Callable[[Any], None]


@dataclass
class State:
    """All variables that were found from a model, and the objects that hold them.

    Attributes:
        places: the Keras variables, each with a name of its place that a user understands.
        holders: the places that hold a `tf.Variable` directly.
        objects: all objects that have attributes, such as models and optimizers.
        functions: the user's functions and methods.
    """

    places: list[tuple[str, Any]] = field(default_factory=list)
    holders: list[VariableHolder] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    functions: list[types.FunctionType] = field(default_factory=list)

    @property
    def variables(self) -> list[Any]:
        """The Keras variables."""
        return [variable for _, variable in self.places]

    @property
    def optimizers(self) -> list[Any]:
        """The optimizers among the objects."""
        return [owner for owner in self.objects if isinstance(owner, keras.optimizers.Optimizer)]

    @property
    def own_objects(self) -> list[Any]:
        """The objects whose classes are not Keras', but the user's own, without schedules.

        A schedule of the learning rate runs once for the replicas of a process.
        """
        schedule = keras.optimizers.schedules.LearningRateSchedule
        own = (owner for owner in self.objects if not is_of_keras(type(owner)))
        return [owner for owner in own if not isinstance(owner, schedule)]

    @property
    def models_and_optimizers(self) -> list[Any]:
        """The objects to which Keras gives a strategy."""
        kinds = (keras.Model, keras.optimizers.Optimizer)
        return [owner for owner in self.objects if isinstance(owner, kinds)]

    def named(self) -> dict[str, Any]:
        """Returns every `tf.Variable` once, by a unique name that a user understands."""
        named: dict[str, Any] = {}
        ids: set[int] = set()
        pairs = [(v.path, tf_variable_of(v)) for v in self.variables]
        pairs += [(holder.name, holder.variable) for holder in self.holders]
        for name, variable in pairs:
            if variable is None or id(variable) in ids:
                continue
            ids.add(id(variable))
            unique, count = name, 1
            while unique in named:
                count += 1
                unique = f"{name} ({count})"
            named[unique] = variable
        return named


def find(*roots: Any) -> State:
    """Returns the variables in the given objects, and in everything that these hold."""
    return _Search().run(roots)


class _Search:
    """A depth-first search for variables, with a stack of its own instead of recursion."""

    def __init__(self) -> None:
        self.state = State()
        # The dict keeps the objects alive, so that Python uses no id again.
        self._seen: dict[int, Any] = {}
        self._stack: list[tuple[Any, str, Callable[[Any], None]]] = []

    def run(self, roots: Sequence[Any]) -> State:
        """Searches everything that the given objects hold, and returns the state that it finds."""
        self._add([(root, type(root).__name__, _not_replaceable) for root in roots])
        while self._stack:
            self._look(*self._stack.pop())
        return self.state

    def _look(self, value: Any, name: str, put: Callable[[Any], None]) -> None:
        """Looks at one object, which is in a place with a name and a `put`."""
        if type(value) in weakref.ProxyTypes:
            return
        if isinstance(value, keras.Variable):
            if not self._is_known(value):
                self.state.places.append((name, value))
        elif isinstance(value, tf.Variable):
            # Every place of a variable is noted, because all places must get the new variable.
            self.state.holders.append(VariableHolder(name, value, put))
        elif isinstance(value, (list, tuple, set, frozenset, Mapping)):
            if not self._is_known(value):
                self._look_into(value, name, put)
        elif isinstance(value, types.FunctionType):
            if not _is_of_library(value.__module__) and not self._is_known(value):
                self._look_at_function(value)
        elif isinstance(value, types.MethodType):
            self._add([(value.__self__, name, put), (value.__func__, name, put)])
        elif isinstance(value, functools.partial):
            parts = [value.func, *value.args, *value.keywords.values()]
            self._add([(part, name, _not_replaceable) for part in parts])
        # A `tf.function` holds the user's function in this attribute.
        elif hasattr(type(value), "python_function") and not self._is_known(value):
            self._add([(value.python_function, name, put)])
        elif _has_state(value) and not self._is_known(value):
            self._look_at_object(value)

    def _is_known(self, value: Any) -> bool:
        """Returns whether the search has seen an object before, and marks it as seen."""
        is_known = id(value) in self._seen
        self._seen[id(value)] = value
        return is_known

    def _add(self, places: Sequence[tuple[Any, str, Callable[[Any], None]]]) -> None:
        """Adds objects with their places to the stack, so that the first of them comes next."""
        self._stack += places[::-1]

    def _look_into(self, container: Any, name: str, put: Callable[[Any], None]) -> None:
        """Adds the items of a container to the stack."""
        first = next(iter(container), None)
        # `isinstance` would ask a weak proxy for the class of its object, which may be gone.
        is_data = issubclass(type(first), (int, float, str, bytes, np.ndarray, np.generic))
        if isinstance(container, Mapping):
            pairs = list(container.items())
            places = [(v, f"{name}[{key_in_words(k)}]", _putter(container, k)) for k, v in pairs]
        elif len(container) > _SHORT_LIST and is_data:
            return
        elif isinstance(container, tuple):
            putters = enumerate(_tuple_putters(container, put))
            places = [(container[i], f"{name}[{i}]", put_item) for i, put_item in putters]
        elif isinstance(container, list):
            places = [(v, f"{name}[{i}]", _putter(container, i)) for i, v in enumerate(container)]
        else:
            places = [(v, name, _not_replaceable) for v in list(container)]
        self._add(places)

    def _look_at_function(self, function: types.FunctionType) -> None:
        """Adds what a function of the user's own takes from its closure and its globals."""
        self.state.functions.append(function)
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        places: list[Any] = []
        for name, cell in cells:
            # An empty cell raises ValueError.
            with contextlib.suppress(ValueError):
                places.append((cell.cell_contents, name, _cell_putter(cell)))
        for name, value, namespace in _globals_of(function):
            if _may_be_used_by_a_step(value):
                places.append((value, name, _putter(namespace, name)))
        self._add(places)

    def _look_at_object(self, owner: Any) -> None:
        """Notes an object, and adds its attributes and the user's methods."""
        self.state.objects.append(owner)
        places: list[tuple[Any, str, Callable[[Any], None]]] = [
            (value, f"{name} of {type(owner).__name__}", functools.partial(set_value, owner, name))
            for name, value in attributes_of(owner)
            if name != trainer_state.ATTRIBUTE
        ]
        places += [(method, name, _not_replaceable) for name, method in methods_of_user(owner)]
        self._add(places)


def key_in_words(key: Any) -> str:
    """Returns a key of a dict for a name. The `repr` of a user's object may read its variables."""
    return repr(key) if isinstance(key, (str, int, float, bool)) else type(key).__name__


def methods_of_user(owner: Any) -> list[tuple[str, Any]]:
    """Returns the names and functions of the methods that no class of a library defines.

    The function of a property, and of a method of the class, counts, too.
    """
    return methods_of_class(type(owner))


def methods_of_class(cls: type) -> list[tuple[str, Any]]:
    """Returns what `methods_of_user` returns for an object of a class."""
    classes = [part for part in cls.__mro__ if not _is_of_library(part.__module__)]
    members = [(n, function_behind(v)) for part in classes for n, v in vars(part).items()]
    return [(name, function) for name, function in members if callable(function)]


def function_behind(member: Any) -> Any:
    """Returns the function of a property, or of a method of the class; else the member itself."""
    if isinstance(member, property):
        return member.fget
    if isinstance(member, functools.cached_property):
        return member.func
    return member.__func__ if isinstance(member, (staticmethod, classmethod)) else member


def _globals_of(function: types.FunctionType) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Yields the globals that a function names: each one's name, value and namespace.

    Of a module of the user's own these are the values that the function names.
    """
    for name in globals_in(function.__code__):
        value = function.__globals__.get(name)
        yield name, value, function.__globals__
        if is_module_of_user(value):
            of_module = vars(value)
            for part in names_in(function.__code__) & of_module.keys():
                yield part, of_module[part], of_module


def _may_be_used_by_a_step(value: Any) -> bool:
    """Returns whether to look at a global value: a variable, a part of Keras, or a user's function.

    A short list, tuple or dict may hold variables and parts of Keras.
    """
    kinds = (keras.Variable, tf.Variable, *_OF_KERAS)
    # A `tf.function` holds the user's function in this attribute.
    is_compiled = hasattr(type(value), "python_function")
    function = value.python_function if is_compiled else value
    if isinstance(function, types.FunctionType):
        return not is_of_library(function.__code__.co_filename)
    if isinstance(value, (list, tuple, dict)) and len(value) <= _SHORT_LIST:
        items = value.values() if isinstance(value, dict) else value
        return any(issubclass(type(item), kinds) for item in items)
    return issubclass(type(value), kinds)


def _is_of_library(module: Any) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES


def has_attributes(value: Any) -> bool:
    """Returns whether an object has a `__dict__` or `__slots__`, without running its code."""
    return type(value).__dictoffset__ != 0 or bool(slots_of(value))


def _has_state(value: Any) -> bool:
    """Returns whether an object may hold variables: one of Keras, or one of a user's class."""
    if isinstance(value, (type, types.ModuleType)) or not has_attributes(value):
        return False
    return isinstance(value, _OF_KERAS) or not _is_of_library(type(value).__module__)


def _not_replaceable(value: Any) -> None:
    """Raises ModelError, as the `put` of a place whose value cannot be replaced."""
    raise ModelError(
        "a tf.Variable is kept where it cannot be replaced (in a set, or as an argument that a "
        "functools.partial holds). Keep it as an attribute of the model."
    )


def _putter(container: Any, key: Any) -> Callable[[Any], None]:
    """Returns a `put` for an item, which bypasses Keras' and TensorFlow's tracking containers."""

    def put(value: Any) -> None:
        if isinstance(container, list):
            list.__setitem__(container, key, value)
        elif isinstance(container, dict):
            dict.__setitem__(container, key, value)
        else:
            container[key] = value

    return put


def _tuple_putters(container: Any, put: Callable[[Any], None]) -> list[Callable[[Any], None]]:
    """Returns a `put` for each item of a tuple, which puts a new tuple into the tuple's place."""
    items = list(container)

    def put_item(index: int, value: Any) -> None:
        items[index] = value
        kind = type(container)
        put(kind(*items) if hasattr(container, "_fields") else kind(items))

    return [functools.partial(put_item, index) for index in range(len(items))]


def _cell_putter(cell: types.CellType) -> Callable[[Any], None]:
    """Returns a `put` for a variable in the closure of a function."""

    def put(value: Any) -> None:
        cell.cell_contents = value

    return put

"""The Python code that a step may run, and the objects of the user's own that this code may read.

Python does not tell what a function reads. But the code of a function has the names of the globals
and attributes that it uses. So `StepCode` begins with the methods by which Keras runs a step, and
follows these names: to other functions and methods, and to objects outside of the model, such as a
global `config`. An attribute counts as read if one of these functions names it.
"""

from __future__ import annotations

import collections
import functools
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np

from tfmulti.distribution.python_attributes import (
    all_values_of,
    classes_of_user,
    values_of_classes,
)
from tfmulti.keras_patches.patching import is_of_keras
from tfmulti.keras_patches.variables import attributes_of
from tfmulti.training.state import model_search, outside_reads
from tfmulti.training.state.code_names import named, names_in, names_read, outside, texts_in
from tfmulti.training.state.names_from_data import takes_names_from_data
from tfmulti.training.state.user_lines import is_installed, is_module_of_user, is_of_library
from tfmulti.training.state.value_copies import FUNCTIONS, NUMBERS_AND_TEXTS, PARTS_OF_KERAS

_Module = types.ModuleType
_WITHOUT_OBJECTS = (*NUMBERS_AND_TEXTS, np.ndarray, np.generic)
_Cached = type(functools.cache(len))
_STEPS = ("train_step", "test_step", "predict_step")
# Keras calls the methods of these classes while no step runs.
_BESIDE_STEPS = (keras.callbacks.Callback, keras.utils.PyDataset)
# Methods that Keras or Python calls by themselves, but while no step runs.
_OUTSIDE_OF_STEPS = frozenset(
    [
        *("__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__", "__del__"),
        *("__repr__", "__str__", "__setattr__", "__getstate__", "__setstate__", "__reduce__"),
        *("build", "compile", "fit", "evaluate", "predict", "summary", "save", "save_weights"),
        *("train_on_batch", "test_on_batch", "predict_on_batch", "make_train_function"),
        *("make_test_function", "make_predict_function", "reset_metrics", "stateless_call"),
        *("export", "to_json", "quantize"),
        *("get_config", "from_config", "get_build_config", "build_from_config", "reset_state"),
        *("save_own_variables", "load_own_variables", "compile_from_config", "load_weights"),
    ]
)


class Owner(NamedTuple):
    """An object, a class or a module of the user's own that a function of a step may read.

    Attributes:
        value: the object.
        name: how the function reaches it, such as `config.optimizer`.
        reader: the function.
    """

    value: Any
    name: str
    reader: Any


class StepCode:
    """Knows which functions a step may call, and which objects these functions may read.

    Attributes:
        functions: the user's functions and methods.
        names: the globals and attributes that the functions name.
        owners: the objects outside of the model that the functions reach, by their ids.
    """

    def __init__(self, found: model_search.State, step: str) -> None:
        """Follows the names from the methods of a step.

        Args:
            found: what `model_search.find` found from the model.
            step: such as `train_step`.
        """
        self.functions: dict[types.FunctionType, None] = {}
        self.names: set[str] = set()
        # Whether a function takes names of attributes from data, and texts from which the functions
        # may put such names together.
        self._takes_names = False
        self._beginnings: tuple[str, ...] = ()
        self._ends: tuple[str, ...] = ()
        self.owners: dict[int, Owner] = {}
        # Functions that read from outside of the program, by the names that hold them.
        self._held_readers: dict[str, Any] = {}
        self._step = step
        # The methods that no function has named so far.
        self._methods: dict[str, list[types.FunctionType]] = {}
        self._to_read: list[types.FunctionType] = []
        self._searched: dict[int, Any] = {}
        # Objects of the model are no owners.
        self._of_model = {id(owner) for owner in found.objects}
        for cls in {type(owner): None for owner in found.objects}:
            self._meet(cls)
        for owner in found.objects:
            for name, value in attributes_of(owner):
                self._reach(value, name, None)
        self._follow()

    def _meet(self, cls: type) -> None:
        """Notes the methods of a class of the user's own."""
        if not issubclass(cls, PARTS_OF_KERAS) and is_installed(cls):
            return
        for name, method in model_search.methods_of_class(cls):
            functions = [f for f in _with_wrapped(method) if isinstance(f, types.FunctionType)]
            if name in self.names or self._is_called_by_itself(cls, name):
                self._to_read += functions
            else:
                self._methods.setdefault(name, []).extend(functions)

    def _is_called_by_itself(self, cls: type, name: str) -> bool:
        """Returns whether Keras or Python may call a method in a step without its name."""
        if name in _STEPS or name in _OUTSIDE_OF_STEPS:
            return name == self._step
        is_special = name.startswith("__") and name.endswith("__")
        # Keras asks the cell of a recurrent layer for its first state.
        is_of_cell = name == "get_initial_state"
        of_keras = (p for p in cls.__mro__ if is_of_keras(p) and not issubclass(p, _BESIDE_STEPS))
        return is_special or is_of_cell or any(name in vars(part) for part in of_keras)

    def _follow(self) -> None:
        """Reads functions until none of them names or reaches anything new."""
        owners = -1
        while self._to_read or owners != len(self.owners):
            owners = len(self.owners)
            while self._to_read:
                self._read(self._to_read.pop(0))
            for value, name, reader in list(self.owners.values()):
                for attribute, inner in self.attributes_of(value).items():
                    self._reach(inner, f"{name}.{attribute}", reader)

    def _read(self, function: types.FunctionType) -> None:
        """Notes a function, the names in its code, and the values that the function reaches."""
        if function in self.functions:
            return
        self.functions[function] = None
        names = names_read(function) - self.names
        self.names |= names
        self._takes_names |= takes_names_from_data(function.__code__)
        texts = [text for text in texts_in(function.__code__) if len(text) > 1]
        self._beginnings += tuple(text for text in texts if text.endswith("_"))
        self._ends += tuple(text for text in texts if text.startswith("_"))
        for name in names & self._methods.keys():
            self._to_read += self._methods.pop(name)
        for name, value in outside(function).items():
            self._reach(value, name, function)

    def _reach(self, value: Any, name: str, reader: Any) -> None:
        """Notes what a function can reach: other functions, and objects of the user's own.

        Without a function, `reader` is None, and the value is a part of the model. Its objects are
        known already, so only functions are noted.
        """
        to_reach = collections.deque([(value, name)])
        reached: dict[int, Any] = {}
        while to_reach:
            value, name = to_reach.popleft()
            if type(value) in weakref.ProxyTypes or id(value) in reached:
                continue
            reached[id(value)] = value
            if outside_reads.what_reads(value) is not None:
                self._held_readers.setdefault(name, value)
            value, *wrapped = _with_wrapped(value)
            to_reach.extend((inner, name) for inner in wrapped)
            if isinstance(value, types.MethodType):
                to_reach.append((value.__self__, name))
                value = value.__func__
            if isinstance(value, types.FunctionType):
                self._reach_function(value, name, reader)
            elif isinstance(value, functools.partial):
                parts = (value.func, *value.args, *value.keywords.values())
                to_reach.extend((part, name) for part in parts)
            elif isinstance(value, (list, tuple, dict)):
                if id(value) not in self._searched:
                    self._searched[id(value)] = value
                    to_reach.extend(_entries_of(value, name))
            elif reader is not None and not self._knows(value) and _is_of_user(value):
                self.owners[id(value)] = Owner(value, name, reader)
                if not isinstance(value, _Module):
                    self._meet(value if isinstance(value, type) else type(value))

    def _reach_function(self, function: types.FunctionType, name: str, reader: Any) -> None:
        """Notes a function of the user's own."""
        if is_of_library(function.__code__.co_filename):
            return
        if function not in self.functions:
            self._to_read.append(function)
        # A function may have attributes, such as `penalty.rate`.
        if reader is not None and vars(function):
            self.owners.setdefault(id(function), Owner(function, name, reader))

    def _knows(self, value: Any) -> bool:
        """Returns whether an object is a part of the model, or among the owners."""
        return id(value) in self._of_model or id(value) in self.owners

    def uses(self, module: _Module, generator: type) -> bool:
        """Returns whether a step may draw random numbers by a module or by its functions.

        Args:
            module: the module, such as `random`.
            generator: the type of the object whose methods are the functions of the module.
        """
        for function in self.functions:
            functions = [v for v in outside(function).values() if isinstance(v, FUNCTIONS)]
            if any(isinstance(getattr(f, "__self__", None), generator) for f in functions):
                return True
            if any(value is module for _, _, value in named(function)):
                return True
        return False

    def reads_elsewhere(self) -> tuple[str, str] | None:
        """Returns what a step reads from outside of the program, such as a file, or None.

        Returns:
            Two texts, as `outside_reads.first_read` returns them: what is read, and the name of the
            user's function or attribute by which it is read.
        """
        held = self._held_readers.items()
        read = {n: v for n, v in held if n.partition("[")[0].rpartition(".")[2] in self.names}
        return outside_reads.first_read(self.functions, read)

    def makes_parts_of_keras(self) -> bool:
        """Returns whether a function may make a layer or an initializer, which draw seeds."""
        kinds = (keras.layers.Layer, keras.Initializer, keras.random.SeedGenerator)
        values = (value for f in self.functions for _, _, value in named(f))
        return any(isinstance(value, type) and issubclass(value, kinds) for value in values)

    def attributes_of(self, owner: Any) -> dict[str, Any]:
        """Returns those attributes of an object, class or module that a function may read."""
        values = _attributes(owner)
        return {name: value for name, value in values.items() if self.may_read(name, value)}

    def may_read(self, name: str, value: Any) -> bool:
        """Returns whether a function may read an attribute of this name with this value."""
        is_put_together = name.startswith(self._beginnings) or name.endswith(self._ends)
        # Not each function of a module belongs to a step in which names come from data.
        is_value = not isinstance(value, (*FUNCTIONS, _Module, type))
        return name in self.names or is_put_together or (self._takes_names and is_value)


def _with_wrapped(value: Any) -> list[Any]:
    """Returns a value, and the function in it if it is what a decorator has returned."""
    if hasattr(type(value), "python_function"):
        return [value.python_function]
    is_decorated = isinstance(value, (types.FunctionType, _Cached)) and "__wrapped__" in vars(value)
    return [value, value.__wrapped__] if is_decorated else [value]


def _entries_of(values: Any, name: str) -> list[tuple[Any, str]]:
    """Returns the entries of a list, tuple or dict that a function may reach, and their names."""
    pairs: Iterable[tuple[Any, Any]]
    # The methods of a subclass may do anything. A proxy only claims to be a dict.
    if isinstance(values, dict):
        pairs = dict.items(values) if issubclass(type(values), dict) else values.items()
    else:
        of_kind = next((k for k in (list, tuple) if issubclass(type(values), k)), type(values))
        pairs = enumerate(of_kind.__iter__(values))
    # `isinstance` would ask a weak proxy for the class of its object, which may be gone.
    return [
        (item, f"{name}[{model_search.key_in_words(key)}]")
        for key, item in list(pairs)
        if not issubclass(type(item), _WITHOUT_OBJECTS)
    ]


def _is_of_user(value: Any) -> bool:
    """Returns whether a value is a module, a class or an object that may hold the user's values."""
    if isinstance(value, _Module):
        return is_module_of_user(value)
    if isinstance(value, (*FUNCTIONS, *PARTS_OF_KERAS)) or not model_search.has_attributes(value):
        return False
    if isinstance(value, type):
        return any(not is_installed(c) for c in classes_of_user(value))
    # An object of an installed package has attributes that the user sets, too, such as settings.
    return bool(classes_of_user(type(value)))


def _attributes(owner: Any) -> Mapping[str, Any]:
    """Returns the attributes of an object, a class or a module of the user's own."""
    if isinstance(owner, _Module):
        return vars(owner)
    if isinstance(owner, type):
        return values_of_classes(owner)
    return all_values_of(owner)


def names_of_classes(cls: type, bases: tuple[type, ...]) -> Iterator[str]:
    """Yields the names in the methods of the classes of Keras that a class inherits from.

    Args:
        cls: the class.
        bases: the classes that are left out.
    """
    for part in cls.__mro__:
        if is_of_keras(part) and part not in bases:
            for member in vars(part).values():
                function = model_search.function_behind(member)
                if isinstance(function, types.FunctionType):
                    yield from names_in(function.__code__)

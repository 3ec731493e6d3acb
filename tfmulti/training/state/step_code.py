"""The Python code that a step may run, and the objects of the user's own that this code may read.

Python does not tell what a function reads. But the code of a function has the names of the globals
and attributes that it uses. So `StepCode` begins with the methods by which Keras runs a step, and
follows these names: to other functions and methods, and to objects outside of the model, such as a
global `config`. An attribute counts as read if one of these functions names it.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import sys
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import keras

from tfmulti.distribution.python_attributes import (
    all_values_of,
    classes_of_user,
    values_of_classes,
)
from tfmulti.keras_patches.patching import is_of_keras
from tfmulti.keras_patches.variables import attributes_of
from tfmulti.training.state import relocation
from tfmulti.training.state.user_lines import is_module_of_user, is_of_library

_Module = types.ModuleType
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
PARTS_OF_KERAS = (
    *(keras.layers.Layer, keras.losses.Loss, keras.metrics.Metric, keras.optimizers.Optimizer),
    *(keras.regularizers.Regularizer, keras.constraints.Constraint, keras.Initializer),
    *(keras.optimizers.schedules.LearningRateSchedule, keras.Variable),
)
_Cached = type(functools.cache(len))
_STEPS = ("train_step", "test_step", "predict_step")
# Methods that Keras or Python calls by themselves, but while no step runs.
_OUTSIDE_OF_STEPS = frozenset(
    [
        *("__init__", "__new__", "__post_init__", "__init_subclass__", "__set_name__", "__del__"),
        *("__repr__", "__str__", "__setattr__", "__getstate__", "__setstate__", "__reduce__"),
        *("build", "compile", "fit", "evaluate", "predict", "summary", "save", "save_weights"),
        *("get_config", "from_config", "get_build_config", "build_from_config", "reset_state"),
        *("save_own_variables", "load_own_variables", "compile_from_config", "load_weights"),
    ]
)
# A longer list or dict of the user's own is data, and is not searched for objects.
_MOST_ITEMS = 1000
_DEEPEST = 3


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

    def __init__(self, found: relocation.State, step: str) -> None:
        """Follows the names from the methods of a step.

        Args:
            found: what `relocation.find` found from the model.
            step: such as `train_step`.
        """
        self.functions: dict[types.FunctionType, None] = {}
        self.names: set[str] = set()
        # Texts from which the functions may put names of attributes together.
        self._beginnings: tuple[str, ...] = ()
        self._ends: tuple[str, ...] = ()
        self.owners: dict[int, Owner] = {}
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
        if not issubclass(cls, PARTS_OF_KERAS) and _is_installed(cls):
            return
        for name, method in relocation.methods_of_class(cls):
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
        of_keras = (part for part in cls.__mro__ if is_of_keras(part))
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
        texts = [text for text in relocation.texts_in(function.__code__) if len(text) > 1]
        self._beginnings += tuple(text for text in texts if text.endswith("_"))
        self._ends += tuple(text for text in texts if text.startswith("_"))
        for name in names & self._methods.keys():
            self._to_read += self._methods.pop(name)
        for name, value in outside(function).items():
            self._reach(value, name, function)

    def _reach(self, value: Any, name: str, reader: Any, depth: int = 0) -> None:
        """Notes what a function can reach: other functions, and objects of the user's own.

        Without a function, `reader` is None, and the value is a part of the model. Its objects are
        known already, so only functions are noted.
        """
        if type(value) in weakref.ProxyTypes:
            return
        value, *wrapped = _with_wrapped(value)
        for inner in wrapped:
            self._reach(inner, name, reader, depth)
        if isinstance(value, types.MethodType):
            self._reach(value.__self__, name, reader, depth)
            value = value.__func__
        if isinstance(value, types.FunctionType):
            if is_of_library(value.__code__.co_filename):
                return
            if value not in self.functions:
                self._to_read.append(value)
            # A function may have attributes, such as `penalty.rate`.
            if reader is not None and vars(value):
                self.owners.setdefault(id(value), Owner(value, name, reader))
        elif isinstance(value, functools.partial):
            for part in (value.func, *value.args, *value.keywords.values()):
                self._reach(part, name, reader, depth)
        elif isinstance(value, (list, tuple, dict)):
            if depth < _DEEPEST and len(value) <= _MOST_ITEMS and id(value) not in self._searched:
                self._searched[id(value)] = value
                pairs = value.items() if isinstance(value, dict) else enumerate(value)
                for key, item in list(pairs):
                    words = f"{name}[{relocation.key_in_words(key)}]"
                    self._reach(item, words, reader, depth + 1)
        elif reader is not None and not self._knows(value) and _is_of_user(value):
            self.owners[id(value)] = Owner(value, name, reader)
            if not isinstance(value, _Module):
                self._meet(value if isinstance(value, type) else type(value))

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
            if any(value is module for _, _, value in _named(function)):
                return True
        return False

    def makes_parts_of_keras(self) -> bool:
        """Returns whether a function may make a layer or an initializer, which draw seeds."""
        kinds = (keras.layers.Layer, keras.Initializer, keras.random.SeedGenerator)
        values = (value for f in self.functions for _, _, value in _named(f))
        return any(isinstance(value, type) and issubclass(value, kinds) for value in values)

    def attributes_of(self, owner: Any) -> dict[str, Any]:
        """Returns those attributes of an object, a class or a module that the functions name."""
        return {name: value for name, value in _attributes(owner).items() if self.may_read(name)}

    def may_read(self, name: str) -> bool:
        """Returns whether a function names an attribute, or may put its name together."""
        is_named = name in self.names
        return is_named or name.startswith(self._beginnings) or name.endswith(self._ends)


def _with_wrapped(value: Any) -> list[Any]:
    """Returns a value, and the function in it if it is what a decorator has returned."""
    if hasattr(type(value), "python_function"):
        return [value.python_function]
    is_decorated = isinstance(value, (types.FunctionType, _Cached)) and "__wrapped__" in vars(value)
    return [value, value.__wrapped__] if is_decorated else [value]


def outside(function: types.FunctionType) -> dict[str, Any]:
    """Returns the values outside of a function that its code names.

    They are globals, values of its closure, and defaults of its arguments.
    """
    code, of_module = function.__code__, function.__globals__
    values = {n: of_module[n] for n in relocation.globals_in(code) if n in of_module}
    arguments = code.co_varnames[: code.co_argcount]
    defaults = function.__defaults__ or ()
    values |= dict(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True))
    values |= function.__kwdefaults__ or {}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        # An empty cell raises ValueError.
        with contextlib.suppress(ValueError):
            values[name] = cell.cell_contents
    return {n: value for n, value in values.items() if type(value) not in weakref.ProxyTypes}


def names_read(function: types.FunctionType) -> frozenset[str]:
    """Returns the globals and attributes that a function, and the functions in it, name.

    Attributes of libraries, such as `mean` in `keras.ops.mean`, are left out.
    """
    by_code = {name for name, *_ in _named(function)}
    names = {n for n, module, _ in _named(function) if module is None or is_module_of_user(module)}
    return frozenset(names) | (relocation.names_in(function.__code__) - by_code)


def _named(function: types.FunctionType) -> Iterator[tuple[str, _Module | None, Any]]:
    """Yields each name in the code of a function, the module before it, and the name's value.

    For `np.random.rand` these are `np`, `random` on NumPy, and `rand` on `numpy.random`. The value
    is None unless it is a global, a module that is imported here, or on a module.
    """
    for is_global, names in _chains_of(function.__code__):
        module: _Module | None = None
        for position, name in enumerate(names):
            value = vars(module).get(name) if module is not None else None
            if is_global and not position:
                value = function.__globals__.get(name, sys.modules.get(name))
            yield name, module, value
            module = value if issubclass(type(value), _Module) else None


@functools.cache
def _chains_of(code: types.CodeType) -> list[tuple[bool, list[str]]]:
    """Returns the names in a code and in the functions inside it, in lists.

    The attributes that follow on a global are in the list of that global. A list comes with True if
    its first name is a global or an import. In `self.net(np.mean(x))` the lists are
    `[(False, ["net"]), (True, ["np", "mean"])]`.
    """
    chains: list[tuple[bool, list[str]]] = []
    follows = False
    for instruction in dis.get_instructions(code):
        name, kind = instruction.argval, instruction.opname
        is_name = isinstance(name, str) and name in code.co_names
        is_global = is_name and kind in ("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME")
        if is_name and follows and kind in ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM"):
            chains[-1][1].append(name)
        elif is_name:
            chains.append((is_global, [name]))
            follows = is_global
        else:
            follows = False
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            chains += _chains_of(part)
    return chains


def _is_installed(cls: type) -> bool:
    """Returns whether a class is part of Python or of an installed package."""
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    return file is not None and is_of_library(file)


def _is_of_user(value: Any) -> bool:
    """Returns whether a value is a module or a class of the user's own, or another object."""
    if isinstance(value, _Module):
        return is_module_of_user(value)
    if isinstance(value, (*FUNCTIONS, *PARTS_OF_KERAS)) or not relocation.has_attributes(value):
        return False
    if isinstance(value, type):
        return any(not _is_installed(c) for c in classes_of_user(value))
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
                function = relocation.function_behind(member)
                if isinstance(function, types.FunctionType):
                    yield from relocation.names_in(function.__code__)

"""The Python code that a step may run, and the objects of the user's own that this code may read.

Python does not tell what a function reads. But the code of a function has the names of the globals
and attributes that it uses. So `StepCode` begins with the methods by which Keras runs a step, and
follows these names: to other functions and methods, and to objects outside of the model, such as a
global `config`. An attribute counts as read if one of these functions names it.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import datetime
import dis
import functools
import glob
import os
import re
import sys
import time
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from tfmulti.distribution.python_attributes import (
    all_values_of,
    classes_of_user,
    values_of_classes,
)
from tfmulti.keras_patches.patching import is_of_keras
from tfmulti.keras_patches.variables import attributes_of
from tfmulti.training.state import relocation
from tfmulti.training.state.names_from_data import takes_names_from_data
from tfmulti.training.state.user_lines import is_module_of_user, is_of_library
from tfmulti.training.state.value_copies import FUNCTIONS, NUMBERS_AND_TEXTS, PARTS_OF_KERAS

_Module = types.ModuleType
_WITHOUT_OBJECTS = (*NUMBERS_AND_TEXTS, np.ndarray, np.generic)
_Cached = type(functools.cache(len))
_STEPS = ("train_step", "test_step", "predict_step")
# What a step may read from outside of the program, by the ids of the functions that read it.
_FILES, _TIME, _ENVIRONMENT = "a file or a folder", "the time", "the environment"
_ELSEWHERE = {
    id(function): what
    for what, functions in {
        _FILES: (
            *(open, os.open, os.listdir, os.scandir, os.stat, os.walk, os.path.exists, glob.glob),
            *(os.path.getmtime, os.path.getsize, os.path.isdir, os.path.isfile),
            *(np.genfromtxt, np.fromfile, np.memmap),
            *(tf.io.gfile.GFile, tf.io.gfile.exists, tf.io.gfile.glob, tf.io.gfile.listdir),
        ),
        _TIME: (
            *(time.time, time.time_ns, time.monotonic, time.perf_counter, time.process_time),
            *(time.localtime, time.gmtime, time.strftime, time.ctime),
        ),
        _ENVIRONMENT: (os.getenv, os.environ),
        "the input of the program": (input,),
        "values by their names": (eval, exec, globals),
    }.items()
    for function in functions
}
# Methods that read from outside, and the classes that have them, if others may have them, too.
_READING_METHODS = {
    **dict.fromkeys(("read_text", "read_bytes", "iterdir"), (None, _FILES)),
    **dict.fromkeys(("now", "today", "utcnow"), ((datetime.datetime, datetime.date), _TIME)),
}
# The names of functions of installed packages that read files, such as `pandas.read_csv`. Functions
# of TensorFlow such as `tf.io.read_file` are part of the graph.
_READERS = re.compile(
    r"(?!tensorflow\.).*\.(read|im_?read|load|open|urlopen|get_file|\w*File)(_\w+|txt)?"
)
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

    def __init__(self, found: relocation.State, step: str) -> None:
        """Follows the names from the methods of a step.

        Args:
            found: what `relocation.find` found from the model.
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
        texts = [text for text in relocation.texts_in(function.__code__) if len(text) > 1]
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
            if id(value) in _ELSEWHERE:
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
            if any(value is module for _, _, value in _named(function)):
                return True
        return False

    def reads_elsewhere(self) -> tuple[str, str] | None:
        """Returns what a function reads from outside of the program, such as a file, or None.

        Returns:
            Two texts. The first says what is read, such as `the time`. The second is the name of
            the user's function that reads it, or of the attribute that holds a function of Python
            such as `time.time`.
        """
        for function in self.functions:
            before: Any = None
            for name, _, value in _named(function):
                classes, of_method = _READING_METHODS.get(name, ((), None))
                source = _ELSEWHERE.get(id(value))
                if classes is None or any(before is cls for cls in classes):
                    source = of_method
                elif isinstance(value, (*FUNCTIONS, type)) and _is_installed(value):
                    is_reader = _READERS.fullmatch(f"{value.__module__}.{name}")
                    source = source or (_FILES if is_reader else None)
                if source is not None:
                    return source, function.__qualname__
                before = value
        for name, reader in self._held_readers.items():
            if name.partition("[")[0].rpartition(".")[2] in self.names:
                return _ELSEWHERE[id(reader)], name
        return None

    def makes_parts_of_keras(self) -> bool:
        """Returns whether a function may make a layer or an initializer, which draw seeds."""
        kinds = (keras.layers.Layer, keras.Initializer, keras.random.SeedGenerator)
        values = (value for f in self.functions for _, _, value in _named(f))
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
        (item, f"{name}[{relocation.key_in_words(key)}]")
        for key, item in list(pairs)
        if not issubclass(type(item), _WITHOUT_OBJECTS)
    ]


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
    is None unless it is a global, a function of Python, a module that is imported here, or an
    attribute of a module.
    """
    for is_global, names in _chains_of(function.__code__):
        module: _Module | None = None
        for position, name in enumerate(names):
            value = vars(module).get(name) if module is not None else None
            if is_global and not position:
                others = vars(builtins).get(name, sys.modules.get(name))
                value = function.__globals__.get(name, others)
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


def _is_installed(value: Any) -> bool:
    """Returns whether a class or a function is part of Python or of an installed package."""
    file = getattr(sys.modules.get(value.__module__), "__file__", None)
    return file is not None and is_of_library(file)


def _is_of_user(value: Any) -> bool:
    """Returns whether a value is a module, a class or an object that may hold the user's values."""
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

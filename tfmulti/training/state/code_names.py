"""The names that the code of a function has: globals, attributes, and values of its closure."""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import sys
import types
import weakref
from collections.abc import Iterator
from typing import Any

from tfmulti.training.state.user_lines import is_module_of_user

# What reads an attribute by a name that is a text.
BY_NAME = frozenset({"getattr", "vars", "__dict__", "attrgetter", "__getattribute__"})


@functools.cache
def globals_in(code: types.CodeType) -> list[str]:
    """Returns the names of the globals that a function and the functions inside it read."""
    inside = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    names = [i.argval for i in dis.get_instructions(code) if i.opname == "LOAD_GLOBAL"]
    return [*dict.fromkeys([*names, *(name for part in inside for name in globals_in(part))])]


@functools.cache
def names_in(code: types.CodeType) -> frozenset[str]:
    """Returns the globals and attributes that a function, and the functions in it, name.

    A function that calls `getattr` or `vars` may give the name as a text.
    """
    inside = (part for part in code.co_consts if isinstance(part, types.CodeType))
    return frozenset(code.co_names).union(*map(names_in, inside)) | texts_in(code)


def texts_in(code: types.CodeType) -> frozenset[str]:
    """Returns the texts in a code, and in the functions inside it, if it calls `getattr` or `vars`.

    They are names of attributes, or parts of names: `getattr(self, f"rate_{kind}")` has `rate_`.
    """
    inside = [part for part in code.co_consts if isinstance(part, types.CodeType)]
    names = frozenset(code.co_names).union(*(part.co_names for part in inside))
    texts = frozenset[str]().union(*map(texts_in, inside))
    if names & (BY_NAME | {"hasattr"}):
        constants = [c if isinstance(c, (tuple, frozenset)) else (c,) for c in code.co_consts]
        texts |= {text for some in constants for text in some if isinstance(text, str)}
    return texts


def outside(function: types.FunctionType) -> dict[str, Any]:
    """Returns the values outside of a function that its code names.

    They are globals, values of its closure, and defaults of its arguments.
    """
    code, of_module = function.__code__, function.__globals__
    values = {n: of_module[n] for n in globals_in(code) if n in of_module}
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
    by_code = {name for name, *_ in named(function)}
    names = {n for n, module, _ in named(function) if module is None or is_module_of_user(module)}
    return frozenset(names) | (names_in(function.__code__) - by_code)


def named(function: types.FunctionType) -> Iterator[tuple[str, types.ModuleType | None, Any]]:
    """Yields each name in the code of a function, the module before it, and the name's value.

    For `np.random.rand` these are `np`, `random` on NumPy, and `rand` on `numpy.random`. The value
    is None unless it is a global, a function of Python, a module that is imported here, or an
    attribute of a module.
    """
    for is_global, names in _chains_of(function.__code__):
        module: types.ModuleType | None = None
        for position, name in enumerate(names):
            value = vars(module).get(name) if module is not None else None
            if is_global and not position:
                others = vars(builtins).get(name, sys.modules.get(name))
                value = function.__globals__.get(name, others)
            yield name, module, value
            module = value if issubclass(type(value), types.ModuleType) else None


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

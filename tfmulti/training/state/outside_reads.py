"""Tells what the Python code of a step reads from outside of the program, such as a file."""

from __future__ import annotations

import datetime
import glob
import os
import re
import sqlite3
import subprocess
import time
import types
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfmulti.training.state.code_names import named
from tfmulti.training.state.user_lines import is_installed
from tfmulti.training.state.value_copies import FUNCTIONS

_FILES, _TIME, _ENVIRONMENT = "a file or a folder", "the time", "the environment"
_READ_BY: dict[str, tuple[Any, ...]] = {
    _FILES: (
        *(open, os.open, os.listdir, os.scandir, os.stat, os.walk, os.path.exists, glob.glob),
        *(os.path.getmtime, os.path.getsize, os.path.isdir, os.path.isfile),
        *(np.genfromtxt, np.fromfile, np.memmap, sqlite3.connect),
        *(tf.io.gfile.GFile, tf.io.gfile.exists, tf.io.gfile.glob, tf.io.gfile.listdir),
    ),
    _TIME: (
        *(time.time, time.time_ns, time.monotonic, time.perf_counter, time.process_time),
        *(time.localtime, time.gmtime, time.strftime, time.ctime),
    ),
    _ENVIRONMENT: (os.getenv, os.environ),
    "the output of another program": (
        *(subprocess.run, subprocess.check_output, subprocess.getoutput, subprocess.Popen),
        os.popen,
    ),
    "the input of the program": (input,),
    "values by their names": (eval, exec, globals),
}
# For the id of each function in `_READ_BY`, what the function reads. Some functions have no hash.
_READERS = {id(reader): what for what, readers in _READ_BY.items() for reader in readers}
_METHODS_FOR_FILES = frozenset({"read_text", "read_bytes", "iterdir"})
_METHODS_FOR_TIME = frozenset({"now", "today", "utcnow"})
# The names of functions of installed packages that read files, such as `pandas.read_csv`. Functions
# of TensorFlow such as `tf.io.read_file` are part of the graph.
_NAMES_OF_READERS = re.compile(
    r"(?!tensorflow\.).*\.(read|im_?read|load|open|urlopen|get_file|\w*File)(_\w+|txt)?"
)


def what_reads(value: Any) -> str | None:
    """Returns what a function of Python reads, such as `the time`, or None."""
    if isinstance(value, types.BuiltinFunctionType):
        # A method of a class, such as `datetime.now`, is another object each time.
        return _READERS.get(id(value)) or _read_by_method(value.__self__, value.__name__)
    return _READERS.get(id(value))


def first_read(
    functions: Iterable[types.FunctionType], held: Mapping[str, Any]
) -> tuple[str, str] | None:
    """Returns what the functions of a step read from outside of the program first, or None.

    Args:
        functions: the user's functions and methods.
        held: values for which `what_reads` returns something, by the names of the attributes that
            hold them.

    Returns:
        Two texts. The first says what is read, such as `the time`. The second is the name of the
        user's function that reads it, or of the attribute that holds a function of Python such as
        `time.time`.
    """
    for function in functions:
        before: Any = None
        for name, _, value in named(function):
            read = what_reads(value) or _read_by_method(before, name)
            if read is None and isinstance(value, (*FUNCTIONS, type)) and is_installed(value):
                is_reader = _NAMES_OF_READERS.fullmatch(f"{value.__module__}.{name}")
                read = _FILES if is_reader else None
            if read is not None:
                return read, function.__qualname__
            before = value
    return next(((what_reads(reader) or "", name) for name, reader in held.items()), None)


def _read_by_method(owner: Any, name: str) -> str | None:
    """Returns what a method reads, if its name tells so. `owner` is None if it is not known."""
    if name in _METHODS_FOR_FILES:
        return _FILES
    # `isinstance` would ask a weak proxy for the class of its object, which may be gone.
    is_date = issubclass(type(owner), type) and issubclass(owner, datetime.date)
    return _TIME if is_date and name in _METHODS_FOR_TIME else None

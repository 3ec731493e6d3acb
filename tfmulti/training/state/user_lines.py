"""Tells the user's program from libraries, by the names of files."""

from __future__ import annotations

import os
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

# Lines in these folders are not the user's: Keras, TensorFlow, tfmulti and Python.
_LIBRARY_FOLDERS = (
    *(
        os.path.dirname(os.path.abspath(str(file))) + os.sep
        for file in (keras.__file__, tf.__file__)
    ),
    f"{Path(__file__).resolve().parents[2]}{os.sep}",
    sysconfig.get_paths()["stdlib"] + os.sep,
)


def is_of_user(file: str) -> bool:
    """Returns whether a file of a stack is part of the user's program."""
    path = os.path.abspath(file)
    if "__autograph_generated_file" in path or is_of_library(path):
        return False
    return os.path.exists(path)


def is_of_library(file: str) -> bool:
    """Returns whether a file is part of Python or of an installed package.

    It need not exist: the cells of a notebook have names of files, too.
    """
    path = os.path.abspath(file)
    return path.startswith(_LIBRARY_FOLDERS) or os.sep + "site-packages" + os.sep in path


def is_installed(value: Any) -> bool:
    """Returns whether a class or a function is part of Python or of an installed package."""
    file = getattr(sys.modules.get(value.__module__), "__file__", None)
    return file is not None and is_of_library(file)


def is_module_of_user(value: Any) -> bool:
    """Returns whether a value is a module of the user's program."""
    # `isinstance` would ask a weak proxy for the class of its object, which may be gone.
    if not issubclass(type(value), types.ModuleType):
        return False
    # A module without a file is part of Python.
    file = getattr(value, "__file__", None)
    return file is not None and not is_of_library(file)

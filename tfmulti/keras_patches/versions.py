"""The versions of Keras and TensorFlow that the patches were tested with."""

from __future__ import annotations

import functools
import warnings

import keras
import tensorflow as tf

from tfmulti.config.troubleshooting import documented

# The versions that the private names in this package were tested with.
TESTED = {"Keras": "3.15", "TensorFlow": "2.21"}


@functools.cache
def warn_of_untested() -> None:
    """Warns once per process if the installed Keras or TensorFlow is not a tested version.

    Only the major and minor parts of the version are compared.
    """
    installed = {"Keras": keras.__version__, "TensorFlow": tf.__version__}
    others = [
        f"{name} {installed[name]}"
        for name, tested in TESTED.items()
        if installed[name].split(".")[:2] != tested.split(".")
    ]
    if others:
        tested_with = " and ".join(f"{name} {version}" for name, version in TESTED.items())
        warnings.warn(
            documented(
                f"tfmulti is tested with {tested_with}, and here is {' and '.join(others)}. "
                "Compare the first step with one device: prepare(model, verify=True)."
            ),
            stacklevel=2,
        )

"""Installs the faster forms of Keras' functions, for steps of prepared models on CPUs.

`TFMULTI_CPU_KERNELS=0` in the environment switches all of them off. That shows whether one of them
is the cause of a number that looks wrong. Keras has no public way to replace these functions:

| what | name | upstream | can go when |
|---|---|---|---|
| attention | private: `backend.tensorflow.nn._dot_product_attention_xla` | none | Keras' own uses matrix products, not `einsum` |
| layers | public: `call` of `kernels.LAYERS` | none | Keras' own layers are as fast |
"""  # noqa: E501

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from keras.src.backend.tensorflow import nn as nn_module

from tfmulti.distribution.replica_slice import current
from tfmulti.distribution.strategies import placement_of
from tfmulti.keras_patches.cpu_speed import kernels
from tfmulti.keras_patches.patching import replace

SWITCH = "TFMULTI_CPU_KERNELS"


@functools.cache
def is_enabled() -> bool:
    """Returns whether the environment allows the faster forms: TFMULTI_CPU_KERNELS is not 0."""
    return os.environ.get(SWITCH, "1") != "0"


def install() -> None:
    """Patches Keras' layers and attention with the faster forms, if these are enabled."""
    if not is_enabled():
        return
    for layer, function in kernels.LAYERS.items():
        replace(layer, "call", on_cpus(function))
    if hasattr(nn_module, "_dot_product_attention_xla"):
        replace(nn_module, "_dot_product_attention_xla", on_cpus(kernels.attention))


def on_cpus(function: Callable[..., Any]) -> Callable[[Any], Any]:
    """Returns the `make` of `replace` that calls `function(original, …)` in a step on CPUs.

    Outside a prepared model's step, and on GPUs, Keras' original function is called.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if current() is None or is_on_gpu():
                return original(*args, **kwargs)
            return function(original, *args, **kwargs)

        return call

    return make


def is_on_gpu() -> bool:
    """Returns whether this replica is on a GPU, for which the faster forms were not measured."""
    if tf.distribute.has_strategy():
        return bool(placement_of(tf.distribute.get_strategy()).gpus)
    return bool(tf.config.list_logical_devices("GPU"))

"""Puts all patches in place."""

from __future__ import annotations

from tfmulti.keras_patches import (
    batch_normalization,
    gradients,
    layers,
    losses,
    metrics,
    optimizers,
    random_numbers,
    variables,
)
from tfmulti.keras_patches.cpu_speed import installation as cpu_speed
from tfmulti.keras_patches.versions import warn_of_untested

PATCHES = (
    losses,
    metrics,
    gradients,
    layers,
    batch_normalization,
    random_numbers,
    optimizers,
    variables,
    cpu_speed,
)


def install() -> None:
    """Replaces functions of Keras and TensorFlow by those that know of replicas; once a process.

    Outside a prepared model's step they are Keras' own, and with one replica, too, except for the
    faster forms of `cpu_speed`.
    """
    warn_of_untested()
    for patch in PATCHES:
        patch.install()

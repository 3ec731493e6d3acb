"""Installs all patches of Keras and TensorFlow in one call."""

from __future__ import annotations

from tfmulti.keras_patches import (
    assignments,
    batch_normalization,
    functions,
    gradients,
    layers,
    losses,
    metrics,
    optimizers,
    random_numbers,
    strategy_in_steps,
    unprepared_models,
    variables,
)
from tfmulti.keras_patches.cpu_speed import installation as cpu_speed
from tfmulti.keras_patches.versions import warn_of_untested

PATCHES = (
    losses,
    metrics,
    gradients,
    functions,
    layers,
    assignments,
    batch_normalization,
    random_numbers,
    optimizers,
    strategy_in_steps,
    unprepared_models,
    variables,
    cpu_speed,
)


def install() -> None:
    """Replaces functions of Keras and TensorFlow by versions that know about replicas.

    The patches stay for the life of the process, and further calls change nothing. Outside a step
    of a prepared model the patched functions behave as before, except for the warning of
    `unprepared_models`. With one replica they do so inside a step, too, except for the faster forms
    of `cpu_speed`.
    """
    warn_of_untested()
    for patch in PATCHES:
        patch.install()

"""Patch of the public `tf.GradientTape.gradient`: its target becomes that of the global batch.

Each replica computes its own part of the gradient. The mean of these parts over the replicas, each
weighted by its rows, is the gradient of the global batch (`distribution.global_values`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

from tfmulti.distribution import global_values, losses, row_labels
from tfmulti.distribution.replica_slice import partial
from tfmulti.keras_patches.patching import replace


def install() -> None:
    """Patches `tf.GradientTape.gradient`."""
    replace(tf.GradientTape, "gradient", _gradient)


def _gradient(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `gradient` that differentiates what one device would have computed."""

    def gradient(
        self: Any,
        target: Any,
        sources: Any,
        output_gradients: Any = None,
        unconnected_gradients: Any = tf.UnconnectedGradients.NONE,
    ) -> Any:
        replica_slice = partial()
        if replica_slice is None or output_gradients is not None:
            return original(self, target, sources, output_gradients, unconnected_gradients)
        # Without labels a vector is assumed to be the losses of rows, and its gradient is that of
        # their sum over all replicas.
        with row_labels.kept_in_branch() as is_branch:
            has_labels = is_branch or row_labels.are_kept()
        if not has_labels:
            output_gradients = tf.nest.map_structure(
                lambda t: losses.first_gradient(replica_slice, t), target
            )
        compute = functools.partial(original, self)
        # This tape no longer records outside its context, but an outer tape may.
        recorded = record.could_possibly_record()
        return global_values.gradient(
            replica_slice,
            compute,
            target,
            sources,
            is_recorded=recorded,
            output_gradients=output_gradients,
            unconnected_gradients=unconnected_gradients,
        )

    return gradient

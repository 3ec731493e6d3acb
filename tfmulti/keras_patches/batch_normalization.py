"""BatchNormalization with the batch statistics of all replicas (`distribution.normalization`).

The statistics need a collective, which cannot run inside a loop of the graph. So a recurrent layer
with a BatchNormalization in its cell is unrolled.

| what | private name | upstream | can go when |
|---|---|---|---|
| batch statistics | `BatchNormalization._moments`, `_reduction_axes` | none | counts may differ from replica to replica |
| recurrent cells that normalize | public: `RNN.inner_loop`; private: `Layer._call_has_training_arg` | none | replicas of one process can exchange values inside a loop |
"""  # noqa: E501

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfmulti.distribution import normalization
from tfmulti.distribution.replica_slice import current, partial
from tfmulti.errors import ModelError
from tfmulti.keras_patches.cpu_speed.installation import is_enabled, is_on_gpu
from tfmulti.keras_patches.model_structure import layers_of
from tfmulti.keras_patches.patching import replace


def install() -> None:
    """Patches BatchNormalization, and the loop of recurrent layers that may contain one."""
    replace(keras.layers.BatchNormalization, "_moments", _moments_of_slice)
    replace(keras.layers.BatchNormalization, "call", _fused)
    replace(keras.layers.RNN, "inner_loop", _unrolled)


def _refuse_in_loops(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the layer's method, which raises ModelError where no collective can run."""

    @functools.wraps(function)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(self, *args, **kwargs)
        except RuntimeError as error:
            if "merge_call" not in str(error) or partial() is None:
                raise
            raise ModelError(
                f"the layer {self.name!r} normalizes by the rows of all replicas, but it stands in "
                "a loop (such as a cell of keras.layers.RNN) or a tf.function of its own, where "
                "replicas cannot exchange values. Make the RNN with unroll=True, use "
                "LayerNormalization there, or train on one device."
            ) from None

    return call


def _fused(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `call` of BatchNormalization that uses few fused operations where it can.

    Keras' layer has many operations on all values, and their gradients have many more.
    """

    def call(self: Any, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        replica_slice = current()
        if replica_slice is None or mask is not None or not _can_be_fused(self, inputs, training):
            return original(self, inputs, training=training, mask=mask)
        channels = inputs.shape[-1]
        gamma = tf.convert_to_tensor(self.gamma) if self.scale else tf.ones([channels])
        beta = tf.convert_to_tensor(self.beta) if self.center else tf.zeros([channels])
        # The statistics are those of this replica's rows alone, unless the layer or the user asks
        # for those of all replicas.
        is_synchronized = self.synchronized or replica_slice.sync_batch_norm
        is_alone = not replica_slice.is_whole and not is_synchronized
        group = replica_slice.alone() if is_alone else replica_slice
        outputs, count, mean, variance = normalization.normalized(
            group, inputs, gamma, beta, self.epsilon
        )
        if is_alone:
            count *= tf.cast(replica_slice.own_rows > 0, count.dtype)
        for variable, value in ((self.moving_mean, mean), (self.moving_variance, variance)):
            old_value = tf.convert_to_tensor(variable.value)
            new_value = old_value * self.momentum + value * (1.0 - self.momentum)
            # A replica without rows reads one that does not count, so its statistics must stay.
            variable.assign(tf.where(count > 0, new_value, old_value))
        return outputs

    return _refuse_in_loops(call)


def _can_be_fused(layer: Any, inputs: Any, training: Any) -> bool:
    """Returns whether the fused form computes what this call of the layer asks for, on CPUs."""
    has_rank = tf.is_tensor(inputs) and inputs.shape.rank is not None and inputs.shape.rank > 1
    return bool(
        has_rank
        and is_enabled()
        and not is_on_gpu()
        and training is True
        and layer.trainable
        and not layer.renorm
        and layer.axis in (-1, inputs.shape.rank - 1)
        and inputs.shape[-1] is not None
        and inputs.dtype == layer.compute_dtype == layer.variable_dtype == "float32"
    )


def _unrolled(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the loop of a recurrent layer, which is unrolled if its cell needs all replicas.

    Before a loop that is not unrolled, Keras calls the cell once to learn what the cell returns.
    That call changes the cell's states, so this loop makes it, too.
    """

    def inner_loop(self: Any, sequences: Any, initial_state: Any, mask: Any, training: Any) -> Any:
        may_unroll = not self.unroll and sequences.shape[1] is not None
        if partial() is None or not may_unroll or not _normalizes(self.cell):
            return original(self, sequences, initial_state, mask, training)
        options = {"training": training} if self.cell._call_has_training_arg else {}
        states = initial_state if keras.tree.is_nested(initial_state) else [initial_state]
        self.cell(sequences[:, -1 if self.go_backwards else 0], states, **options)
        self.unroll = True
        try:
            return original(self, sequences, initial_state, mask, training)
        finally:
            self.unroll = False

    return inner_loop


def _normalizes(cell: Any) -> bool:
    """Returns whether a recurrent cell, which need not be a layer, holds a BatchNormalization."""
    return isinstance(cell, keras.layers.Layer) and any(
        isinstance(part, keras.layers.BatchNormalization) for part in layers_of(cell)
    )


def _moments_of_slice(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `_moments` that takes mean and variance over the rows of all replicas."""

    def moments(self: Any, inputs: Any, mask: Any) -> Any:
        replica_slice = current()
        if replica_slice is None or (mask is not None and replica_slice.is_whole):
            return original(self, inputs, mask)
        context = tf.distribute.get_replica_context()
        synchronized = self.synchronized or replica_slice.sync_batch_norm
        has_parts = context.num_replicas_in_sync > 1 and not replica_slice.has_all_rows
        if synchronized and has_parts:
            return normalization.global_moments(replica_slice, inputs, mask, self._reduction_axes)
        # Keras' own method for several replicas loses digits. The whole batch does not need it.
        if replica_slice.is_whole:
            return keras.ops.moments(inputs, self._reduction_axes)
        # A replica without rows reads one that does not count. It returns the moving statistics,
        # so that they stay as they are.
        moving_statistics = (
            tf.cast(v, inputs.dtype) for v in (self.moving_mean, self.moving_variance)
        )
        own_statistics = original(self, inputs, mask)
        return tuple(
            tf.where(replica_slice.own_rows > 0, own, moving)
            for own, moving in zip(own_statistics, moving_statistics, strict=True)
        )

    return moments

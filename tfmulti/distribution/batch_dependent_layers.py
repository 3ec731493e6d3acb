"""Layers whose output for one example depends on other examples of the batch.

Each replica gathers the rows of all replicas, computes what one device would compute from them, and
keeps its own rows of the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfmulti.distribution.losses import in_passes
from tfmulti.distribution.replica_context import gather_rows_with_gradient
from tfmulti.distribution.replica_slice import ReplicaSlice, computing, current
from tfmulti.errors import ModelError

LAYERS = (
    keras.layers.MixUp,
    keras.layers.CutMix,
    # It makes one histogram of all rows.
    keras.layers.Equalization,
    # It holds an Equalization.
    keras.layers.RandAugment,
    # It draws by `tf.random.stateless_normal`, which `random_numbers` does not replace.
    keras.layers.RandomElasticTransform,
)


def refuse_choices(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `call` of AugMix that raises an error while a prepared model trains.

    Keras chooses the transformations by Python's generator whenever it traces a step. Plain Keras
    and tfmulti trace at different times, so they choose differently even on one device.
    """

    def call(self: Any, data: Any, training: bool = True) -> Any:
        if training and current() is not None:
            raise ModelError(
                f"the layer {self.name!r} (AugMix) chooses its transformations when a step is "
                "traced, by Python's random, so prepared models cannot repeat the choices of plain "
                "Keras. Put it into the data (dataset.map), or use RandAugment."
            )
        return original(self, data, training=training)

    return call


def changed_once(
    original: Callable[..., Any],
    replica_slice: ReplicaSlice,
    layer: Any,
    inputs: Any,
    training: bool = False,
) -> Any:
    """Calls a layer that changes its own weights in each call of a training step.

    Raises:
        ModelError: the step takes several passes (microbatches), each of which would change them.
    """
    if training and in_passes():
        raise ModelError(
            f"the layer {layer.name!r} ({type(layer).__name__}) changes its weights in each call, "
            "and --microbatches makes several calls a step. Leave --microbatches out."
        )
    return original(layer, inputs, training=training)


def mixed(
    original: Callable[..., Any],
    replica_slice: ReplicaSlice,
    layer: Any,
    data: Any,
    training: bool = True,
) -> Any:
    """Returns this replica's rows of what a layer computes from the global batch.

    Outside training the layer is called as it is. `data` is a nest of tensors with rows.

    Raises:
        ModelError: the step takes several passes (microbatches), so no pass has all rows.
    """
    if not training:
        return original(layer, data, training=training)
    if in_passes():
        raise ModelError(
            f"the layer {layer.name!r} looks at all rows of a batch, which --microbatches "
            "splits. Put it into the data (dataset.map), or leave --microbatches out."
        )
    replica_slice.note_gather()
    data = tf.nest.map_structure(tf.convert_to_tensor, data)
    read_rows = tf.shape(tf.nest.flatten(data)[0], tf.int64)[0]
    all_rows = tf.nest.map_structure(
        lambda value: gather_rows_with_gradient(replica_slice, value), data
    )
    with computing(replica_slice.of_all_rows()):
        result = original(layer, all_rows, training=training)
    first = replica_slice.first_row
    return tf.nest.map_structure(lambda value: value[first : first + read_rows], result)

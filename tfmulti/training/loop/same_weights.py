"""Tells if the workers have different weights, which they would train apart without a message.

Each worker sets up the model by itself. A `load_weights` or a callback that runs on the chief alone
leaves the other workers with other values.
"""

from __future__ import annotations

import zlib

import keras
import numpy as np
import tensorflow as tf

from tfmulti.distribution.agreement import gather_bytes
from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import ModelError
from tfmulti.keras_patches.variables import array_of
from tfmulti.training.state.model_checks import optimizers_of
from tfmulti.training.state.trainer_state import state_of

# Of a variable with more numbers, about so many are compared after the first time, spread evenly.
_SAMPLE = 10_000
# Of the calls of `train_on_batch` and the like, the first ones and each 100th compare the weights.
_FIRST_CALLS = (0, 1, 2, 4, 8, 16, 32, 64)
_CALLS_BETWEEN = 100


def check_same_weights(model: keras.Model, *, all_numbers: bool = False) -> None:
    """Raises an error if the weights or an optimizer's state differ between workers.

    Every worker calls it. A model without trainable weights is compared by all of its weights.

    Args:
        model: the prepared model.
        all_numbers: whether to compare all numbers of large variables, which takes a second for
            each GB, instead of some of them.

    Raises:
        ModelError: a variable has other values on another worker. All workers raise it.
    """
    if placement_of(model.distribute_strategy).workers == 1:
        return
    states = [v for optimizer in optimizers_of(model) for v in optimizer.variables]
    variables = [*(model.trainable_weights or model.weights), *states]
    own = np.array([_checksum(v, all_numbers) for v in variables], np.uint32)
    of_all = gather_bytes(model.distribute_strategy, own.tobytes())
    chief, *others = [np.frombuffer(part or b"", np.uint32) for part in of_all]
    for rank, checksums in enumerate(others, 1):
        if len(checksums) != len(chief):
            raise ModelError(
                f"worker {rank} has {len(checksums)} weights and states of optimizers, and the "
                f"chief has {len(chief)}. Make and compile the same model on all workers."
            )
        if (checksums != chief).any():
            name = variables[int(np.argmax(checksums != chief))].path
            raise ModelError(
                f"the workers have different weights: {name!r} has other values on worker {rank} "
                "than on the chief. Load and set weights and learning rates on all workers, also "
                "in callbacks."
            )


def check_between_batches(model: keras.Model) -> None:
    """Compares the weights as `check_same_weights` does, in some calls of an `…_on_batch` method.

    Every worker calls it before each batch. A difference is found after at most 100 batches.
    """
    state = state_of(model)
    calls, state.calls_on_batch = state.calls_on_batch, state.calls_on_batch + 1
    if calls in _FIRST_CALLS or calls % _CALLS_BETWEEN == 0:
        check_same_weights(model)


def _checksum(variable: keras.Variable, all_numbers: bool) -> int:
    value, size = variable.value, int(np.prod(variable.shape))
    if size > _SAMPLE and not all_numbers:
        value = tf.reshape(value, [-1])[:: size // _SAMPLE]
    return zlib.crc32(np.ascontiguousarray(array_of(value)).view(np.uint8).data)

"""Tells if the workers have different weights, which they would train apart without a message.

Each worker sets up the model by itself. A `load_weights` or a callback that runs on the chief alone
leaves the other workers with other values.
"""

from __future__ import annotations

import zlib

import keras
import numpy as np

from tfmulti.distribution.agreement import gather_bytes
from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import ModelError
from tfmulti.keras_patches.variables import array_of
from tfmulti.training.state.model_checks import optimizers_of

# To compare larger variables in each epoch would take time.
SMALL = 10_000


def check_same_weights(model: keras.Model, most: float = float("inf")) -> None:
    """Raises an error if the weights or an optimizer's state differ between workers.

    Every worker calls it. A model without trainable weights is compared by all of its weights.

    Args:
        model: the prepared model.
        most: how many numbers a variable may have to be compared.

    Raises:
        ModelError: a variable has other values on another worker. All workers raise it.
    """
    if placement_of(model.distribute_strategy).workers == 1:
        return
    states = [v for optimizer in optimizers_of(model) for v in optimizer.variables]
    variables = [*(model.trainable_weights or model.weights), *states]
    small = [v for v in variables if np.prod(v.shape, dtype=float) <= most]
    own = np.array(list(map(_checksum, small)), np.uint32)
    of_all = gather_bytes(model.distribute_strategy, own.tobytes())
    chief, *others = [np.frombuffer(part or b"", np.uint32) for part in of_all]
    for rank, checksums in enumerate(others, 1):
        if len(checksums) != len(chief):
            raise ModelError(
                f"worker {rank} has {len(checksums)} weights and states of optimizers, and the "
                f"chief has {len(chief)}. Make and compile the same model on all workers."
            )
        if (checksums != chief).any():
            name = small[int(np.argmax(checksums != chief))].path
            raise ModelError(
                f"the workers have different weights: {name!r} has other values on worker {rank} "
                "than on the chief. Load and set weights and learning rates on all workers, also "
                "in callbacks."
            )


def _checksum(variable: keras.Variable) -> int:
    return zlib.crc32(np.ascontiguousarray(array_of(variable.value)).view(np.uint8).data)

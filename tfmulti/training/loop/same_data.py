"""What the workers agree on before they read: the order of the data, and that it is the same.

The chief draws the seeds of the order, and all workers use them. Then the workers compare digests
of their data. Both are collectives of exact whole numbers or bytes (`distribution.agreement`).
"""

from __future__ import annotations

import hashlib
from typing import Any

import keras
import numpy as np

from tfmulti.distribution.agreement import gather, gather_bytes
from tfmulti.errors import DataError
from tfmulti.keras_patches.random_numbers import global_seed
from tfmulti.training.input.interface import Feed
from tfmulti.training.input.shuffle import Shuffle
from tfmulti.training.state.trainer_state import state_of


def draw_shuffle(model: keras.Model, kind: bool | str) -> Shuffle:
    """Returns the seeds of the data order, the same on all workers. Every worker calls it.

    The seed is the one that `prepare` was given. Without one, arrays have the order that plain
    Keras has by the chief's seed of TensorFlow. Other data, and arrays without such a seed, have an
    order of tfmulti. It follows from the state of the chief's global NumPy generator and from the
    number of seeds that the model has drawn. The generator keeps its state.
    """
    state = state_of(model)
    if state.options.seed is not None:
        return Shuffle(state.options.seed)
    state.seeds_drawn += 1
    generator = np.random.RandomState()
    generator.set_state(np.random.get_state())
    seed = int(generator.randint(2**20, size=state.seeds_drawn)[-1])
    keras_seed = global_seed()
    seeds = [seed, keras_seed is not None, keras_seed or 0]
    # The first worker is the chief.
    seed, has_keras_seed, keras_seed = gather(model.distribute_strategy, seeds)[0]
    return Shuffle(seed, keras_seed if has_keras_seed else None, kind == "batch")


def check_same_data(model: keras.Model, *feeds: Feed | None) -> None:
    """Raises an error if the workers have different data. Every worker calls it.

    Raises:
        DataError: the workers have different data. All workers raise it.
    """
    forms = str([(type(feed).__name__, feed.data.digest()) if feed else None for feed in feeds])
    digests = gather_bytes(model.distribute_strategy, hashlib.sha256(forms.encode()).digest())
    if any(digest != digests[0] for digest in digests):
        raise DataError(
            "the workers have different data: the kind, the number of examples, shapes, "
            "labels or values differ. Give all workers the same files."
        )


def check_same_batches(digests: Any) -> None:
    """Raises an error if the digests of the workers' batches differ.

    Raises:
        DataError: the workers have read different batches. All workers raise it.
    """
    if len(set(np.asarray(digests).tolist())) > 1:
        raise DataError(
            "the workers read different batches: the data is shuffled without a seed, or is not "
            "the same on all workers. Give shuffle(seed=...), or pass arrays, which tfmulti "
            "shuffles alike everywhere."
        )

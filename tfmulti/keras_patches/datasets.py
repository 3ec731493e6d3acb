"""Access to Keras' data adapters, and to the parts of a `tf.data.Dataset`.

| what | private name | upstream | can go when |
|---|---|---|---|
| `batches_of` | `trainers.data_adapters.get_data_adapter` | none: not exported | Keras exports it |
| `parts_of` | `tf.data.Dataset._inputs` | none | TensorFlow has a public name |
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from keras.src.trainers import data_adapters


def batches_of(x: Any, class_weight: Any = None) -> Any:
    """Returns Keras' own adapter for a Dataset, PyDataset, generator or DataLoader.

    The adapter has `get_tf_dataset()`, `num_batches`, `on_epoch_begin()` and `on_epoch_end()`.

    Args:
        x: the data, as `fit` takes it.
        class_weight: the weight of each class, as `fit` takes it.
    """
    return data_adapters.get_data_adapter(x=x, class_weight=class_weight)


def parts_of(dataset: tf.data.Dataset) -> tuple[tf.data.Dataset, ...]:
    """Returns the Datasets that a Dataset was directly made from."""
    return tuple(dataset._inputs())


def kind_of(dataset: tf.data.Dataset) -> str:
    """Returns the class name of a Dataset, such as `_ShuffleDataset` or `_RepeatDataset`."""
    return type(dataset).__name__

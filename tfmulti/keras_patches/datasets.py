"""Datasets: Keras' adapters, and what a `tf.data.Dataset` is made of.

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
    """Returns Keras' own adapter of a Dataset, PyDataset, generator or DataLoader.

    It has `get_tf_dataset()`, `num_batches`, `on_epoch_begin()` and `on_epoch_end()`.
    """
    return data_adapters.get_data_adapter(x=x, class_weight=class_weight)


def parts_of(dataset: tf.data.Dataset) -> tuple[tf.data.Dataset, ...]:
    """Returns the Datasets that a Dataset is made of; no public name of TensorFlow tells."""
    return tuple(dataset._inputs())


def kind_of(dataset: tf.data.Dataset) -> str:
    """Returns what made a Dataset: `_ShuffleDataset`, `_RepeatDataset`, …"""
    return type(dataset).__name__

"""Stands in for modules that public programs import, and that are not installed."""

from __future__ import annotations

import importlib.util
import sys
import types
from typing import Any
from unittest import mock

import keras
import numpy as np
import tensorflow as tf

from tests.programs.downloads import sentence

# Modules that programs use for plots or after training, and that do not affect its numbers.
SHOWING = (
    "conlleval",
    "imageio",
    "ipywidgets",
    "sklearn",
    "sklearn.metrics",
    "tensorflow_docs",
    "tensorflow_docs.vis",
    "tensorflow_docs.vis.embed",
    "tensorflow_probability",
    "torch",
    "torch.utils",
    "torch.utils.data",
    "tqdm",
)
IMAGES = 96  # of each split
# The size of the images, and the number of classes.
TFDS_IMAGES = {
    "oxford_flowers102": ((48, 40, 3), 102),
    "tf_flowers": ((48, 40, 3), 5),
    "cats_vs_dogs": ((48, 40, 3), 2),
    "horses_or_humans": ((48, 40, 3), 2),
    "cycle_gan": ((48, 40, 3), 2),
    "mnist": ((28, 28, 1), 10),
    "cifar10": ((32, 32, 3), 10),
    "svhn_cropped": ((32, 32, 3), 10),
    "stl10": ((96, 96, 3), 10),
}


def offer_modules() -> None:
    """Puts modules in the place of those that are not installed."""
    for name in SHOWING:
        if not _is_installed(name):
            sys.modules[name] = mock.MagicMock()
    if isinstance(sys.modules.get("tqdm"), mock.MagicMock):
        sys.modules["tqdm"].tqdm = lambda values, *args, **options: values
    datasets = sys.modules.get("tensorflow_datasets") or types.ModuleType("tensorflow_datasets")
    _fill(datasets, load=_load, disable_progress_bar=lambda: None)
    _fill(datasets, benchmark=lambda *args, **options: None, Split=_Splits)
    sys.modules["tensorflow_datasets"] = datasets
    _offer("datasets", load_dataset=_load_tagged_sentences)
    _offer("tensorflow_addons", layers=_AddonLayers, optimizers=_AddonOptimizers)
    _fill(sys.modules["tensorflow_addons"], image=_AddonImages)
    _offer("keras_cv", layers=_offer("keras_cv.layers", RandAugment=_Augmentation))
    _offer("keras_hub", layers=_offer("keras_hub.layers", PositionEmbedding=_PositionEmbedding))
    _restore_behaviour()


def _restore_behaviour() -> None:
    """Makes Keras accept what its earlier versions accepted."""
    tile = keras.ops.tile

    # Keras 3.15 iterates over the repeats, which is not possible in a graph.
    def with_tensor_of_repeats(x: Any, repeats: Any) -> Any:
        return tf.tile(x, repeats) if isinstance(repeats, tf.Tensor) else tile(x, repeats)

    keras.ops.tile = with_tensor_of_repeats
    tf.keras.optimizers.legacy = keras.optimizers


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _offer(name: str, **contents: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    _fill(module, **contents)
    sys.modules[name] = module
    return module


def _fill(module: types.ModuleType, **contents: Any) -> None:
    for name, thing in contents.items():
        setattr(module, name, thing)


class _Splits:
    TRAIN, VALIDATION, TEST = "train", "validation", "test"


class _Named(dict[str, Any]):
    """A split of any name."""

    def __init__(self, rows: Any) -> None:
        self._rows = rows

    def __missing__(self, name: str) -> tf.data.Dataset:
        return tf.data.Dataset.from_tensor_slices(self._rows)


def _load(name: str, split: Any = None, **options: Any) -> Any:
    """Returns images and labels for `tensorflow_datasets.load`."""
    known = name.split("/")[0].split(":")[0]
    if known not in TFDS_IMAGES:
        raise RuntimeError(f"no synthetic data for {name} of tensorflow_datasets")
    size, classes = TFDS_IMAGES[known]
    x = np.random.default_rng(3).integers(0, 256, (IMAGES, *size)).astype("uint8")
    y = (np.arange(IMAGES) % classes).astype("int64")
    parts = _Named((x, y) if options.get("as_supervised") else {"image": x, "label": y})
    found = (
        parts
        if split is None
        else [parts[key] for key in split]
        if isinstance(split, list | tuple)
        else parts[split]
    )
    if not options.get("with_info"):
        return found
    sizes = {key: mock.MagicMock(num_examples=IMAGES) for key in ("train", "test")}
    return found, mock.MagicMock(splits=sizes)


class _Tagged(list[dict[str, Any]]):
    """Sentences with a tag for each word: a list of records, or by name a list of columns."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return [record[key] for record in self]
        return super().__getitem__(key)


def _load_tagged_sentences(name: str, **options: Any) -> dict[str, _Tagged]:
    if name != "conll2003":
        raise RuntimeError(f"no synthetic data for {name} of datasets")
    generator = np.random.default_rng(3)

    def part(rows: int) -> _Tagged:
        found = [sentence(generator, 4 + i % 9).split() for i in range(rows)]
        return _Tagged(
            {"tokens": words, "ner_tags": generator.integers(0, 9, len(words)).tolist()}
            for words in found
        )

    return {"train": part(60), "validation": part(20)}


class _AddonLayers:
    @staticmethod
    def InstanceNormalization(gamma_initializer: Any = "ones") -> keras.Layer:
        return keras.layers.GroupNormalization(
            groups=-1, epsilon=1e-3, gamma_initializer=gamma_initializer
        )


class _AddonOptimizers:
    LAMB = keras.optimizers.Lamb


class _AddonImages:
    @staticmethod
    def gaussian_filter2d(image: tf.Tensor, sigma: float) -> tf.Tensor:
        """Blurs by a mean instead of Gaussian weights."""
        return tf.nn.avg_pool2d(image[None], 3, 1, "SAME")[0]


class _Augmentation:
    """Changes images without random numbers."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def __call__(self, images: tf.Tensor) -> tf.Tensor:
        return 255 - images


class _PositionEmbedding(keras.layers.Layer):
    def __init__(self, sequence_length: int) -> None:
        super().__init__()
        self.sequence_length = sequence_length

    def build(self, input_shape: Any) -> None:
        self.table = self.add_weight(shape=(self.sequence_length, input_shape[-1]))

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        shape = keras.ops.shape(inputs)
        return keras.ops.broadcast_to(self.table[: shape[1]], shape)

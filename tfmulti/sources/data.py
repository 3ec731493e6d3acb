"""A data set as a run sees it: its parts, and what a model needs to know of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tfmulti.sources.arrays import ArraySource
from tfmulti.sources.source import Source

CLASSIFICATION, REGRESSION = "classification", "regression"


@dataclass(frozen=True)
class DataSpec:
    """The form of one example, and of its target.

    `input_scale` is what a model multiplies its input by (1/255 for bytes). `outputs` is the
    number of classes of a classification, or of values of a regression. `vocabulary_size`
    is set for token sequences alone.
    """

    input_shape: tuple[int, ...]
    input_dtype: str
    task: str
    outputs: int
    input_scale: float = 1.0
    vocabulary_size: int | None = None

    @property
    def kind(self) -> str:
        """`tokens`, `image` ([height, width, channels]) or `vector`."""
        if self.vocabulary_size is not None:
            return "tokens"
        return "image" if len(self.input_shape) == 3 else "vector"

    def describe(self) -> str:
        """Returns the form of an example in words, such as `8×8×1, 10 classes`."""
        shape = "×".join(map(str, self.input_shape)) or "scalar"
        if self.vocabulary_size is not None:
            shape += f" tokens of {self.vocabulary_size:,}"
        noun = "class" if self.task == CLASSIFICATION else "value"
        plural = "es" if noun == "class" else "s"
        return f"{shape}, {self.outputs} {noun}{plural if self.outputs != 1 else ''}"


@dataclass(frozen=True)
class Data:
    """A data set: training, validation and test part.

    A part is a `Source`, or what else `Model.fit` takes (a `tf.data.Dataset` of global
    batches, a PyDataset). `spec` is None where only the user's own model knows it.
    """

    train: Any
    spec: DataSpec | None = None
    validation: Any = None
    test: Any = None


def size_of(part: Any) -> int | None:
    """Returns the number of examples of a part, or None where it is not known."""
    return len(part) if isinstance(part, Source) else None


def labelled(x: np.ndarray, y: np.ndarray) -> ArraySource:
    """Returns the source of examples and whole-number labels; labels become int32."""
    return ArraySource((x, y.reshape(len(y)).astype(np.int32)))


def with_channels(images: np.ndarray) -> np.ndarray:
    """Returns grey images [n, h, w] as [n, h, w, 1], and others as they are."""
    return images[..., np.newaxis] if images.ndim == 3 else images

"""A data set as a run sees it: its parts, and what a model needs to know of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tfmulti.data.arrays import ArraySource
from tfmulti.data.lost import Lost
from tfmulti.data.source import Source

CLASSIFICATION, REGRESSION = "classification", "regression"
_NAMED = 5  # of the classes, in a description


FromChief = Callable[[Callable[[], bytes]], bytes]


@dataclass(frozen=True)
class DataSpec:
    """The form of one example, and of its target.

    `input_scale` is what a model multiplies its input by (1/255 for bytes). `outputs` is the
    number of classes of a classification, or of values of a regression. `vocabulary_size`
    is set for token sequences alone.

    `input_mean` and `input_std` are those of each value of a vector over the training part; a
    model takes the values as they are, and normalizes them itself. `class_names` are in the
    order of their labels.
    """

    input_shape: tuple[int, ...]
    input_dtype: str
    task: str
    outputs: int
    input_scale: float = 1.0
    vocabulary_size: int | None = None
    input_mean: tuple[float, ...] | None = None
    input_std: tuple[float, ...] | None = None
    class_names: tuple[str, ...] | None = None

    @property
    def kind(self) -> str:
        """`tokens`, `image` ([height, width, channels]) or `vector`."""
        if self.vocabulary_size is not None:
            return "tokens"
        return "image" if len(self.input_shape) == 3 else "vector"

    def describe(self) -> str:
        """Returns the form of an example in words, such as `13, 3 classes: a, b, c`."""
        shape = "×".join(map(str, self.input_shape)) or "scalar"
        if self.vocabulary_size is not None:
            shape += f" tokens of {self.vocabulary_size:,}"
        noun = "class" if self.task == CLASSIFICATION else "value"
        plural = "es" if noun == "class" else "s"
        words = f"{shape}, {self.outputs} {noun}{plural if self.outputs != 1 else ''}"
        if self.class_names is None:
            return words
        more = ", …" if len(self.class_names) > _NAMED else ""
        return f"{words}: {', '.join(self.class_names[:_NAMED])}{more}"


@dataclass(frozen=True)
class DataSet:
    """A data set: training, validation and test part.

    A part is a `Source`, or what else `Model.fit` takes (a `tf.data.Dataset` of global
    batches, a PyDataset). `spec` is None where only the user's own model knows it.

    `fit` computes what depends on the training part alone (categories, means), once the
    validation part is taken off it; see `fitted`. `features` are the names of the values of a
    vector, for who uses the saved model.

    `share` completes the data with what the chief makes, once the workers are there: all of
    them call it with `from_chief`, which returns on every worker what its argument returns on
    the chief (`broadcast.from_chief`). `vocabulary` is that of token sequences, most frequent
    first, without the tokens for padding (0) and for any other word (1).

    `finish` makes the data whole once TensorFlow is there, given the global batch size: what
    needs both has no parts before. `warning` is what the user should know of it, in one line.
    `lost` says of the examples that could not be read when the data was loaded, and are left out,
    where they are and why; whether so many may be `stages` says, or a loader that is told.
    """

    train: Any
    spec: DataSpec | None = None
    validation: Any = None
    test: Any = None
    fit: Callable[[DataSet], DataSet] | None = None
    features: tuple[str, ...] | None = None
    share: Callable[[DataSet, FromChief], DataSet] | None = None
    vocabulary: tuple[str, ...] | None = None
    finish: Callable[[int], DataSet] | None = None
    warning: str | None = None
    lost: tuple[Lost, ...] = ()


def fitted(data: DataSet) -> DataSet:
    """Returns the data with what is computed from its training part. Its parts stand already.

    Raises:
        DataError: the training part does not give it.
    """
    return data if data.fit is None else replace(data.fit(data), fit=None)


def size_of(part: Any) -> int | None:
    """Returns the number of examples of a part, or None where it is not known."""
    return len(part) if isinstance(part, Source) else None


def labelled(x: np.ndarray, y: np.ndarray) -> ArraySource:
    """Returns the source of examples and whole-number labels; labels become int32."""
    return ArraySource((x, y.reshape(len(y)).astype(np.int32)))


def with_channels(images: np.ndarray) -> np.ndarray:
    """Returns grey images [n, h, w] as [n, h, w, 1], and others as they are."""
    return images[..., np.newaxis] if images.ndim == 3 else images

"""A data set as a run sees it: its parts, and what a model must know about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tfmulti.data.arrays import ArraySource
from tfmulti.data.source import Source

PARTS = ("train", "validation", "test")
CLASSIFICATION, REGRESSION = "classification", "regression"
# A description names at most this many classes.
_MAX_NAMED = 5

# The function runs its argument on the chief, and returns the resulting bytes on every worker.
FromChief = Callable[[Callable[[], bytes]], bytes]


@dataclass(frozen=True)
class DataSpec:
    """The form of one example and of its target.

    Attributes:
        input_shape: the shape of one input.
        input_dtype: the dtype of the input.
        task: CLASSIFICATION or REGRESSION.
        outputs: the number of classes of a classification, or of values of a regression.
        input_scale: the factor by which a model multiplies its input, such as 1/255 for bytes.
        vocabulary_size: the size of the vocabulary of token sequences; None for other inputs.
        input_mean: the mean of each value of a vector over the training part. The model takes the
            values as they are and normalizes them itself.
        input_std: the standard deviation of each value of a vector over the training part.
        class_names: the names of the classes in the order of their labels.
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
        """The kind of input: `tokens`, `image` ([height, width, channels]) or `vector`."""
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
        form = f"{shape}, {self.outputs} {noun}{plural if self.outputs != 1 else ''}"
        if self.class_names is None:
            return form
        more = ", …" if len(self.class_names) > _MAX_NAMED else ""
        return f"{form}: {', '.join(self.class_names[:_MAX_NAMED])}{more}"


@dataclass(frozen=True)
class DataSet:
    """A data set: its training, validation and test part.

    A part is a `Source`, or anything else that `Model.fit` takes: a `tf.data.Dataset` of global
    batches or a PyDataset.

    Attributes:
        train, validation, test: the parts; None if the data set lacks a part.
        spec: the form of an example. None if only the user's own model knows it.
        fit: computes what depends on the training part alone, such as categories and means. It
            runs after the validation part has been split off (`fitted`).
        features: the names of the values of a vector, for users of the saved model.
        broadcast: completes the data with values that the chief makes. All workers call it once
            they are connected, with the function `from_chief`. That function returns on every
            worker what its argument returns on the chief (`distribution.agreement`).
        vocabulary: the tokens of token sequences, most frequent first, without the tokens for
            padding (0) and for unknown words (1).
        finish: returns the complete data set, given the global batch size. It is called once
            TensorFlow has been imported. Data that needs both has no parts before the call.
        warning: one line that the user should read, or None.
        lost: examples that could not be read when the data was loaded and are left out.
            `run.data_stages` checks whether so many may be left out.
    """

    train: Any
    spec: DataSpec | None = None
    validation: Any = None
    test: Any = None
    fit: Callable[[DataSet], DataSet] | None = None
    features: tuple[str, ...] | None = None
    broadcast: Callable[[DataSet, FromChief], DataSet] | None = None
    vocabulary: tuple[str, ...] | None = None
    finish: Callable[[int], DataSet] | None = None
    warning: str | None = None
    lost: tuple[str, ...] = ()

    @property
    def parts(self) -> dict[str, Any]:
        """The parts that the data set has, by their names."""
        named = {name: getattr(self, name) for name in PARTS}
        return {name: part for name, part in named.items() if part is not None}


def fitted(data: DataSet) -> DataSet:
    """Returns the data with what `fit` computes from its training part.

    The parts must be final: a later split would change the training part.

    Raises:
        DataError: the training part does not give the values that `fit` needs.
    """
    return data if data.fit is None else replace(data.fit(data), fit=None)


def size_of(part: Any) -> int | None:
    """Returns the number of examples of a part, or None if it is not known."""
    return len(part) if isinstance(part, Source) else None


def labelled(x: np.ndarray, y: np.ndarray) -> ArraySource:
    """Returns the source of inputs `x` and whole-number labels `y`, which become int32 [n]."""
    return ArraySource((x, y.reshape(len(y)).astype(np.int32)))


def with_channels(images: np.ndarray) -> np.ndarray:
    """Returns grey images [n, h, w] as [n, h, w, 1], and other images as they are."""
    return images[..., np.newaxis] if images.ndim == 3 else images

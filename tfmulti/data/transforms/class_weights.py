"""Weights of examples by their class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from tfmulti.data.formats.features import is_label
from tfmulti.data.source import Arrays, Leaf, OverSource, Source
from tfmulti.errors import ConfigError, DataError

BALANCED = "balanced"


def parse_class_weight(text: str) -> dict[int, float] | None:
    """Returns the weights of a text such as `0:1,3:2.5`, or None for `balanced`.

    Raises:
        ConfigError: the text has another form.
    """
    if text == BALANCED:
        return None
    try:
        pairs = [item.split(":") for item in text.split(",")]
        weights = {int(label): float(weight) for label, weight in pairs}
    except ValueError:
        weights = {}
    if not weights or any(not w >= 0 or w == np.inf or k < 0 for k, w in weights.items()):
        raise ConfigError(
            f"--class_weight {text} is not a list of weights. Write {BALANCED}, or CLASS:WEIGHT "
            "with commas between, such as 0:1,3:2.5; other classes have weight 1."
        )
    return weights


def balanced(labels: np.ndarray | None, classes: int) -> dict[int, float]:
    """Returns the weights by which all classes count the same: examples / (classes × count).

    `labels` has the class of each example, or is None if they are not known. `count` is the number
    of examples of a class. Only classes that have examples count. These are the weights of
    scikit-learn's `class_weight="balanced"`.

    Raises:
        DataError: the labels are not known, or there are none.
    """
    if labels is None:
        raise DataError(
            f"--class_weight {BALANCED}: the classes of this data are not known without reading "
            "all of it. Write the weights: CLASS:WEIGHT,CLASS:WEIGHT."
        )
    counts = np.bincount(labels.reshape(-1), minlength=classes)
    present = np.flatnonzero(counts)
    if not len(present):
        raise DataError("--class_weight balanced: no label can be read. Repair the data.")
    return {int(k): float(counts.sum() / (len(present) * counts[k])) for k in present}


class Weighted(OverSource):
    """A source of `(x, label)` that gives each example the weight of its class, float32.

    Args:
        source: the examples without weights.
        weights: the weights of classes. Any other class has the weight 1.

    Raises:
        DataError: the source has weights already, or no labels.
    """

    def __init__(self, source: Source, weights: Mapping[int, float]) -> None:
        specs = source.specs
        if isinstance(specs, tuple) and len(specs) == 3:
            raise DataError(
                "--class_weight: the data has weights of its own. Leave --class_weight out."
            )
        y = specs[1] if isinstance(specs, tuple) and len(specs) == 2 else None
        if not isinstance(y, Leaf) or not is_label(y):
            raise DataError("--class_weight needs data with one class label for each example.")
        super().__init__(source)
        self._weights = np.ones(max(weights) + 1, np.float32)
        self._weights[list(weights)] = list(weights.values())

    @property
    def specs(self) -> Any:
        return (*self.below.specs, Leaf((), "float32"))

    def read(self, indices: np.ndarray, epoch: int = 0) -> Any:
        x, y = self.below.read(indices, epoch)
        return x, y, self._of(np.asarray(y))

    def read_into(self, indices: np.ndarray, epoch: int, out: Any) -> None:
        *rest, weights = out
        self.below.read_into(indices, epoch, tuple(rest))
        weights[...] = self._of(rest[1])

    def arrays(self) -> Arrays | None:
        arrays = self.below.arrays()
        if arrays is None:
            return None
        weights = self._of(arrays.data[1])
        return arrays._replace(data=(*arrays.data, weights), specs=self.specs)

    def changed(self, change: Callable[[Source], Source]) -> Source:
        weights = dict(enumerate(self._weights.tolist()))
        return Weighted(self.below.changed(change), weights)

    def _of(self, labels: np.ndarray) -> np.ndarray:
        """Returns the weights of examples with these labels, float32 [rows]."""
        classes = labels.reshape(len(labels))
        known = np.minimum(classes, len(self._weights) - 1)
        return np.where(classes < len(self._weights), self._weights[known], np.float32(1))

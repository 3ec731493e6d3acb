"""Made-up examples of any shape, for tests and benchmarks; a model can learn their classes."""

from __future__ import annotations

from typing import Any

import numpy as np

from tfmulti.data.data_set import CLASSIFICATION, DataSet, DataSpec, labelled
from tfmulti.data.options import parse_options
from tfmulti.errors import ConfigError

_DEFAULTS: dict[str, Any] = {
    "shape": (28, 28, 1),
    "classes": 10,
    "examples": 1024,
    "tokens": None,
    "vocabulary": 1000,
}


def load(options: str, seed: int) -> DataSet:
    """Returns random examples with labels that a model can learn.

    `shape=28x28x1,classes=10,examples=1024` gives float32 examples of that shape, each around the
    centre of its class. `tokens=128,vocabulary=1000` gives int32 sequences of that length instead.
    Each class has a token of its own, which stands at about a tenth of the positions. The
    validation part has an eighth as many examples, in addition to `examples`.

    Raises:
        ConfigError: an option is unknown, or the vocabulary is not larger than the classes.
    """
    chosen = parse_options("synthetic", options, _DEFAULTS)
    classes, examples, length = chosen["classes"], chosen["examples"], chosen["tokens"]
    vocabulary = chosen["vocabulary"]
    if length is not None and vocabulary <= classes:
        raise ConfigError(
            f"--dataset synthetic: vocabulary={vocabulary} must be above classes={classes}."
        )
    rng = np.random.default_rng(seed)
    rows = examples + max(1, examples // 8)
    labels = rng.integers(classes, size=rows)
    x: np.ndarray
    if length is None:
        shape = chosen["shape"]
        x = rng.standard_normal((rows, *shape), dtype=np.float32)
        centres = rng.standard_normal((classes, *shape), dtype=np.float32)
        x += 0.5 * centres[labels]
        spec = DataSpec(shape, "float32", CLASSIFICATION, classes)
    else:
        x = rng.integers(1, vocabulary, size=(rows, length), dtype=np.int32)
        is_class_token = rng.random((rows, length)) < 0.1
        x[is_class_token] = np.broadcast_to(labels[:, None] + 1, x.shape)[is_class_token]
        spec = DataSpec((length,), "int32", CLASSIFICATION, classes, vocabulary_size=vocabulary)
    return DataSet(
        train=labelled(x[:examples], labels[:examples]),
        validation=labelled(x[examples:], labels[examples:]),
        spec=spec,
    )

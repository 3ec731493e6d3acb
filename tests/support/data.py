"""The data of the cases: small arrays, and the kinds of input that `fit` accepts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti.data.arrays import ArraySource

CLASSES = 3
MOST_ROWS = 100

_rng = np.random.default_rng(11)
X = _rng.standard_normal((MOST_ROWS, 8)).astype(np.float32)
Y = _rng.integers(CLASSES, size=MOST_ROWS).astype(np.int32)
XV = _rng.standard_normal((41, 8)).astype(np.float32)
YV = _rng.integers(CLASSES, size=41).astype(np.int32)
WEIGHTS = _rng.uniform(0.2, 2.0, size=MOST_ROWS).astype(np.float32)

Fit = dict[str, Any]


def steps_of(values: np.ndarray) -> np.ndarray:
    """Returns integers from 0 to 3 that follow from the inputs. 0 is masked."""
    return np.clip(np.round(values) + 1, 0, 3).astype(np.int32)


def tokens(rows: int, batch: int) -> Fit:
    return {"x": steps_of(X[:rows]), "y": steps_of(X[:rows]) % CLASSES, "batch_size": batch}


def weighted_tokens(rows: int, batch: int) -> Fit:
    weights = np.tile(WEIGHTS[:rows, None], (1, X.shape[1]))
    return {**tokens(rows, batch), "sample_weight": weights}


def arrays(rows: int, batch: int) -> Fit:
    return {"x": X[:rows], "y": Y[:rows], "batch_size": batch}


def one_hot(rows: int, batch: int) -> Fit:
    return {"x": X[:rows], "y": np.eye(CLASSES, dtype=np.float32)[Y[:rows]], "batch_size": batch}


def weighted(rows: int, batch: int) -> Fit:
    return {**arrays(rows, batch), "sample_weight": WEIGHTS[:rows]}


def weighted_one_hot(rows: int, batch: int) -> Fit:
    return {**one_hot(rows, batch), "sample_weight": WEIGHTS[:rows]}


def class_weighted(rows: int, batch: int) -> Fit:
    return {**arrays(rows, batch), "class_weight": {0: 0.5, 2: 3.0}}


def two_outputs(rows: int, batch: int) -> Fit:
    return {**arrays(rows, batch), "y": {"kind": Y[:rows], "size": X[:rows, :1] ** 2}}


def dictionaries(rows: int, batch: int) -> Fit:
    return {**arrays(rows, batch), "x": {"left": X[:rows, :3], "right": X[:rows, 3:]}}


def dataset(rows: int, batch: int) -> Fit:
    return {"x": tf.data.Dataset.from_tensor_slices((X[:rows], Y[:rows])).batch(batch)}


def unknown_length(rows: int, batch: int) -> Fit:
    return {"x": dataset(rows, batch)["x"].filter(lambda x, y: True)}


def repeated(rows: int, batch: int) -> Fit:
    return {"x": dataset(rows, batch)["x"].repeat(), "steps_per_epoch": 5}


def _ragged(x: np.ndarray) -> tf.RaggedTensor:
    lengths = 1 + np.arange(len(x)) % x.shape[1]
    return tf.RaggedTensor.from_tensor(steps_of(x), lengths=lengths)


def ragged(rows: int, batch: int) -> Fit:
    return {"x": tf.data.Dataset.from_tensor_slices((_ragged(X[:rows]), Y[:rows])).batch(batch)}


def sparse(rows: int, batch: int) -> Fit:
    found = tf.sparse.from_dense(np.where(X[:rows] > 0, X[:rows], 0))
    return {"x": tf.data.Dataset.from_tensor_slices((found, Y[:rows])).batch(batch)}


class Batches(keras.utils.PyDataset):
    def __init__(self, rows: int, batch: int) -> None:
        super().__init__()
        self.rows, self.batch = rows, batch

    def __len__(self) -> int:
        return -(-self.rows // self.batch)

    def __getitem__(self, index: int) -> Any:
        part = slice(index * self.batch, min((index + 1) * self.batch, self.rows))
        return X[part], Y[part]


def pydataset(rows: int, batch: int) -> Fit:
    return {"x": Batches(rows, batch)}


BAD = (0, 7, 8, 9, 31, 59, 90, 91, 92, 93, 94, 96, 97, 98, 99)  # of the last batch one is left


class BadRows(ArraySource):
    """Rows of which some cannot be read."""

    def read_into(self, indices: np.ndarray, epoch: int, out: Any) -> None:
        if set(BAD) & set(indices.tolist()):
            raise OSError(5, "Input/output error")
        super().read_into(indices, epoch, out)

    def read(self, indices: np.ndarray, epoch: int = 0) -> Any:
        if set(BAD) & set(indices.tolist()):
            raise OSError(5, "Input/output error")
        return super().read(indices, epoch)


def source(rows: int, batch: int) -> Fit:
    return {"x": ArraySource((X[:rows], Y[:rows])), "batch_size": batch}


def with_bad_rows(rows: int, batch: int) -> Fit:
    return {"x": BadRows((X[:rows], Y[:rows])), "batch_size": batch}


def without_bad_rows(rows: int, batch: int) -> Fit:
    """The same batches without the rows that cannot be read: one device's."""

    def batches() -> Iterator[Any]:
        for start in range(0, rows, batch):
            good = [row for row in range(start, min(start + batch, rows)) if row not in BAD]
            yield X[good], Y[good]

    signature = tf.TensorSpec([None, X.shape[1]], tf.float32), tf.TensorSpec([None], tf.int32)
    dataset = tf.data.Dataset.from_generator(batches, output_signature=signature)
    return {"x": dataset.apply(tf.data.experimental.assert_cardinality(-(-rows // batch)))}


def validation_of(feed: Any) -> Any:
    """Returns the validation data of a case: other rows, in the form that its model takes."""
    if feed in (tokens, weighted_tokens):
        return steps_of(XV), steps_of(XV) % CLASSES
    if feed in (one_hot, weighted_one_hot):
        return XV, np.eye(CLASSES, dtype=np.float32)[YV]
    if feed is two_outputs:
        return XV, {"kind": YV, "size": XV[:, :1] ** 2}
    if feed is dictionaries:
        return {"left": XV[:, :3], "right": XV[:, 3:]}, YV
    if feed is ragged:
        return tf.data.Dataset.from_tensor_slices((_ragged(XV), YV)).batch(16)
    if feed is sparse:
        return np.where(XV > 0, XV, 0), YV
    return XV, YV

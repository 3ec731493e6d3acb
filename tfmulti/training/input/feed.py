"""Makes a feed of the data that `fit`, `evaluate` and `predict` are given.

A feed gives the compiled step what it takes its batches from. There are two kinds:

- Arrays and other sources have random access. Each worker reads its own rows only, by a
  `Prefetcher`, and the position is the step (`SourceFeed`).
- A `tf.data.Dataset`, a generator and a PyDataset give batches in their own order. Each worker
  reads the whole global batches, and the step cuts them to the worker's rows (`DatasetFeed`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti.config.reading import ReadOptions
from tfmulti.data.arrays import ArraySource
from tfmulti.data.batch_plan import BatchPlan
from tfmulti.data.source import Source, SourceSlice, map_nest
from tfmulti.data.transforms.class_weights import Weighted
from tfmulti.distribution.strategies import Placement
from tfmulti.errors import DataError, ModelError
from tfmulti.training.input.dataset_feed import DatasetFeed, InOrder, PyDatasetFeed
from tfmulti.training.input.interface import DataDescription, Feed, Method, State
from tfmulti.training.input.prefetcher import DEFAULT, prefetcher_of, specs_of
from tfmulti.training.input.shuffle import KerasOrder, Shuffle
from tfmulti.training.input.worker_batch import Ahead

DEFAULT_BATCH_SIZE = 32  # as Keras


class SourceFeed(Feed):
    """The feed of a source with random access.

    Attributes:
        examples: the source.
        plan: the order of the examples.
        reading: how the examples are read.
    """

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        placement: Placement,
        reading: ReadOptions = DEFAULT,
    ) -> None:
        self.examples, self.plan, self.reading = source, plan, reading
        self._placement = placement
        self.data = DataDescription(
            specs=specs_of(source.specs, plan.global_batch_size),
            steps=plan.steps_per_epoch,
            batches_per_iterator=None,
            endless=True,
            sizes={"examples": plan.examples, "global_batch_size": plan.global_batch_size},
            digest=source.digest,
        )
        self._queue: Any = None
        # The step whose batch is the next one of the queue.
        self._next_step = 0

    def copy(self) -> SourceFeed:
        """Returns a new feed of the same batches."""
        return SourceFeed(self.examples, self.plan, self._placement, self.reading)

    def take(self, step: int, steps: int | None) -> Any:
        if self.reader is not None and step != self._next_step and not self._is_same(step):
            self.close()
        if self.reader is None:
            self.reader = prefetcher_of(
                self.examples, self.plan, self._placement, step, self.reading
            )
            self._queue = self.reader.queue
            if self._placement.gpus:
                self._queue = Ahead(self._queue, self._placement.gpus)
        self._next_step = step + (steps or 1)
        return self._queue

    def _is_same(self, step: int) -> bool:
        """Returns whether the batches that were read ahead are those of a step of another pass."""
        assert self.reader is not None
        is_at_same_place = (step - self._next_step) % self.plan.steps_per_epoch == 0
        return self.plan.seed is None and is_at_same_place and self.reader.error is None

    def end_pass(self, *, complete: bool = False) -> None:
        # The next pass may have the same batches, so the reader goes on.
        pass

    def get_state(self, batches: int) -> State:
        # The step tells the position.
        return {}

    def set_state(self, state: State, batches: int = 0) -> None:
        pass


@dataclass(frozen=True)
class DataArguments:
    """The arguments of `fit`, `evaluate` or `predict` that describe the data.

    Args:
        x: the data, as `fit` takes it, or a feed.
        y: the targets of arrays.
        sample_weight: the weights of the rows of arrays.
        batch_size: the global batch size of arrays and sources. Data in batches keeps its own.
        class_weight: the weight of each class.
        shuffle: the seeds of the shuffle. None keeps the order. A `tf.data.Dataset` or a generator
            has its own order.
        steps_per_epoch: the steps of an epoch. Without a `batch_size` arrays are cut into so many
            batches.
    """

    x: Any
    y: Any = None
    sample_weight: Any = None
    batch_size: int | None = None
    class_weight: Mapping[int, float] | None = None
    shuffle: Shuffle | None = None
    steps_per_epoch: int | None = None


def make_feed(
    arguments: DataArguments,
    placement: Placement,
    reading: ReadOptions = DEFAULT,
    method: Method = "predict",
) -> Feed:
    """Returns the feed of any data that Keras' `fit` takes: arrays, a Dataset, a PyDataset, ….

    Args:
        arguments: the data.
        placement: this process' place among the workers.
        reading: how the examples of arrays and sources are read.
        method: what takes the data. In `fit` a pass may go on over several epochs of
            `steps_per_epoch` steps.

    Raises:
        DataError: the arrays differ in length, or an argument does not go with the data.
        ModelError: the data is a `DistributedDataset`.
    """
    x, class_weight, steps = arguments.x, arguments.class_weight, arguments.steps_per_epoch
    y, weights, shuffle = arguments.y, arguments.sample_weight, arguments.shuffle
    seed = None if shuffle is None else shuffle.seed
    if isinstance(x, Source):
        _check_no_more(x, y=y, sample_weight=weights)
        if class_weight is not None:
            x = Weighted(x, class_weight)
        size = arguments.batch_size or DEFAULT_BATCH_SIZE
        return SourceFeed(x, BatchPlan(len(x), size, seed), placement, reading)
    if isinstance(x, tf.distribute.DistributedDataset):
        raise ModelError(
            "a DistributedDataset was given, which hides how many rows each replica gets. Give "
            "the tf.data.Dataset of global batches itself; tfmulti shares out its rows."
        )
    if _is_batched(x):
        _check_no_more(x, y=y, sample_weight=weights)
        if isinstance(x, keras.utils.PyDataset) and x.num_batches is not None:
            return PyDatasetFeed(InOrder(x, seed), class_weight, method)
        return DatasetFeed(x, class_weight, method, steps if method == "fit" else None)
    if class_weight is not None:
        weights = weights_of_classes(y, class_weight, weights)
    source: Source = array_source(x, y, weights)
    by_steps = -(-len(source) // steps) if steps else DEFAULT_BATCH_SIZE
    size = by_steps if arguments.batch_size is None else arguments.batch_size
    if shuffle is not None and shuffle.keras_seed is not None:
        order = KerasOrder(len(source), size, shuffle)
        source = SourceSlice(source, 0, len(source), order)
        seed = None
    return SourceFeed(source, BatchPlan(len(source), size, seed), placement, reading)


def array_source(x: Any, y: Any, sample_weight: Any) -> ArraySource:
    """Returns arrays as a source, with all floating-point numbers in Keras' `floatx`.

    Raises:
        DataError: the arrays differ in length or cannot be read by rows, or the weights do not have
            the form of the targets.
    """
    if isinstance(sample_weight, (Mapping, list, tuple)):
        of_y, of_weights = (
            keras.tree.map_structure(lambda _: "array", keras.tree.lists_to_tuples(nest))
            for nest in (y, sample_weight)
        )
        if of_weights != of_y:
            raise DataError(
                f"sample_weight has the form {of_weights}, but y has the form {of_y}. Give one "
                "array of weights for each target, or one array for all."
            )
    parts = keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
    return ArraySource(parts, floats=keras.config.floatx())


def _check_no_more(x: Any, **others: Any) -> None:
    """Raises DataError if targets or weights were given beside data that holds them itself."""
    for name, value in others.items():
        if value is not None:
            raise DataError(
                f"{name} does not go with a {type(x).__name__}, which holds targets and weights "
                "itself."
            )


def _is_batched(x: Any) -> bool:
    """Returns whether data comes in batches of its own."""
    if isinstance(x, (tf.data.Dataset, keras.utils.PyDataset, Iterator)):
        return True
    return type(x).__module__.partition(".")[0] in ("torch", "grain") and hasattr(x, "__iter__")


def weights_of_classes(
    y: Any, class_weight: Mapping[int, float], sample_weight: Any = None
) -> np.ndarray:
    """Returns the weight of each row by its label, in floatx [rows].

    Args:
        y: the labels, as whole numbers or one-hot.
        class_weight: the weight of each label; a label without a weight has 1.
        sample_weight: the `sample_weight` of the same call, which must be None.

    Raises:
        DataError: sample weights were given, too, or there are several outputs.
    """
    if sample_weight is not None:
        raise DataError("class_weight and sample_weight were both given. Give one of them.")
    if isinstance(y, (Mapping, tuple, list)):
        raise DataError("class_weight needs one output with labels, but y has several parts.")
    labels = np.asarray(y)
    if labels.ndim > 1 and labels.shape[-1] > 1:
        labels = labels.argmax(-1)
    labels = labels.reshape(len(labels)).round().astype(np.int64)
    weights = np.ones(len(labels), keras.config.floatx())
    for label, weight in class_weight.items():
        weights[labels == label] = weight
    return weights


def split_off_validation(parts: tuple[Any, ...], fraction: float) -> tuple[Any, Any]:
    """Returns the first rows of arrays and their last rows, for Keras' `validation_split`.

    Args:
        parts: the arrays `(x, y, sample_weight)`, each of which may be None.
        fraction: the part of the rows that are split off at the end.

    Raises:
        DataError: the data is not arrays, or one of the two parts would be empty.
    """
    if _is_batched(parts[0]) or isinstance(parts[0], Source):
        raise DataError(
            "validation_split needs arrays: a Dataset is split by its take() and skip(), a Source "
            "by tfmulti.data.source.SourceSlice."
        )
    present = tuple(part for part in parts if part is not None)
    source = ArraySource(present, floats=keras.config.floatx())
    rows = int(len(source) * (1 - fraction))
    if not 0 < rows < len(source):
        raise DataError(f"validation_split {fraction} of {len(source)} rows leaves one part empty.")
    first = iter(map_nest(lambda a: a[:rows], source.data))
    last = iter(map_nest(lambda a: a[rows:], source.data))
    return tuple(
        tuple(None if part is None else next(arrays) for part in parts) for arrays in (first, last)
    )  # type: ignore[return-value]

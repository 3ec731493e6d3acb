"""What `fit`, `evaluate` and `predict` are given, as batches of this worker's shares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from tfmulti.config.reading import ReadOptions
from tfmulti.data.arrays import ArraySource
from tfmulti.data.batch_plan import BatchPlan
from tfmulti.data.source import Source, map_nest
from tfmulti.data.transforms.class_weights import Weighted
from tfmulti.distribution.strategies import Placement
from tfmulti.errors import DataError, ModelError
from tfmulti.training.input.dataset_feed import DatasetFeed, InOrder, PyDatasetFeed
from tfmulti.training.input.positions import State
from tfmulti.training.input.prefetcher import DEFAULT, Prefetcher, prefetcher_of, specs_of
from tfmulti.training.input.worker_batch import Ahead

DEFAULT_BATCH_SIZE = 32  # Keras' own


class Feed(Protocol):
    """One part of the data, ready for `Execution`.

    `steps` is the number of global batches of one pass, or None where only reading tells.
    `specs` has the form of one global batch: leaves with `shape` and `dtype`.
    """

    @property
    def steps(self) -> int | None: ...

    @property
    def specs(self) -> Any: ...

    @property
    def endless(self) -> bool:
        """Whether one iterator goes on over all epochs."""

    @property
    def form(self) -> dict[str, Any]:
        """What must be the same for a run to resume: sizes by name."""

    @property
    def digest(self) -> int | None:
        """A number that is another one where the data is another; None: it tells by its batches."""

    @property
    def passes(self) -> int:
        """How many iterators were made."""

    @property
    def unread(self) -> int:
        """How many other iterators were made after a whole pass, from which nothing was read."""

    def holds(self, batches: int | None) -> bool:
        """Whether one iterator is known to give so many batches; None: without end."""

    def iterate(self, first_step: int, skipped: int = 0) -> Any:
        """Returns an iterator of global batches, or an outlet of this worker's `WorkerBatch`.

        A feed with random access starts at that step, counted over all epochs; another one
        starts a pass of its data after the first `skipped` batches: at once where `begin_after`
        was told where they end, or else by reading them.
        """

    def next(self) -> Any:
        """Returns the next `WorkerBatch` of the outlet in use, or an Optional of a global batch.

        None at the end of a pass.
        """

    def keep_position(self) -> None:
        """Is called before the first iterator, where `position` will be asked for."""

    def position(self, batches: int) -> State | None:
        """Returns where the iterator in use is, where that takes more than counting.

        It has given so many batches of its pass.
        """

    def begin_call(self) -> None:
        """Tells the data that `fit` or an evaluation begins, which Keras tells it as the end of an
        epoch."""

    def end_epoch(self) -> None:
        """Is called at the end of an epoch where the iterator goes on."""

    def end_pass(self, whole: bool = False) -> None:
        """Is called when an iterator has given its last batch, or is given up.

        `whole`: it has given each batch of one pass of the data, and nobody has stopped it.
        """

    def begin_after(self, passes: int, position: State | None = None, unread: int = 0) -> None:
        """Puts a new feed where another was after so many iterators.

        Each may shuffle for the next: where the other's `position` does not hold that they are
        made again, those from which nothing was read after the first `unread` of them.
        """

    @property
    def error(self) -> Exception | None:
        """Why the data cannot be read on, if that is so."""

    def find_fault(self) -> str | None:
        """Returns which record cannot be read and why, where reading the files again tells."""

    @property
    def threads(self) -> int | None:
        """How many threads read examples (0: the one that feeds the steps), if that is known."""

    def close(self) -> None:
        """Ends its threads. A feed that is closed may be iterated anew."""


class SourceFeed:
    """A source with random access under a plan."""

    endless = True

    def __init__(
        self,
        source: Source,
        plan: BatchPlan,
        placement: Placement,
        reading: ReadOptions = DEFAULT,
    ) -> None:
        self._source, self._plan, self._placement = source, plan, placement
        self._reading = reading
        self.passes = self.unread = 0
        self._stream: Prefetcher | None = None
        self._taken: Any = None
        self._is_at_start = False

    @property
    def steps(self) -> int:
        return self._plan.steps_per_epoch

    @property
    def specs(self) -> Any:
        rows = self._plan.global_batch_size
        return specs_of(self._source.specs, rows)

    @property
    def form(self) -> dict[str, Any]:
        return {
            "examples": self._plan.examples,
            "global_batch_size": self._plan.global_batch_size,
        }

    @property
    def digest(self) -> int | None:
        return self._source.digest()

    @property
    def source(self) -> Source:
        return self._source

    @property
    def plan(self) -> BatchPlan:
        return self._plan

    @property
    def reading(self) -> ReadOptions:
        return self._reading

    def again(self) -> SourceFeed:
        """Returns another feed of the same batches."""
        return SourceFeed(self._source, self._plan, self._placement, self._reading)

    def holds(self, batches: int | None) -> bool:
        return True

    def iterate(self, first_step: int, skipped: int = 0) -> Any:
        self.passes += 1
        if self._stream is None or first_step or not self._is_at_start:
            self.close()
            self._stream = prefetcher_of(
                self._source, self._plan, self._placement, first_step, self._reading
            )
            self._taken = self._stream.shards
            if self._placement.gpus:
                self._taken = Ahead(self._stream.shards, self._placement.gpus)
        self._is_at_start = False
        return self._taken

    def next(self) -> Any:
        assert self._stream is not None
        return self._stream.shards.take()

    def keep_position(self) -> None:
        pass

    def position(self, batches: int) -> State | None:
        return None

    def begin_call(self) -> None:
        pass

    def end_epoch(self) -> None:
        pass

    def end_pass(self, whole: bool = False) -> None:
        # In an order that stays, the next pass is the same: what is read ahead begins it.
        self._is_at_start = whole and self._plan.seed is None and self.error is None
        if not self._is_at_start:
            self.close()

    def begin_after(self, passes: int, position: State | None = None, unread: int = 0) -> None:
        self.passes = passes

    @property
    def error(self) -> Exception | None:
        return self._stream.error if self._stream else None

    def find_fault(self) -> str | None:
        return None

    @property
    def threads(self) -> int | None:
        return self._stream.threads if self._stream else self._reading.threads

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
            self._stream = None


def make_feed(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    placement: Placement,
    batch_size: int | None = None,
    class_weight: Mapping[int, float] | None = None,
    seed: int | None = None,
    steps_per_epoch: int | None = None,
    reading: ReadOptions = DEFAULT,
    is_training: bool = False,
) -> Feed:
    """Returns the feed of what Keras' `fit` takes: arrays, a Dataset, a PyDataset, ….

    Args:
        batch_size: the global batch, for arrays; what comes in batches keeps its own.
        seed: shuffles anew each epoch; None keeps the order. A `tf.data.Dataset` or a
            generator has its own order.
        is_training: the data of `fit`, of which a pass may go on over epochs of
            `steps_per_epoch` steps.

    Raises:
        DataError: the arrays differ in length, or an argument does not go with the data.
    """
    if isinstance(x, (SourceFeed, DatasetFeed)):
        return x
    if isinstance(x, Source):
        _check_no_more(x, y=y, sample_weight=sample_weight)
        if class_weight is not None:
            x = Weighted(x, class_weight)
        size = batch_size or DEFAULT_BATCH_SIZE
        return SourceFeed(x, BatchPlan(len(x), size, seed), placement, reading)
    if isinstance(x, tf.distribute.DistributedDataset):
        raise ModelError(
            "a DistributedDataset was given, which hides how many rows each replica gets. Give "
            "the tf.data.Dataset of global batches itself; tfmulti shares out its rows."
        )
    if _is_batched(x):
        _check_no_more(x, y=y, sample_weight=sample_weight)
        if isinstance(x, keras.utils.PyDataset) and x.num_batches is not None:
            return PyDatasetFeed(InOrder(x, seed), class_weight, is_training=is_training)
        return DatasetFeed(x, class_weight, next_is_made=is_training and bool(steps_per_epoch))
    if class_weight is not None:
        sample_weight = weights_of_classes(y, class_weight, sample_weight)
    source = array_source(x, y, sample_weight)
    if batch_size is None and steps_per_epoch:
        batch_size = -(-len(source) // steps_per_epoch)
    return make_feed(source, placement=placement, batch_size=batch_size, seed=seed, reading=reading)


def array_source(x: Any, y: Any, sample_weight: Any) -> ArraySource:
    """Returns what `fit` was given as a source; all floating-point numbers in Keras' `floatx`.

    Raises:
        DataError: the arrays differ in length, or cannot be read by rows.
    """
    parts = keras.utils.pack_x_y_sample_weight(x, y, sample_weight)
    return ArraySource(parts, floats=keras.config.floatx())


def _check_no_more(x: Any, **given: Any) -> None:
    """Raises DataError where targets or weights were given beside data that holds them."""
    for name, value in given.items():
        if value is not None:
            raise DataError(
                f"{name} does not go with a {type(x).__name__}, which holds targets and weights "
                "itself."
            )


def _is_batched(x: Any) -> bool:
    if isinstance(x, (tf.data.Dataset, keras.utils.PyDataset, Iterator)):
        return True
    return type(x).__module__.partition(".")[0] in ("torch", "grain") and hasattr(x, "__iter__")


def weights_of_classes(
    y: Any, class_weight: Mapping[int, float], sample_weight: Any = None
) -> np.ndarray:
    """Returns each row's weight by its label (whole numbers, or one-hot), floatx [rows].

    Raises:
        DataError: there are sample weights too, or several outputs.
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
    """Returns arrays without their last rows, and those rows: Keras' `validation_split`.

    Raises:
        DataError: the data is no arrays, or one of the parts would be empty.
    """
    if _is_batched(parts[0]) or isinstance(parts[0], Source):
        raise DataError(
            "validation_split needs arrays: a Dataset is split by its take() and skip(), a Source "
            "by tfmulti.data.source.Part."
        )
    given = tuple(part for part in parts if part is not None)
    source = ArraySource(given, floats=keras.config.floatx())
    at = int(len(source) * (1 - fraction))
    if not 0 < at < len(source):
        raise DataError(f"validation_split {fraction} of {len(source)} rows leaves one part empty.")
    first = iter(map_nest(lambda a: a[:at], source.data))
    last = iter(map_nest(lambda a: a[at:], source.data))
    return tuple(
        tuple(None if part is None else next(rows) for part in parts) for rows in (first, last)
    )  # type: ignore[return-value]

"""What one replica computes of a step: its share of the global batch.

A replica's step runs inside `computing(share)`. What must know of the other rows of the
global batch while the user's code runs (losses, gradients, random numbers, normalization,
metrics) asks `current()`. Everything here is in replica context.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import tensorflow as tf


class ReplicaSlice(NamedTuple):
    """The rows of the global batch that one replica computes at a time.

    Attributes:
        weight: this share's part of the rows whose gradients meet (`is_local`: the replica's own,
            else the global batch's), float64 scalar; 0 where it has none and reads one row that
            does not count.
        own_rows: how many rows count, int64 scalar.
        first_row: where the rows that are read begin in the global batch, int64 scalar.
        global_rows: the rows of the global batch, int64 scalar.
        read_rows: how many rows are read, where that is known before the step runs.
        is_whole: whether this is always the whole global batch: one replica, one pass.
        sync_batch_norm: whether batch statistics are those of all replicas, whatever the
            layers say.
        seeds: the generator of draws without a seed.
        note_gather: is called when the step, as it is traced, gathers the rows of all replicas.
        note_unknown: is called with a reason when the step, as it is traced, takes a value of which
            it is not known how it depends on the rows.
        model: the model whose step is traced.
        states: the Keras variables, by their ids, that code of the user's own changes: "layer" or
            "metric".
        is_local: whether the replica takes the step as if it were alone with its rows: its loss,
            gradient and batch statistics are of these (`local_steps`).
    """

    weight: tf.Tensor
    own_rows: tf.Tensor
    first_row: tf.Tensor
    global_rows: tf.Tensor
    read_rows: int | None
    is_whole: bool
    sync_batch_norm: bool
    seeds: Any = None
    note_gather: Callable[[], None] = lambda: None
    note_unknown: Callable[[str], None] = lambda reason: None
    model: Any = None
    states: Mapping[int, str] = MappingProxyType({})
    is_local: bool = False

    @property
    def part(self) -> tf.Tensor:
        """This share's part of the global batch's rows, float64 scalar."""
        return part_of(self.own_rows, self.global_rows) if self.is_local else self.weight

    def alone(self) -> ReplicaSlice:
        """Returns the same as if nobody had other rows: Keras' own numbers of what is there."""
        return self._replace(is_whole=True)


def part_of(rows: tf.Tensor, of: tf.Tensor) -> tf.Tensor:
    """Returns which part some rows are, float64; 0 of nothing."""
    return tf.math.divide_no_nan(tf.cast(rows, tf.float64), tf.cast(of, tf.float64))


Value = TypeVar("Value")


class PerThread(Generic[Value]):
    """A value of each thread's own: the replicas of a process are traced in several."""

    def __init__(self, default: Value) -> None:
        self._default = default
        self._thread = threading.local()

    def get(self) -> Value:
        """Returns this thread's value."""
        return getattr(self._thread, "value", self._default)

    @contextlib.contextmanager
    def set_to(self, value: Value) -> Iterator[Value]:
        """Inside, in this thread, `get()` returns this value, which is also given."""
        before = self.get()
        self._thread.value = value
        try:
            yield value
        finally:
            self._thread.value = before


_share: PerThread[ReplicaSlice | None] = PerThread(None)


def computing(share: ReplicaSlice) -> contextlib.AbstractContextManager[ReplicaSlice | None]:
    """Inside the context, in this thread, `current()` is this share."""
    return _share.set_to(share)


def current() -> ReplicaSlice | None:
    """Returns the share that this thread computes, or None outside a prepared model's step."""
    return _share.get()


def partial() -> ReplicaSlice | None:
    """Returns the share that this thread computes, where it may be less than the whole."""
    share = current()
    return None if share is None or share.is_whole else share


class CannotCompile(Exception):
    """What XLA is to compile for a replica cannot be computed there, or not to the same numbers."""


_hindrances: PerThread[list[str] | None] = PerThread(None)


def compiling(hindrances: list[str]) -> contextlib.AbstractContextManager[list[str] | None]:
    """Inside the context, in this thread, `refuse_to_compile` is an error.

    What it says comes to `hindrances`, since Keras puts words of its own around an error.
    """
    return _hindrances.set_to(hindrances)


def refuse_to_compile(what: str) -> None:
    """Says that what follows takes all replicas, or is another number in a compiled function.

    Raises:
        Hindered: inside `compiling`.
    """
    hindrances = _hindrances.get()
    if hindrances is not None:
        hindrances.append(what)
        raise CannotCompile(what)

"""Describes the slice of the global batch that one replica computes in a step.

A replica's step runs inside `computing(replica_slice)`. The patches of losses, gradients, random
numbers, normalization and metrics must know about the other rows of the global batch. They call
`current()`. Everything here runs in replica context.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import tensorflow as tf

from tfmulti.distribution.python_attributes import Attributes


class ReplicaSlice(NamedTuple):
    """The rows of the global batch that one replica computes at a time.

    Attributes:
        weight: this slice's part of the rows of the global batch, over which gradients are
            averaged, float64 scalar. It is 0 if the replica has no rows. The replica then reads one
            row that does not count.
        own_rows: the number of this slice's rows that count, int64 scalar.
        first_row: the position of the first row that is read in the global batch, int64 scalar.
        global_rows: the number of rows of the global batch, int64 scalar.
        read_rows: the number of rows that are read, if it is known before the step runs; else None.
        is_whole: whether Keras computes its own numbers from the rows, without other replicas: the
            slice is always the whole global batch, or the call is inside `alone` or `of_all_rows`.
        has_all_rows: whether one of several replicas computes all rows of the global batch.
        sync_batch_norm: whether all batch statistics are those of all replicas, also in layers
            that are not synchronized.
        seeds: the generator of draws without a seed; None means Keras' own.
        note_addend: is called during tracing with the numbers of rows for which plain Keras takes a
            number for each row, which the step adds, for a bias.
        note_gather: is called during tracing if the step gathers the rows of all replicas.
        note_unknown: is called with a reason during tracing if the step uses a value, and it is not
            known how that value depends on the rows.
        note_trusted: the same for a value that a loss or metric of Keras takes for rows.
        note_assigned: is called during tracing if the step changes a variable, with the variable,
            and whether it is known that all replicas give it the same value.
        model: the model whose step is traced.
        states: the kinds of the variables that the user's own code may change, "layer", "metric" or
            "other", by the variables' ids.
        attributes: the numbers and texts that the user's own objects held before the step.
        entries: while random numbers of one part of concatenated rows are drawn: where this
            replica's entries begin in the tensor of one device, and how many entries that has,
            int64 scalars. Else None.
    """

    weight: tf.Tensor
    own_rows: tf.Tensor
    first_row: tf.Tensor
    global_rows: tf.Tensor
    read_rows: int | None
    is_whole: bool
    sync_batch_norm: bool
    has_all_rows: bool = False
    seeds: Any = None
    note_addend: Callable[[set[int]], None] = lambda rows: None
    note_gather: Callable[[], None] = lambda: None
    note_unknown: Callable[[str], None] = lambda reason: None
    note_trusted: Callable[[str], None] = lambda reason: None
    note_assigned: Callable[[Any, bool], None] = lambda variable, is_equal: None
    model: Any = None
    states: Mapping[int, str] = MappingProxyType({})
    attributes: Attributes = ()
    entries: tuple[tf.Tensor, tf.Tensor] | None = None

    def alone(self) -> ReplicaSlice:
        """Returns the same slice, marked as the whole global batch.

        Inside `computing` of it, Keras computes its own numbers from the rows that it gets.
        """
        return self._replace(is_whole=True)

    def of_all_rows(self) -> ReplicaSlice:
        """Returns the slice of a replica that has got all rows of the global batch."""
        return self._replace(is_whole=True, has_all_rows=True)


def part_of(rows: tf.Tensor, total: tf.Tensor) -> tf.Tensor:
    """Returns the quotient of two numbers of rows in float64, or 0 for a divisor of 0."""
    return tf.math.divide_no_nan(tf.cast(rows, tf.float64), tf.cast(total, tf.float64))


Value = TypeVar("Value")


class PerThread(Generic[Value]):
    """A separate value for each thread.

    TensorFlow traces each replica of a process in its own thread.
    """

    def __init__(self, default: Value) -> None:
        self._default = default
        self._thread = threading.local()

    def get(self) -> Value:
        """Returns this thread's value."""
        return getattr(self._thread, "value", self._default)

    @contextlib.contextmanager
    def set_to(self, value: Value) -> Iterator[Value]:
        """Makes `get()` return this value in this thread, inside the context, and yields it."""
        outer_value = self.get()
        self._thread.value = value
        try:
            yield value
        finally:
            self._thread.value = outer_value


_current: PerThread[ReplicaSlice | None] = PerThread(None)


def computing(
    replica_slice: ReplicaSlice,
) -> contextlib.AbstractContextManager[ReplicaSlice | None]:
    """Makes `current()` return this slice in this thread, inside the context."""
    return _current.set_to(replica_slice)


def current() -> ReplicaSlice | None:
    """Returns the slice that this thread computes, or None outside a prepared model's step."""
    return _current.get()


def partial() -> ReplicaSlice | None:
    """Returns the slice that this thread computes, or None if it is always the whole batch."""
    replica_slice = current()
    return None if replica_slice is None or replica_slice.is_whole else replica_slice


class CannotCompileError(Exception):
    """Raised while tracing when XLA cannot compile a replica's step with identical results."""


_obstacles: PerThread[list[str] | None] = PerThread(None)


def compiling(obstacles: list[str]) -> contextlib.AbstractContextManager[list[str] | None]:
    """Makes `refuse_to_compile` raise an error in this thread, inside the context.

    Args:
        obstacles: the list to which the reasons are added. Keras may replace the error by
            another one, so the caller reads the reasons there.
    """
    return _obstacles.set_to(obstacles)


def is_compiling() -> bool:
    """Returns whether XLA is to compile what this thread traces."""
    return _obstacles.get() is not None


def refuse_to_compile(action: str) -> None:
    """Raises an error if the step is being compiled by XLA, and does nothing otherwise.

    Call it before code that needs all replicas, or that gives other numbers when it is compiled.

    Args:
        action: what the step does, as words that follow "it".

    Raises:
        CannotCompileError: the call is inside `compiling`.
    """
    obstacles = _obstacles.get()
    if obstacles is not None:
        obstacles.append(action)
        raise CannotCompileError(action)

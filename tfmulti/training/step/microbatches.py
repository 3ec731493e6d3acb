"""Microbatches: one update from several passes, for a replica slice that is too large for memory.

Each pass computes forward and backward for a part of the replica's rows. If pass p has n_p of the n
rows of the global batch, then the gradient of the step is a sum over the passes of all replicas:

    gradient = Σ_p (n_p / n) · gradient_p

The passes of this replica are added up here. After the last pass the sums are reduced over the
replicas, and the optimizer updates once. Unlike with Keras' `gradient_accumulation_steps`, a step
stays one step: schedules, logs and callbacks count it once.

The divisor of a weighted mean is known only after all passes. So the losses' divisors are computed
first (`distribution.losses.Divisors`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import keras
import tensorflow as tf

from tfmulti.data import sharding
from tfmulti.distribution import lookup_gradients
from tfmulti.distribution.losses import Divisors
from tfmulti.distribution.replica_context import rows_of, weighted
from tfmulti.distribution.replica_slice import PerThread, ReplicaSlice, current, part_of
from tfmulti.errors import ModelError
from tfmulti.keras_patches.model_structure import seed_variables
from tfmulti.training.step.step_logs import Means

Step = Callable[[Any, ReplicaSlice], Means]


class Taker(Protocol):
    """Takes the gradients that a step passes to an optimizer's `apply`."""

    def take(self, optimizer: Any, gradients: Sequence[Any], variables: Any) -> None:
        """Takes the gradients of one call of `optimizer.apply`."""


_taker: PerThread[Taker | None] = PerThread(None)


def giving_gradients_to(taker: Taker) -> contextlib.AbstractContextManager[Taker | None]:
    """Returns a context, for this thread, in which gradients go to `taker` and not to `apply`."""
    return _taker.set_to(taker)


class Collector:
    """Adds up the gradients of all passes in the place of the optimizer."""

    def __init__(self) -> None:
        self._optimizer: Any = None
        self._variables: Any = None
        self._sums: list[Any] = []
        self._updates = 0

    def taking(self) -> contextlib.AbstractContextManager[Taker | None]:
        """Returns a context for one pass, in which gradients come here and not to `apply`."""
        self._updates = 0
        return giving_gradients_to(self)

    def take(self, optimizer: Any, gradients: Sequence[Any], variables: Any) -> None:
        """Adds the gradients of one pass, weighted by its rows, to those of the earlier passes.

        Raises:
            ModelError: the pass updates a second time, which needs the weights of the first update.
        """
        self._updates += 1
        if self._updates > 1:
            raise ModelError(
                "the train_step updates more than once a step, and the second update needs the "
                "first one's weights, which --microbatches delays. Leave --microbatches out."
            )
        replica_slice = current()
        assert replica_slice is not None
        new = [None if g is None else weighted(g, replica_slice.weight) for g in gradients]
        self._optimizer, self._variables = optimizer, variables
        self._sums = [
            _added(a, b) for a, b in zip(self._sums or [None] * len(new), new, strict=True)
        ]

    def tensors(self) -> list[tf.Tensor]:
        """Returns the sums so far. They must be computed before the next pass takes its memory."""
        return [
            g.values if isinstance(g, tf.IndexedSlices) else g for g in self._sums if g is not None
        ]

    def update(self) -> None:
        """Lets the optimizer apply the sums of the gradients."""
        if self._optimizer is not None:
            self._optimizer.apply(self._sums, self._variables)


def take(optimizer: Any, gradients: Sequence[Any], variables: Any) -> bool:
    """Gives gradients to the taker of this thread.

    Returns:
        Whether there is a taker; if not, the optimizer must apply the gradients.
    """
    taker = _taker.get()
    if taker is None:
        return False
    taker.take(optimizer, gradients, variables)
    return True


def run(
    model: keras.Model, step: Step, data: Any, replica_slice: ReplicaSlice, passes: int
) -> Means:
    """Runs a step in several passes over a replica's rows, and returns its logs.

    Returns:
        The mean of the passes' logs, by rows.
    """
    parts = [_part(data, replica_slice, passes, number) for number in range(passes)]
    divisors = _divisors_of(model, step, parts)
    seeds = seed_variables(model)
    seeds_before = [tf.identity(seed.value) for seed in seeds]
    sums, logs = Collector(), []
    for number, (rows, part) in enumerate(parts):
        with tf.control_dependencies(sums.tensors()):
            # One device draws once for all rows, so all passes must draw from the same seeds.
            if number:
                for seed, value in zip(seeds, seeds_before, strict=True):
                    seed.assign(value)
            with sums.taking(), divisors.in_use():
                logs.append(step(rows, part))
    sums.update()
    return _combined(logs, [part.weight for _, part in parts])


def _part(
    data: Any, replica_slice: ReplicaSlice, passes: int, number: int
) -> tuple[Any, ReplicaSlice]:
    """Returns the rows of one pass, and the pass's own `ReplicaSlice`."""
    start, stop = sharding.slice_bounds(
        replica_slice.own_rows, passes, tf.constant(number, tf.int64), tf.minimum
    )
    begin, end = sharding.rows_to_read(
        start, stop, tf.maximum(replica_slice.own_rows, 1), tf.minimum
    )
    known_rows = None
    if replica_slice.read_rows is not None and replica_slice.read_rows % passes == 0:
        known_rows = replica_slice.read_rows // passes
        begin, end = number * known_rows, (number + 1) * known_rows
    part = replica_slice._replace(
        weight=part_of(stop - start, replica_slice.global_rows),
        own_rows=stop - start,
        first_row=replica_slice.first_row + tf.cast(begin, tf.int64),
        read_rows=known_rows,
        is_whole=False,
    )
    return rows_of(data, begin, end), part


def _divisors_of(
    model: keras.Model, step: Step, parts: Sequence[tuple[Any, ReplicaSlice]]
) -> Divisors:
    """Returns the divisors of the losses, summed over all passes and replicas.

    The passes are traced in a scope without side effects. TensorFlow keeps only those of their
    operations that the divisors need. If the first pass has no divisors, no other pass is traced.
    """
    divisors = Divisors()
    # Regularizers ask the scope for their weights, and must get the variables themselves.
    weights = {id(v): v.value for v in model.trainable_variables}
    for rows, part in parts:
        scope = keras.StatelessScope(collect_losses=True)
        scope.state_mapping.update(weights)
        with scope, Collector().taking(), divisors.in_use():
            step(rows, part)
        if not divisors.any:
            break
    divisors.sum_up()
    return divisors


def _added(sum_so_far: Any, gradient: Any) -> Any:
    """Returns the sum of two gradients, each dense, `tf.IndexedSlices` or None."""
    if sum_so_far is None or gradient is None:
        return gradient if sum_so_far is None else sum_so_far
    if isinstance(sum_so_far, tf.IndexedSlices) and isinstance(gradient, tf.IndexedSlices):
        return lookup_gradients.added(sum_so_far, gradient)
    return tf.convert_to_tensor(sum_so_far) + tf.convert_to_tensor(gradient)


def _combined(logs: Sequence[Means], weights: Sequence[tf.Tensor]) -> Means:
    """Returns the mean of the passes' logs, weighted by their rows."""
    total = tf.add_n(list(weights))

    def mean(*values: tf.Tensor) -> tf.Tensor:
        floats = [v if v.dtype.is_floating else tf.cast(v, tf.float32) for v in values]
        weighted = [
            tf.math.multiply_no_nan(value, tf.cast(weight, value.dtype))
            for value, weight in zip(floats, weights, strict=True)
        ]
        return tf.math.divide_no_nan(tf.add_n(weighted), tf.cast(total, floats[-1].dtype))

    means: Means = tf.nest.map_structure(mean, *logs)
    return means

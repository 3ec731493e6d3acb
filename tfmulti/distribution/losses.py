"""Scales the losses of replicas so that they add up to the loss of the global batch.

The gradient of the global batch is the mean of the replicas' gradients, weighted by their rows
(`replica_context`). So each replica's loss must be such that this mean over the replicas is the
loss of the global batch, and not the replica's own loss:

- A mean over rows stays as it is.
- A sum is divided by the replica's weight `n_r / G`.
- A mean by weights, or over values that are not masked, has a divisor `d_r` on replica `r`. The
  loss is multiplied by `(d_r / d) / (n_r / G)`, where `d` is the sum of `d_r` over all replicas.
- A loss of one number, such as a root of a mean, is computed from the rows of all replicas. So is a
  value for each row that depends on other rows, such as a contrastive loss. No scaling is right for
  every such function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfmulti.distribution import row_labels
from tfmulti.distribution.custom_gradients import custom_gradient
from tfmulti.distribution.replica_context import gather_rows, sum_by_dtype
from tfmulti.distribution.replica_slice import PerThread, ReplicaSlice, computing
from tfmulti.distribution.row_rules import Kind
from tfmulti.errors import ModelError

# Whether a tape records the gradient that this thread takes now.
is_recorded = PerThread(False)
_compiled = PerThread(False)
_divisors: PerThread[Divisors | None] = PerThread(None)
_loss_calls: PerThread[LossCalls | None] = PerThread(None)


def compiled_loss() -> contextlib.AbstractContextManager[bool]:
    """Marks losses inside the context as those of `compile`, which Keras' own step handles."""
    return _compiled.set_to(True)


class Divisors:
    """The divisors of the losses of a step that takes several passes, in the order of their calls.

    The divisor of a mean by weights is known only after all passes, so the passes run twice. In the
    first run each loss stores its divisor here. In the second run it gets the divisor of the global
    batch.
    """

    def __init__(self) -> None:
        # This replica's divisors, summed over the passes.
        self._own: list[tf.Tensor] = []
        self._totals: list[tf.Tensor] | None = None
        self._next = 0

    @property
    def any(self) -> bool:
        """Whether a loss has stored a divisor."""
        return bool(self._own)

    def in_use(self) -> contextlib.AbstractContextManager[Divisors | None]:
        """Makes the losses of one pass store or get their divisors here, inside the context."""
        self._next = 0
        return _divisors.set_to(self)

    def sum_up(self) -> None:
        """Ends the first run, and sums the divisors over all passes and all replicas."""
        self._totals = sum_by_dtype(self._own) if self._own else []

    def total_of(self, own: tf.Tensor) -> tf.Tensor:
        """Returns the divisor of the next loss over the global batch, or `own` in the first run."""
        index, self._next = self._next, self._next + 1
        if self._totals is not None:
            return self._totals[index]
        if index == len(self._own):
            self._own.append(own)
        else:
            self._own[index] += own
        return own


def in_passes() -> bool:
    """Returns whether the step takes several passes, and this is one of them."""
    return _divisors.get() is not None


def scaled_to_global(
    replica_slice: ReplicaSlice,
    loss: Any,
    reduction: str | None,
    divisor: Callable[[], tf.Tensor | None],
) -> Any:
    """Returns a replica's loss, scaled so that the mean over the replicas is the global loss.

    Args:
        replica_slice: this replica's slice.
        loss: the loss that Keras computed from the values of this replica's rows.
        reduction: Keras' name of the reduction.
        divisor: returns what Keras divided the sum by, or None if that is the number of rows.

    Raises:
        ModelError: the loss is a sum in a `train_step` of the user's own, which may divide it
            again.
    """
    if reduction in (None, "none"):
        # The gradient of a vector is that of its sum (`global_values.gradient`).
        return loss
    if reduction == "sum":
        if not _compiled.get() and not row_labels.are_kept():
            raise ModelError(
                "a loss with reduction='sum' is used in a step of the model's own, where tfmulti "
                "cannot tell whether it is divided by the rows afterwards. Use "
                "reduction='sum_over_batch_size' there, or self.compute_loss(...)."
            )
        own_part = tf.ones_like(replica_slice.weight)
    else:
        own_divisor = divisor()
        if own_divisor is None:
            return loss
        own_divisor = tf.where(replica_slice.own_rows > 0, own_divisor, tf.zeros_like(own_divisor))
        divisors = _divisors.get()
        total = divisors.total_of(own_divisor) if divisors else sum_by_dtype([own_divisor])[0]
        own_part = tf.cast(tf.math.divide_no_nan(own_divisor, total), replica_slice.weight.dtype)
    return loss * tf.cast(tf.math.divide_no_nan(own_part, replica_slice.weight), loss.dtype)


def first_gradient(replica_slice: ReplicaSlice, loss: Any) -> tf.Tensor | None:
    """Returns the gradient with which the differentiation of a loss begins; None stands for 1.

    The gradient of a vector is that of the sum over all replicas, so it is divided by the replica's
    weight (see the module). A single number is assumed to be a mean over rows.
    """
    if not tf.is_tensor(loss) or not loss.shape.rank:
        return None
    factor = tf.math.reciprocal_no_nan(replica_slice.weight)
    return tf.fill(tf.shape(loss), tf.cast(factor, loss.dtype))


def added_loss(replica_slice: ReplicaSlice, loss: Any) -> Any:
    """Returns a loss that `add_loss` was given, as a part of the global sum that Keras makes.

    A single number stays as it is, since it is assumed to be a mean over rows, or to be independent
    of the rows.
    """
    if loss.shape.rank == 0:
        return loss
    return loss * tf.cast(tf.math.reciprocal_no_nan(replica_slice.weight), loss.dtype)


@dataclass
class LossCalls:
    """What happened while a loss was computed.

    Attributes:
        reduced: whether a loss was reduced.
        scalar: whether a loss function returned one number before the reduction.
        by_rows: whether the values before each reduction are known to have rows, every one computed
            from the same input row alone.
    """

    reduced: bool = False
    scalar: bool = False
    by_rows: bool = True


def watching(calls: LossCalls) -> contextlib.AbstractContextManager[LossCalls | None]:
    """Notes in `calls` the losses that are reduced inside the context, also nested ones."""
    return _loss_calls.set_to(calls)


def note_reduction(values: tf.Tensor) -> None:
    """Notes that the values of a loss are reduced."""
    calls = _loss_calls.get()
    if calls is not None:
        calls.reduced = True
        calls.scalar = calls.scalar or values.shape.rank == 0
        calls.by_rows = calls.by_rows and row_labels.label_of(values).kind is Kind.ROWS


def from_all_rows(
    replica_slice: ReplicaSlice,
    compute: Callable[..., Any],
    y_true: Any,
    y_pred: Any,
    weights: Any,
    attached: Sequence[str],
) -> Any:
    """Returns `compute(y_true, y_pred, weights)` of the global batch, the same on all replicas.

    The predictions of the other replicas are constants here. So each replica's gradient is the part
    of its own rows. The gradient is divided by the replica's weight, so that the mean over the
    replicas is the gradient of the global batch.

    Args:
        replica_slice: this replica's slice.
        compute: the function of all rows.
        y_true: a nest of targets.
        y_pred: a nest of predictions.
        weights: a nest of weights, or None.
        attached: the names of attributes of predictions that hold tensors of the same rows.

    Raises:
        ModelError: the step takes several passes, so no pass has all rows.
    """
    if in_passes():
        raise ModelError(
            "a loss or metric function needs all rows of a batch together, which --microbatches "
            "splits. Return a value for each example from its own row, or leave --microbatches out."
        )
    replica_slice.note_gather()
    y_true, weights = (
        tf.nest.map_structure(lambda v: _all_rows(replica_slice, v), v) for v in (y_true, weights)
    )
    y_pred = tf.nest.map_structure(
        lambda v: _all_rows_of_variable(replica_slice, v, attached), y_pred
    )
    # This call gets all rows, so a loss inside it must not be scaled.
    with computing(replica_slice.of_all_rows()):
        loss = compute(y_true, y_pred, weights)
    return _with_whole_gradient(replica_slice, loss)


def _all_rows(replica_slice: ReplicaSlice, value: Any) -> Any:
    """Returns the rows of all replicas; a value without rows stays as it is."""
    if value is None:
        return None
    value = tf.convert_to_tensor(value)
    return gather_rows(value[: replica_slice.own_rows]) if value.shape.rank else value


def _all_rows_of_variable(replica_slice: ReplicaSlice, value: Any, attached: Sequence[str]) -> Any:
    """Returns the rows of all replicas; this replica's own rows carry the gradient."""
    value = tf.convert_to_tensor(value)
    if not value.shape.rank:
        return value
    gathered = tf.stop_gradient(_all_rows(replica_slice, value))
    last = replica_slice.first_row + replica_slice.own_rows
    own_rows = value[: replica_slice.own_rows]
    rows = tf.concat([gathered[: replica_slice.first_row], own_rows, gathered[last:]], 0)
    for name in attached:
        if hasattr(value, name):
            setattr(rows, name, _all_rows_of_variable(replica_slice, getattr(value, name), ()))
    return rows


def _with_whole_gradient(replica_slice: ReplicaSlice, value: Any) -> Any:
    """Returns the same value, whose gradient is divided by the replica's weight."""

    @custom_gradient
    def identity(x: tf.Tensor) -> Any:
        def back(upstream: tf.Tensor) -> tf.Tensor:
            if is_recorded.get():
                # A gradient of this gradient would need the predictions of the other replicas.
                replica_slice.note_unknown("a loss of all rows inside two gradient tapes")
            factor = tf.math.reciprocal_no_nan(replica_slice.weight)
            return upstream * tf.cast(factor, upstream.dtype)

        return tf.identity(x), back

    return identity(value)


def divisor_of(
    values: Any,
    sample_weight: Any,
    mask: Any,
    reduction: str | None,
    same_rank: Callable[[Any, Any], Sequence[Any]],
) -> tf.Tensor | None:
    """Returns what Keras divides a summed loss by; None if that is the number of its values.

    Args:
        values: the losses before the reduction.
        sample_weight: the weights of the values, or None.
        mask: which values count, or None.
        reduction: Keras' name of the reduction.
        same_rank: Keras' rule by which weights and values get the same rank.
    """
    weighs = reduction == "mean_with_sample_weight" and sample_weight is not None
    if mask is None and not weighs:
        return None
    values = tf.convert_to_tensor(values)
    # Sums of 16 bits would lose digits.
    dtype = tf.float64 if values.dtype == tf.float64 else tf.float32
    # Keras' weights of the values are 0 for masked values.
    weights = tf.ones_like(values, dtype) if mask is None else tf.cast(mask, dtype)
    if weighs:
        sample_weights = tf.cast(sample_weight, dtype)
        if mask is None:
            return tf.reduce_sum(sample_weights)
        sample_weights, weights = same_rank(sample_weights, weights)
        weights = weights * sample_weights
    return tf.reduce_sum(weights)

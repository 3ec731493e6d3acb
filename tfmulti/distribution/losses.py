"""Losses of a share that add up to the loss of the global batch.

Gradients meet as the mean over the replicas, each weighing by its rows (`replicas`). So a
replica's loss must be such that this mean is the loss of the global batch:

- a mean over rows stays as it is;
- a sum, and a mean by weights or over what is not masked, is scaled to its part;
- a function that returns one number (a root of a mean, …), or a value for each row that
  depends on the other rows (a contrastive loss), is computed from the rows of all replicas,
  since nothing else is right for every such function.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from tfmulti.distribution import row_labels
from tfmulti.distribution.replica_context import gather_rows, sum_together
from tfmulti.distribution.replica_slice import PerThread, ReplicaSlice, computing
from tfmulti.errors import ModelError

_compiled = PerThread(False)
_divisors: PerThread[Divisors | None] = PerThread(None)
_seen: PerThread[Seen | None] = PerThread(None)


def compiled_loss() -> contextlib.AbstractContextManager[bool]:
    """Inside the context, losses are those given to `compile`, which Keras' own step handles."""
    return _compiled.set_to(True)


class Divisors:
    """What the losses of a step that takes several passes divide by, in order of their calls.

    The divisor of a mean by weights is known when all passes were seen. So they are run
    twice: first `measuring`, where each loss leaves its divisor, then for real.
    """

    def __init__(self) -> None:
        self._own: list[tf.Tensor] = []  # of this replica, summed over the passes
        self._totals: list[tf.Tensor] | None = None
        self._next = 0

    @property
    def any(self) -> bool:
        return bool(self._own)

    def in_use(self) -> contextlib.AbstractContextManager[Divisors | None]:
        """Inside the context, the losses of one pass find or leave their divisors here."""
        self._next = 0
        return _divisors.set_to(self)

    def sum_up(self, share: ReplicaSlice) -> None:
        """Ends the measuring: the divisors are those of all passes of all replicas that meet."""
        self._totals = _of_all(share, self._own) if self._own else []

    def total_of(self, own: tf.Tensor) -> tf.Tensor:
        """Returns a loss' divisor over the global batch, or while measuring its own part."""
        place, self._next = self._next, self._next + 1
        if self._totals is not None:
            return self._totals[place]
        if place == len(self._own):
            self._own.append(own)
        else:
            self._own[place] += own
        return own


def in_passes() -> bool:
    """Whether the step takes several passes, of which this is one."""
    return _divisors.get() is not None


def scaled_to_global(
    share: ReplicaSlice, loss: Any, reduction: str | None, divisor: Callable[[], tf.Tensor | None]
) -> Any:
    """Returns a reduced loss of a share, scaled so that the shares' mean is the global loss.

    Args:
        loss: what Keras made of the share's values.
        reduction: Keras' name of how.
        divisor: returns what Keras divided the sum by, or None where that is the rows.

    Raises:
        ModelError: a sum in a train_step of the user's own, which may divide it again.
    """
    if reduction in (None, "none"):
        return loss  # its gradient is that of a sum: `global_values.gradient`
    if reduction == "sum":
        if not _compiled.get() and not row_labels.are_kept():
            raise ModelError(
                "a loss with reduction='sum' is used in a step of the model's own, where tfmulti "
                "cannot tell whether it is divided by the rows afterwards. Use "
                "reduction='sum_over_batch_size' there, or self.compute_loss(...)."
            )
        part = tf.ones_like(share.weight)
    else:
        own = divisor()
        if own is None:
            return loss
        own = tf.where(share.own_rows > 0, own, 0.0)
        divisors = _divisors.get()
        total = divisors.total_of(own) if divisors else _of_all(share, [own])[0]
        part = tf.cast(tf.math.divide_no_nan(own, total), share.weight.dtype)
    return loss * tf.cast(tf.math.divide_no_nan(part, share.weight), loss.dtype)


def _of_all(share: ReplicaSlice, values: list[tf.Tensor]) -> list[tf.Tensor]:
    return values if share.is_local else sum_together(values)


def summed_gradient(share: ReplicaSlice, loss: Any) -> Any:
    """Returns the same vector of losses, with the gradient of a part of one long vector.

    The gradient of a vector is that of its sum, over all replicas: see `scaled_to_global`. A number
    stays.
    """
    if not tf.is_tensor(loss) or not loss.shape.rank:
        return loss
    return _with_gradient_times(loss, tf.math.reciprocal_no_nan(share.weight))


def added_loss(share: ReplicaSlice, loss: Any) -> Any:
    """Returns what `add_loss` was given, summed as Keras does, as a part of the global sum.

    One number is taken for a mean over rows, or for what has nothing to do with them.
    """
    if loss.shape.rank == 0:
        return loss
    return loss * tf.cast(tf.math.reciprocal_no_nan(share.weight), loss.dtype)


@dataclass
class Seen:
    """What was seen while a loss was computed: whether it was reduced, and from one number."""

    reduced: bool = False
    scalar: bool = False


def watching(seen: Seen) -> contextlib.AbstractContextManager[Seen | None]:
    """Inside, `seen` is told of the losses that are reduced, one within another."""
    return _seen.set_to(seen)


def note_reduction(of_one_number: bool) -> None:
    """Says that a loss is reduced, and whether its function returned one number."""
    seen = _seen.get()
    if seen is not None:
        seen.reduced = True
        seen.scalar = seen.scalar or of_one_number


def from_all_rows(
    share: ReplicaSlice,
    compute: Callable[..., Any],
    y_true: Any,
    y_pred: Any,
    weights: Any,
    attached: Sequence[str] = (),
) -> Any:
    """Returns `compute(y_true, y_pred, weights)` of the global batch, the same on all replicas.

    Its gradient is such that the shares' mean is that of the global batch. The other
    replicas' predictions are constants here: each replica adds what its own rows bring.

    Args:
        attached: attributes of predictions that hold tensors of the same rows.

    Raises:
        ModelError: a step of several passes, where the rows are never there together.
    """
    if in_passes():
        raise ModelError(
            "a loss or metric function needs all rows of a batch together, which --microbatches "
            "splits. Return a value for each example from its own row, or leave --microbatches out."
        )
    if share.is_local:
        own = tf.nest.map_structure(lambda v: _own_rows(share, v), (y_true, y_pred, weights))
        with computing(share.alone()):
            return compute(*own)
    share.note_gather()
    y_true, weights = (
        tf.nest.map_structure(lambda v: _all_rows(share, v), v) for v in (y_true, weights)
    )
    y_pred = tf.nest.map_structure(lambda v: _all_rows_of_variable(share, v, attached), y_pred)
    with computing(share.alone()):  # all rows are there; a loss within this one is as Keras has it
        loss = compute(y_true, y_pred, weights)
    return _with_gradient_times(loss, tf.math.reciprocal_no_nan(share.weight))


def _own_rows(share: ReplicaSlice, value: Any) -> Any:
    if value is None:
        return None
    value = tf.convert_to_tensor(value)
    return value[: share.own_rows] if value.shape.rank else value


def _all_rows(share: ReplicaSlice, value: Any) -> Any:
    own = _own_rows(share, value)
    return own if own is None or not own.shape.rank else gather_rows(own)


def _all_rows_of_variable(share: ReplicaSlice, value: Any, attached: Sequence[str]) -> Any:
    """Returns the rows of all replicas; this one's own carry the gradient."""
    value = tf.convert_to_tensor(value)
    if not value.shape.rank:
        return value
    gathered = tf.stop_gradient(_all_rows(share, value))
    last = share.first_row + share.own_rows
    own = value[: share.own_rows]
    rows = tf.concat([gathered[: share.first_row], own, gathered[last:]], 0)
    for name in attached:
        if hasattr(value, name):
            setattr(rows, name, _all_rows_of_variable(share, getattr(value, name), ()))
    return rows


def _with_gradient_times(value: Any, factor: tf.Tensor) -> Any:
    """Returns the same value, whose gradient is multiplied by `factor`."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def identity(x: tf.Tensor) -> Any:
        return tf.identity(x), lambda upstream: upstream * tf.cast(factor, upstream.dtype)

    return identity(value)


def divisor_of(
    values: Any,
    sample_weight: Any,
    mask: Any,
    reduction: str | None,
    same_rank: Callable[[Any, Any], Sequence[Any]],
) -> tf.Tensor | None:
    """Returns what Keras divides a share's summed loss by, where that is not its rows.

    Args:
        same_rank: Keras' rule by which weights and values get the same rank.
    """
    weighs = reduction == "mean_with_sample_weight" and sample_weight is not None
    if mask is None and not weighs:
        return None
    # Keras' own weights of the values; those of masked ones are 0.
    ones = tf.ones_like(tf.convert_to_tensor(values), tf.float32)
    weights = ones if mask is None else tf.cast(mask, tf.float32)
    if weighs:
        given = tf.cast(sample_weight, tf.float32)
        if mask is None:
            return tf.reduce_sum(given)
        given, weights = same_rank(given, weights)
        weights = weights * given
    return tf.reduce_sum(weights)

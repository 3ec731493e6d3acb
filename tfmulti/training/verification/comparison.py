"""Tells whether two runs of the same step gave the same numbers, and how they differ.

Two correct runs differ by rounding. How much a number may differ by rounding is measured. The run
on one device is made once more from weights that are moved by `MOVED_BY` units in the last place,
with gradients that are moved, too. A move of one unit would often change nothing, because the
result is rounded itself. The limit of a number is then the largest of

    TIMES_SENSITIVITY * the change by that move / MOVED_BY
    OF_UPDATES * the largest change by the step (for logs: OF_RESULTS * the largest value)
    LAST_PLACES * one unit in the last place of the largest value

A difference above the limit is no rounding.

A model may compute with fewer digits than its weights have, as in bfloat16. Then `unit` is the last
of these digits, relative to 1. The weights are moved by one such unit, so the first line has 1 for
`MOVED_BY`. The factor of the second line is at least `TIMES_SENSITIVITY * unit`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from tfmulti.distribution import row_labels

# A difference counts if it is more than this many times the change by one unit in the last place of
# the weights. Sums over rows that were added in another order were seen to differ by 16 times that
# change, where large terms cancel out. A wrong computation differs by far more.
TIMES_SENSITIVITY = 40
# Weights are moved by this many units in the last place, if the model computes with all their
# digits.
MOVED_BY = 8
# Gradients are moved by this many times the move of the weights, relative to the largest gradient.
# A gradient is a sum over rows and places, and the terms may be larger than all gradients.
GRADIENTS_MOVED_BY = 8
# A smaller difference of a log does not count, relative to its largest value.
OF_RESULTS = 1e-6
# The same for values that a step changes, relative to the largest change. A step of Adam divides by
# the root of a square, and replicas add sums over rows in another order.
OF_UPDATES = 1e-5
# The sum of a few roundings may lose this many units in the last place of a value.
LAST_PLACES = 4

# float32 arrays of more numbers are compared as they are, and smaller ones in float64.
MANY = 10_000

# The kinds of quantities in the order in which their differences are reported.
KINDS = ("weight", "state", "slot", "metric", "log", "seed")


@dataclass(frozen=True)
class Difference:
    """How far a quantity on the replicas is from the same quantity on one device.

    Attributes:
        kind: one of `KINDS`, `layer`, `loss`, `gradient`, `update` or `undecided`. An update is a
            weight or a slot whose gradients are the same. An undecided quantity tells nothing.
        name: the name of the quantity.
        difference: the largest difference of its elements.
        limit: the largest difference that rounding explains.
        here: the replicas' value of the element that differs most.
        there: one device's value of that element.
        ratio: the replicas' change divided by one device's change, if that is one number for all
            elements.
        scale: the factor between the two changes as a whole, if they have about the same direction.
        line: the line of the user's program that computes the quantity, if it is known.
    """

    kind: str
    name: str
    difference: float
    limit: float
    here: float
    there: float
    ratio: float | None = None
    scale: float | None = None
    line: str | None = None

    @property
    def excess(self) -> float:
        """The difference divided by its limit; above 1 it is no rounding."""
        if self.difference == 0:
            return 0.0
        return self.difference / self.limit if self.limit else float("inf")


class Quantity(NamedTuple):
    """What is compared: one of the kinds of `Difference.kind`, and its name."""

    kind: str
    name: str


def compare(
    quantity: Quantity,
    here: np.ndarray,
    there: np.ndarray,
    moved: np.ndarray,
    before: np.ndarray | None = None,
    unit: float = 0.0,
) -> Difference:
    """Returns how far the replicas' value is from that of one device.

    Args:
        quantity: its kind and name.
        here: the replicas' value.
        there: the value of one device.
        moved: the value of one device after weights and gradients were moved.
        before: the value before the step, if the step changes it. The limit and the factors are
            then relative to the change.
        unit: the last digit with which the model computes, if it has fewer digits than the value;
            otherwise 0.
    """
    kind, name = quantity
    if here.shape != there.shape:
        infinite = float("inf")
        return Difference(kind, name, infinite, 0.0, float(here.size), float(there.size))
    digits = last_place(there.dtype)
    left, right, other = (_wide(value) for value in (here, there, moved))
    apart = _apart(left, right)
    moved_by = 1 if unit else MOVED_BY
    limit = TIMES_SENSITIVITY * float(_apart(other, right).max(initial=0)) / moved_by
    change = right if before is None else right - _wide(before)
    if digits:
        relative = max(OF_RESULTS if before is None else OF_UPDATES, TIMES_SENSITIVITY * unit)
        limit = max(limit, relative * _largest(change), LAST_PLACES * digits * _largest(right))
    if not apart.size:
        return Difference(kind, name, 0.0, limit, 0.0, 0.0)
    worst = int(apart.argmax())
    found = Difference(
        kind,
        name,
        float(apart.flat[worst]),
        limit,
        float(left.flat[worst]),
        float(right.flat[worst]),
    )
    if found.excess <= 1:
        return found
    own = left if before is None else left - _wide(before)
    return replace(found, ratio=ratio_of(own, change), scale=scale_of(own, change))


def last_place(dtype: np.dtype) -> float:
    """Returns one unit in the last place of the number 1, or 0 for whole numbers.

    Args:
        dtype: the dtype of the number.
    """
    if dtype.kind == "f":
        return float(np.finfo(dtype).eps)
    return 2.0**-7 if dtype.name == "bfloat16" else 0.0


def _wide(value: np.ndarray) -> np.ndarray:
    """Returns a value in the dtype in which it is compared."""
    if value.dtype.kind in "SUO":
        raise TypeError("text has no rounding")
    # A difference of two float32 numbers is as exact as the numbers are.
    if value.dtype == np.float32 and value.size > MANY:
        return value
    return np.asarray(value, np.complex128 if value.dtype.kind == "c" else np.float64)


def _apart(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Returns the differences of the elements, where NaN is equal to NaN."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(left - right)
        if np.isfinite(apart.sum()):
            return np.asarray(apart)
    same = (left == right) | (np.isnan(left) & np.isnan(right))
    return np.where(same, 0.0, np.where(np.isnan(apart), np.inf, apart))


def _largest(values: np.ndarray) -> float:
    """Returns the largest size of the finite elements."""
    largest = float(np.abs(values).max(initial=0))
    if np.isfinite(largest):
        return largest
    return float(np.abs(values[np.isfinite(values)]).max(initial=0))


def ratio_of(left: np.ndarray, right: np.ndarray) -> float | None:
    """Returns `left / right` if that is one number for all elements, or None.

    Elements of `right` that are small beside the largest one do not count.

    Args:
        left: an array.
        right: an array of the same shape.

    >>> ratio_of(np.array([2.0, 4.0]), np.array([1.0, 2.0]))
    2.0
    >>> ratio_of(np.array([2.0, 5.0]), np.array([1.0, 2.0])) is None
    True
    """
    counts = np.abs(right) > 1e-3 * _largest(right)
    if not counts.any() or not np.isfinite(left[counts]).all():
        return None
    ratios = np.real(left[counts] / right[counts])
    middle = float(np.median(ratios))
    return middle if np.allclose(ratios, middle, rtol=1e-3) else None


def scale_of(left: np.ndarray, right: np.ndarray) -> float | None:
    """Returns the factor by which `right` comes nearest to `left`, or None.

    It is None if the two, as vectors, have different directions.

    Args:
        left: an array.
        right: an array of the same shape.

    >>> scale_of(np.array([2.0, 4.1]), np.array([1.0, 2.0])) is not None
    True
    >>> scale_of(np.array([2.0, 0.0]), np.array([0.0, 2.0])) is None
    True
    """
    left, right = (np.ravel(np.real(value)) for value in (left, right))
    lengths = float(np.linalg.norm(left)), float(np.linalg.norm(right))
    if not np.isfinite(lengths).all() or not all(lengths):
        return None
    along = float(np.dot(left, right))
    return along / lengths[1] ** 2 if along > 0.95 * lengths[0] * lengths[1] else None


def moved_by_digits(value: np.ndarray, rng: np.random.Generator, unit: float) -> np.ndarray:
    """Returns weights of which each is moved up or down by `moved_part` of itself.

    Args:
        value: the weights.
        rng: draws whether a weight is moved up or down.
        unit: as in `moved_part`.
    """
    signs = rng.choice([-1.0, 1.0], size=value.shape)
    moved = np.asarray(value, np.float64) * (1 + signs * moved_part(value.dtype, unit))
    return np.asarray(moved).astype(value.dtype)


def moved_part(dtype: np.dtype, unit: float) -> float:
    """Returns the part of itself by which a number is moved: `MOVED_BY` units in the last place.

    Args:
        dtype: the dtype of the number.
        unit: the last digit with which the model computes, if it has fewer digits than its weights.
            A number is then moved by one such unit. Otherwise 0.
    """
    return unit or MOVED_BY * last_place(dtype)


def first_of(found: Sequence[Difference]) -> Difference | None:
    """Returns the difference to report, or None if all are rounding.

    Of the kinds that differ, the first in the order of `KINDS` is reported, with its worst
    quantity.

    Args:
        found: all differences.
    """
    wrong = [each for each in found if each.excess > 1]
    if not wrong:
        return None
    order = {kind: place for place, kind in enumerate(KINDS)}
    first = min(order.get(each.kind, -1) for each in wrong)
    return max((d for d in wrong if order.get(d.kind, -1) == first), key=lambda d: d.excess)


# The last sentence of each message.
WITHOUT = "To train without this check, give prepare(model, verify=False) or --noverify."


def draws_in_words(operations: Sequence[str], line: str | None) -> str:
    """Returns the message for a step that draws numbers that replicas cannot draw alike.

    Args:
        operations: the names of the operations that draw.
        line: the line of the user's program that draws first, or None.
    """
    place = f", in {line}" if line else ""
    return (
        f"verify: the step draws random numbers by TensorFlow's own generators "
        f"({', '.join(operations)}){place}, which give other numbers on each replica than on one "
        "device. Draw by keras.random, with a keras.random.SeedGenerator as an attribute. "
        f"{WITHOUT}"
    )


def in_words(found: Difference, *, replicas: int, steps: int, unknown: str | None = None) -> str:
    """Returns the message for a difference: what differs, by how much, where, and what to do.

    Args:
        found: the difference.
        replicas: the number of replicas.
        steps: the number of steps that were compared.
        unknown: an operation of the step whose result may depend on the rows in any way, or None.
    """
    after = f"step {steps}" if steps == 1 else f"{steps} steps"
    place = f", in {found.line}" if found.line else ""
    size = "" if found.ratio is None else f" ({found.ratio:.4g} times as much)"
    return (
        f"verify: after {after} on {replicas} replicas {_subject(found)} differs from one device: "
        f"{found.here:.7g} where one device has {found.there:.7g}{size}; the difference is "
        f"{found.difference:.2g}, and rounding explains {found.limit:.2g}{place}. "
        f"{_unknown_in_words(unknown) if unknown else ''}{_advice(found, replicas)} {WITHOUT}"
    )


def _unknown_in_words(unknown: str) -> str:
    """Returns what the user can do about an operation whose use of the rows is not known."""
    if row_labels.is_of_loop(unknown):
        return (
            f"The cause may be {unknown}. In a loop on tensors replicas cannot exchange values, "
            "such as the gradient of an inner step (MAML). Write the loop in Python, as "
            "'for _ in range(n)'. "
        )
    return f"The cause may be {unknown}: it is not known how its result depends on the rows. "


def _subject(found: Difference) -> str:
    """Returns the name of a quantity for a message."""
    words = {
        "layer": "the output of the layer {}",
        "loss": "the loss {}",
        "gradient": "the gradient of {}",
        "weight": "the weight {}",
        "update": "the update of {}",
        "slot": "the optimizer's variable {}",
        "state": "the variable {}",
        "metric": "the metric's variable {}",
        "log": "the log {}",
        "seed": "the state of the random generator {}",
    }
    return words[found.kind].format(repr(found.name))


def _advice(found: Difference, replicas: int) -> str:
    """Returns what the user can do about a difference."""
    times = found.scale
    if times is not None and found.kind in ("gradient", "slot", "weight", "loss"):
        if abs(times - replicas) < 0.1 * replicas:
            return (
                f"It is about {replicas} times as large, which is the number of replicas: the "
                "loss or its gradient counts once for each. Take the mean over the rows of the "
                "batch, or let self.compute_loss(...) reduce the loss."
            )
        if abs(times * replicas - 1) < 0.1:
            return (
                f"It is about 1/{replicas} of one device's, which has as many parts as there are "
                "replicas: the loss looks like a sum over rows, or is divided by the replicas. "
                "Take the mean over the rows of the batch, and do not divide by "
                "num_replicas_in_sync."
            )
    advice = {
        "layer": "What it gives for a row seems to depend on the other rows of the batch, of "
        "which a replica has its own only. Compare rows in the loss function instead, which gets "
        "the rows of all replicas, or gather them by "
        "tf.distribute.get_replica_context().all_gather(x, axis=0).",
        "state": "Each replica changes it by its own rows only. Change it by a mean over the "
        "rows, or gather them first by "
        "tf.distribute.get_replica_context().all_gather(x, axis=0).",
        "metric": "The replicas' states are added up, so a metric's state must be a sum over "
        "rows, and update_state must add to it what belongs to the rows that it gets.",
        "update": "All layers, losses and gradients before it are the same, so look at what the "
        "step makes of the gradients: a variable that the train_step itself changes must get the "
        "mean over the rows of the batch. If only Keras' optimizers change it, report this.",
        "log": "Return results of metrics, or means over the rows of the batch.",
        "seed": "Draw as often on each replica as on one device, by keras.random.",
    }
    return advice.get(
        found.kind,
        "The loss must be a mean over the rows of the batch, and what depends on several rows "
        "together belongs into a loss function.",
    )

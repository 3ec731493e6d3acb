"""Tells whether two runs of the same step gave the same numbers, and how they differ.

Two correct runs differ by rounding. How much a number may differ by rounding is measured. The run
on one device is repeated with perturbed weights and gradients: each weight is changed by
`PERTURBED_BY` units in its last place. A change of one unit would often have no effect, because the
result is rounded itself. The limit of a number is then the largest of

    times_sensitivity(unit) * the effect of the perturbation / PERTURBED_BY
    OF_UPDATES * the largest change by the step (for logs: OF_RESULTS * the largest value)
    LAST_PLACES * one unit in the last place of the largest value

A difference above the limit is not explained by rounding.

A model may compute with fewer digits than its weights have, as in bfloat16. Then `unit` is the last
of these digits, relative to 1. Each weight is changed by one such unit, so the first line has 1 for
`PERTURBED_BY`. The factor of the second line is at least `times_sensitivity(unit) * unit`.
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
# The same for a model that computes with fewer digits. Sums over rows are added with more digits
# than that, so their order matters less. On three replicas, all but one of 120 correct programs in
# bfloat16 differed by at most 1.0 times the change by one unit. In that one, rounding turned the
# sign of a gradient, which did not happen with other weights.
TIMES_SENSITIVITY_OF_FEW_DIGITS = 4
# Each weight is changed by this many units in its last place if the model computes with all digits.
PERTURBED_BY = 8
# Relative to the largest gradient, gradients are changed by this many times as much as weights. A
# gradient is a sum over rows and positions, and the terms may be larger than all gradients.
GRADIENTS_PERTURBED_BY = 8
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
        on_replicas: the replicas' value of the element that differs most.
        on_one_device: one device's value of that element.
        ratio: the replicas' change divided by one device's change, if that is one number for all
            elements.
        scale: the factor between the two changes as a whole, if they have about the same direction.
        line: the line of the user's program that computes the quantity, if it is known.
    """

    kind: str
    name: str
    difference: float
    limit: float
    on_replicas: float
    on_one_device: float
    ratio: float | None = None
    scale: float | None = None
    line: str | None = None

    @property
    def excess(self) -> float:
        """The difference divided by its limit; above 1 rounding does not explain it."""
        if self.difference == 0:
            return 0.0
        return self.difference / self.limit if self.limit else float("inf")


class Quantity(NamedTuple):
    """What is compared: one of the kinds of `Difference.kind`, and its name."""

    kind: str
    name: str


def compare(
    quantity: Quantity,
    on_replicas: np.ndarray,
    on_one_device: np.ndarray,
    perturbed: np.ndarray,
    before: np.ndarray | None = None,
    unit: float = 0.0,
) -> Difference:
    """Returns how far the replicas' value is from that of one device.

    Args:
        quantity: what is compared.
        on_replicas: the replicas' value.
        on_one_device: the value of one device.
        perturbed: the value of one device with perturbed weights and gradients.
        before: the value before the step, if the step changes it. The limit and the factors are
            then relative to the change.
        unit: the last digit with which the model computes, if it has fewer digits than the value;
            otherwise 0.
    """
    kind, name = quantity
    if on_replicas.shape != on_one_device.shape:
        sizes = float(on_replicas.size), float(on_one_device.size)
        return Difference(kind, name, float("inf"), 0.0, *sizes)
    digits = last_place(on_one_device.dtype)
    replicas, device = _widened(on_replicas), _widened(on_one_device)
    distances = _distances(replicas, device)
    effect = float(_distances(_widened(perturbed), device).max(initial=0))
    times = times_sensitivity(unit)
    limit = times * effect / (1 if unit else PERTURBED_BY)
    start = 0 if before is None else _widened(before)
    change = device - start
    if digits:
        relative = max(OF_RESULTS if before is None else OF_UPDATES, times * unit)
        limit = max(limit, relative * _largest(change), LAST_PLACES * digits * _largest(device))
    if not distances.size:
        return Difference(kind, name, 0.0, limit, 0.0, 0.0)
    element = int(distances.argmax())
    distance, replicas_value, device_value = (
        float(array.flat[element]) for array in (distances, replicas, device)
    )
    difference = Difference(kind, name, distance, limit, replicas_value, device_value)
    if difference.excess <= 1:
        return difference
    replicas_change = replicas - start
    return replace(
        difference,
        ratio=ratio_of(replicas_change, change),
        scale=scale_of(replicas_change, change),
    )


def times_sensitivity(unit: float) -> int:
    """Returns how many times the effect of one unit in the last place a difference may be.

    Args:
        unit: the last digit with which the model computes, as for `compare`.
    """
    return TIMES_SENSITIVITY_OF_FEW_DIGITS if unit else TIMES_SENSITIVITY


def last_place(dtype: np.dtype) -> float:
    """Returns one unit in the last place of the number 1, or 0 for whole numbers."""
    if dtype.kind in "fc":
        return float(np.finfo(dtype).eps)
    return 2.0**-7 if dtype.name == "bfloat16" else 0.0


def _widened(value: np.ndarray) -> np.ndarray:
    """Returns a value in the dtype in which it is compared."""
    if value.dtype.kind in "SUO":
        raise TypeError("text has no rounding")
    # A difference of two float32 numbers is as exact as the numbers are.
    if value.dtype == np.float32 and value.size > MANY:
        return value
    return _in_64_bits(value)


def _in_64_bits(value: np.ndarray) -> np.ndarray:
    """Returns a value in float64, or in complex128."""
    return np.asarray(value, np.complex128 if value.dtype.kind == "c" else np.float64)


def _distances(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Returns the absolute differences of the elements, where NaN is equal to NaN."""
    with np.errstate(invalid="ignore"):
        distances = np.abs(left - right)
        if np.isfinite(distances.sum()):
            return np.asarray(distances)
    are_equal = (left == right) | (np.isnan(left) & np.isnan(right))
    return np.where(are_equal, 0.0, np.where(np.isnan(distances), np.inf, distances))


def _largest(values: np.ndarray) -> float:
    """Returns the largest size of the finite elements."""
    largest = float(np.abs(values).max(initial=0))
    if np.isfinite(largest):
        return largest
    return float(np.abs(values[np.isfinite(values)]).max(initial=0))


def ratio_of(left: np.ndarray, right: np.ndarray) -> float | None:
    """Returns `left / right` if that is one number for all elements, or None.

    Elements of `right` that are small beside the largest one do not count.

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


def perturbed(value: np.ndarray, rng: np.random.Generator, unit: float) -> np.ndarray:
    """Returns weights, each made larger or smaller by `relative_perturbation`."""
    signs = rng.choice([-1.0, 1.0], size=value.shape)
    factors = 1 + signs * relative_perturbation(value.dtype, unit)
    return np.asarray(_in_64_bits(value) * factors).astype(value.dtype)


def relative_perturbation(dtype: np.dtype, unit: float) -> float:
    """Returns the perturbation of a number relative to the number.

    Args:
        dtype: the dtype of the number.
        unit: the last digit with which the model computes, if it has fewer digits than its weights;
            otherwise 0. The perturbation is one such unit, or `PERTURBED_BY` units of the dtype.
    """
    return unit or PERTURBED_BY * last_place(dtype)


def first_of(differences: Sequence[Difference]) -> Difference | None:
    """Returns the difference to report, or None if rounding explains all.

    It is the one with the largest excess among those of the kind that is first in `KINDS`.
    """
    order = {kind: position for position, kind in enumerate(KINDS)}
    return max(
        (difference for difference in differences if difference.excess > 1),
        key=lambda difference: (-order.get(difference.kind, -1), difference.excess),
        default=None,
    )


# What `in_words` gets as `unknown` for a step of several replicas in eager mode.
EAGER_MODE = "eager mode"
# The last sentence of each message.
WITHOUT = "To train without this check, give prepare(model, verify=False) or --noverify."


def draws_in_words(operations: Sequence[str], line: str | None) -> str:
    """Returns the message for a step that draws numbers that replicas cannot draw alike."""
    place = f", in {line}" if line else ""
    return (
        f"verify: the step draws random numbers by TensorFlow's own generators "
        f"({', '.join(operations)}){place}, which give other numbers on each replica than on one "
        "device. Draw by keras.random, with a keras.random.SeedGenerator as an attribute. "
        f"{WITHOUT}"
    )


def in_words(
    difference: Difference, *, replicas: int, steps: int, unknown: str | None = None
) -> str:
    """Returns the message for a difference: what differs, by how much, where, and what to do.

    Args:
        difference: the difference.
        replicas: the number of replicas.
        steps: the number of steps that were compared.
        unknown: an operation of the step whose result may depend on the rows in any way, or
            `EAGER_MODE`, or None.
    """
    after = f"step {steps}" if steps == 1 else f"{steps} steps"
    place = f", in {difference.line}" if difference.line else ""
    # Of a variable the changes are compared.
    is_change = difference.kind in ("weight", "slot", "state", "metric")
    words = " (the change is {:.4g} times as large)" if is_change else " ({:.4g} times as much)"
    size = "" if difference.ratio is None else words.format(difference.ratio)
    return (
        f"verify: after {after} on {replicas} replica{'s' if replicas > 1 else ''} "
        f"{_subject(difference)} differs from one "
        f"device: {difference.on_replicas:.7g} where one device has "
        f"{difference.on_one_device:.7g}{size}; the difference is "
        f"{difference.difference:.2g}, and rounding explains {difference.limit:.2g}{place}. "
        f"{_unknown_in_words(unknown) if unknown else ''}"
        f"{_advice(difference, replicas)} {WITHOUT}"
    )


def _unknown_in_words(unknown: str) -> str:
    """Returns what the user can do about an operation whose use of the rows is not known."""
    if unknown == EAGER_MODE:
        return (
            "In eager mode there is no graph to read, so each replica computes the values of your "
            "own code from its own rows. Leave run_eagerly=True out. "
        )
    if row_labels.is_of_loop(unknown):
        return (
            f"The cause may be {unknown}. In a loop on tensors replicas cannot exchange values, "
            "such as the gradient of an inner step (MAML). Write the loop in Python, as "
            "'for _ in range(n)'. "
        )
    return f"The cause may be {unknown}: it is not known how its result depends on the rows. "


def _subject(difference: Difference) -> str:
    """Returns the name of a quantity for a message."""
    phrases = {
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
    return phrases[difference.kind].format(repr(difference.name))


def _advice(difference: Difference, replicas: int) -> str:
    """Returns what the user can do about a difference."""
    if replicas == 1:
        return (
            "Each pass of a step (--microbatches) computes it from its own rows. Leave "
            "--microbatches out. If there is only one pass, report this."
        )
    scale = difference.scale
    if scale is not None and difference.kind in ("gradient", "slot", "weight", "loss"):
        if abs(scale - replicas) < 0.1 * replicas:
            return (
                f"It is about {replicas} times as large, which is the number of replicas: the "
                "loss or its gradient counts once for each. Take the mean over the rows of the "
                "batch, or let self.compute_loss(...) reduce the loss."
            )
        if abs(scale * replicas - 1) < 0.1:
            return (
                f"It is about 1/{replicas} of one device's value, and there are {replicas} "
                "replicas: the loss looks like a sum over rows, or is divided by the replicas. "
                "Take the mean over the rows of the batch."
            )
    advice = {
        "layer": "What it gives for a row seems to depend on the other rows of the batch, of "
        "which a replica has its own only. Compare rows in the loss function instead, which gets "
        "the rows of all replicas.",
        "state": "Each replica, and each pass of --microbatches, changes it by its own rows only. "
        "Change it by a mean over the rows. If it counts the steps, leave --microbatches out.",
        "metric": "The replicas' states are added up, so a metric's state must be a sum over "
        "rows, and update_state must add to it what belongs to the rows that it gets.",
        "update": "All layers, losses and gradients before it are the same, so look at what the "
        "step makes of the gradients: a variable that the train_step itself changes must get the "
        "mean over the rows of the batch. If only Keras' optimizers change it, report this.",
        "log": "Return results of metrics, or means over the rows of the batch.",
        "seed": "Draw as often on each replica as on one device, by keras.random.",
    }
    return advice.get(
        difference.kind,
        "The loss must be a mean over the rows of the batch, and what depends on several rows "
        "together belongs into a loss function.",
    )

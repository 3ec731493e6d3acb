"""Tests that losses and metrics of Keras that are taken to compute row by row do so for all shapes.

TensorFlow broadcasts targets and predictions with unusual shapes to values for all pairs of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.losses import loss as loss_module

from tfmulti.keras_patches.losses import computes_by_rows

pytestmark = pytest.mark.mirrored

# No part of the rows has the size of another axis, which Keras could mistake for it.
ROWS, PART = 13, 6
SHAPES: tuple[tuple[int, ...], ...] = (
    *((), (1,), (3,), (1, 1), (3, 1), (1, 3), (2, 3), (2, 1)),
    *((2, 1, 1), (2, 3, 1), (1, 1, 3)),
)
RNG = np.random.default_rng(0)


class Case(NamedTuple):
    """A loss or metric of Keras.

    Attributes:
        part: the loss or the metric.
        function: the function of targets and predictions that it calls.
        values: returns the values of targets and predictions before their mean is taken.
        given: returns targets and predictions as the function gets them.
    """

    part: Any
    function: Any
    values: Callable[[Any, Any], Any]
    given: Callable[[Any, Any], Any]


def cases() -> Iterator[Case]:
    """Yields the losses with a value for each row, and the metrics that average such values."""
    wrapper = keras.metrics.MeanMetricWrapper
    for made in map(vars(keras.losses).get, sorted(vars(keras.losses))):
        # The targets of CTC are sequences of labels.
        is_loss = isinstance(made, type) and made not in (keras.losses.Loss, keras.losses.CTC)
        if is_loss:
            loss = made(reduction=None)
            function = getattr(loss, "fn", made)
            yield Case(loss, function, loss, loss_module.squeeze_or_expand_to_same_rank)
    for made in map(vars(keras.metrics).get, sorted(vars(keras.metrics))):
        if isinstance(made, type) and issubclass(made, wrapper) and made is not wrapper:
            metric = made()

            def values(y_true: Any, y_pred: Any, metric: Any = metric) -> Any:
                return metric._fn(y_true, y_pred, **metric._fn_kwargs)

            yield Case(metric, metric._fn, values, lambda *given: given)


def targets_and_predictions() -> Iterator[tuple[tf.Tensor, tf.Tensor]]:
    """Yields targets of numbers and of classes, and predictions, in each pair of shapes."""
    for true, pred, are_classes in product(SHAPES, SHAPES, (False, True)):
        predictions = tf.constant(RNG.uniform(0.1, 0.9, (ROWS, *pred)), tf.float32)
        numbers = RNG.uniform(0, 1, (ROWS, *true)).astype("float32")
        classes = RNG.integers(0, 2, (ROWS, *true)).astype("int32")
        yield tf.constant(classes if are_classes else numbers), predictions


def is_by_rows(case: Case, y_true: tf.Tensor, y_pred: tf.Tensor, whole: np.ndarray) -> bool:
    """Returns whether two parts of the rows give the same values as all rows together."""
    slices = (slice(PART), slice(PART, None))
    try:
        parts = [np.asarray(case.values(y_true[rows], y_pred[rows])) for rows in slices]
        joined = np.concatenate(parts)
    except (ValueError, tf.errors.InvalidArgumentError):
        return False
    return joined.shape == whole.shape and np.allclose(joined, whole, atol=1e-5, equal_nan=True)


@pytest.mark.filterwarnings("ignore:In loss categorical_crossentropy")
def test_losses_that_are_taken_to_compute_row_by_row_do_so() -> None:
    wrong: list[str] = []
    trusted: dict[Any, int] = {}
    for case in cases():
        name = type(case.part).__name__
        for y_true, y_pred in targets_and_predictions():
            try:
                whole = np.asarray(case.values(y_true, y_pred))
            except (ValueError, IndexError, TypeError, tf.errors.InvalidArgumentError):
                # Keras refuses these shapes.
                continue
            # A loss of one number is never taken to have values of rows.
            given = case.given(y_true, y_pred)
            if whole.ndim and computes_by_rows(case.part, case.function, *given):
                trusted[case.part] = trusted.get(case.part, 0) + 1
                if not is_by_rows(case, y_true, y_pred, whole):
                    wrong.append(f"{name} {y_true.shape} {y_pred.shape}")
    assert not wrong
    # The check trusts many cases, but no loss that compares a row with the other rows.
    names = [type(part).__name__ for part in trusted]
    assert len(names) > 30
    assert sum(trusted.values()) > 1500
    assert not {"Circle", "Hinge", "SquaredHinge", "Dice", "Tversky"} & set(names)

"""Tests that each layer of Keras that is taken to compute row by row does so for unusual inputs.

Keras accepts inputs with fewer axes than a layer is made for, and then takes the rows for entries.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import product
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tfmulti.keras_patches.layers import _works_by_rows

pytestmark = pytest.mark.mirrored

# No part of the rows has the size of another axis, which Keras could mistake for it.
ROWS, PART = 13, 6
RNG = np.random.default_rng(0)


def numbers(*shape: int) -> np.ndarray:
    return RNG.uniform(0.1, 1.0, (ROWS, *shape)).astype("float32")


def classes(*shape: int) -> np.ndarray:
    return RNG.integers(0, 4, (ROWS, *shape)).astype("int32")


def texts(*shape: int) -> np.ndarray:
    return RNG.choice(["a", "b a b", "a b"], (ROWS, *shape))


def mask(*shape: int) -> np.ndarray:
    return RNG.random((ROWS, *shape)) > 0.3


class Case(NamedTuple):
    """A call of a layer of Keras.

    Attributes:
        make: makes the layer.
        inputs: a nest of arrays with the rows along axis 0.
        mask: the argument `mask` or `attention_mask`, or None.
    """

    make: Callable[[], Any]
    inputs: Any
    mask: np.ndarray | None


def cases() -> dict[str, Case]:
    """Returns the cases by a description."""
    found: dict[str, Case] = {}

    def add(name: str, inputs: Any, *given: Any, seen: Any = None, **options: Any) -> None:
        make = functools.partial(getattr(layers, name), *given, **options)
        form = "x".join(map(str, (*given, *options.values())))
        shapes = [value.shape[1:] for value in keras.tree.flatten(inputs)]
        description = f"{name} {form} {shapes} {'' if seen is None else seen.shape}"
        found[f"{len(found)} {description}"] = Case(make, inputs, seen)

    for mode, shape in product(("one_hot", "multi_hot", "count"), ((), (1,), (3,))):
        add("CategoryEncoding", classes(*shape), 4, output_mode=mode)
        add("Hashing", classes(*shape), 4, output_mode=mode)
        add("IntegerLookup", classes(*shape), vocabulary=[0, 1, 2, 3], output_mode=mode)
        add("StringLookup", texts(*shape), vocabulary=["a", "b"], output_mode=mode)
        add("Discretization", numbers(*shape), [0.2, 0.7], output_mode=mode)
    for mode, length in (("int", None), ("int", 2), ("multi_hot", None), ("count", None)):
        options = {"output_mode": mode, "output_sequence_length": length}
        add("TextVectorization", texts(), vocabulary=["a", "b"], **options)
    for name in ("Add", "Average", "Maximum", "Multiply", "Subtract"):
        for one, other in product(((4,), (1, 4), (3, 4), (1,), (4, 1), (3, 1)), repeat=2):
            add(name, [numbers(*one), numbers(*other)])
    for axes, normalize in product((1, 2, (1, 2), (2, 1), -1), (False, True)):
        for one, other in (((4,), (4,)), ((3, 4), (3, 4)), ((3, 4), (4, 3)), ((4,), (3, 4))):
            add("Dot", [numbers(*one), numbers(*other)], axes, normalize=normalize)
    sequence = numbers(5, 4)
    for seen in (None, RNG.random((5, 5)) > 0.3, mask(1, 5), mask(5, 1), mask(5, 5), mask(2, 5, 5)):
        add("MultiHeadAttention", (sequence, sequence), 2, 2, seen=seen)
        add("GroupQueryAttention", (sequence, sequence), 2, 2, 1, seen=seen)
    for name in ("Attention", "AdditiveAttention"):
        for one, other in (((5, 4), (5, 4)), ((4,), (4,)), ((1, 4), (5, 4)), ((4,), (5, 4))):
            add(name, [numbers(*one), numbers(*other)])
    for name, seen in product(("LSTM", "GRU", "SimpleRNN"), (None, mask(5))):
        add(name, sequence, 3, seen=seen)
        add(name, sequence, 3, seen=seen, return_sequences=True, go_backwards=True)
        add(name, sequence, 3, seen=seen, unroll=True)
    for axis, shape in product((-1, 1, 0, -2, -3), ((), (4,), (3, 4))):
        for name in ("LayerNormalization", "RMSNormalization", "UnitNormalization", "Softmax"):
            add(name, numbers(*shape), axis=axis)
    for shape in ((), (4,), (3, 4)):
        for function in ("softmax", "log_softmax", "sparsemax", "glu"):
            add("Activation", numbers(*shape), function)
        add("Flatten", numbers(*shape))
        add("Dense", numbers(*shape), 3, "softmax")
        add("Embedding", classes(*shape), 5, 3)
    add("EinsumDense", numbers(3, 4), "abc,cd->abd", (None, 2))
    add("EinsumDense", numbers(3, 4), "abc,ad->bcd", (4, 2))
    return found


def rows_of(values: Any, rows: slice) -> Any:
    """Returns some rows of a nest of arrays as tensors; an array without rows stays as it is."""

    def cut(value: Any) -> Any:
        has_rows = isinstance(value, np.ndarray) and len(value) == ROWS
        return value if value is None else tf.constant(value[rows] if has_rows else value)

    return keras.tree.map_structure(cut, values)


def computed(case: Case, layer: Any, rows: slice) -> list[np.ndarray]:
    """Returns the outputs of a layer for some rows."""
    inputs = rows_of(case.inputs, rows)
    options = {}
    if case.mask is not None:
        is_attention = isinstance(case.inputs, tuple)
        options["attention_mask" if is_attention else "mask"] = rows_of(case.mask, rows)
    outputs = layer(*(inputs if isinstance(inputs, tuple) else (inputs,)), **options)
    return [np.asarray(output) for output in tf.nest.flatten(outputs)]


def is_by_rows(case: Case, layer: Any) -> bool:
    """Returns whether two parts of the rows give the same outputs as all rows together."""
    whole = computed(case, layer, slice(None))
    try:
        parts = [computed(case, layer, rows) for rows in (slice(PART), slice(PART, None))]
        joined = [np.concatenate(outputs) for outputs in zip(*parts, strict=True)]
    except (ValueError, tf.errors.InvalidArgumentError):
        return False
    return all(
        one.shape == other.shape and np.allclose(one, other, atol=1e-5)
        for one, other in zip(joined, whole, strict=True)
    )


def test_layers_that_are_taken_to_compute_row_by_row_do_so() -> None:
    wrong, found = [], []
    for name, case in cases().items():
        layer = case.make()
        try:
            computed(case, layer, slice(None))
        except (ValueError, IndexError, tf.errors.InvalidArgumentError):
            # Keras refuses these inputs.
            continue
        is_trusted = _works_by_rows(layer, (rows_of(case.inputs, slice(None)),))
        found.append(is_trusted)
        if is_trusted and not is_by_rows(case, layer):
            wrong.append(name)
    assert not wrong
    assert found.count(True) > 250
    assert found.count(False) > 20

"""Tests that a step compiled by XLA draws the numbers of TensorFlow's own kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tfmulti.distribution import randomness
from tfmulti.distribution.replica_slice import ReplicaSlice, compiling

pytestmark = pytest.mark.mirrored

ROWS, ALL_ROWS = 7, 50


def at(first_row: Any) -> ReplicaSlice:
    """Returns a slice of 7 rows of 50."""
    weight = tf.constant(ROWS / ALL_ROWS, tf.float64)
    counts = (tf.constant(ROWS, tf.int64), first_row, tf.constant(ALL_ROWS, tf.int64))
    return ReplicaSlice(weight, *counts, ROWS, False, False)


DRAWS: dict[str, Callable[..., Any]] = {
    "uniform": lambda part, seed, dtype: randomness.uniform(part, seed, (ROWS, 3), -1, 2, dtype),
    "normal": lambda part, seed, dtype: randomness.normal(part, seed, (ROWS, 3), 0, 1, dtype),
    "dropout": lambda part, seed, dtype: randomness.dropout(
        None, part, seed, tf.ones((ROWS, 3), dtype), 0.3, None
    ),
}


@pytest.mark.parametrize("first_row", [0, 1, 2, 13])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", DRAWS)
def test_xla_draws_what_the_kernels_draw(name: str, dtype: str, first_row: int) -> None:
    seed, row = tf.Variable([3, first_row + 11]), tf.Variable(first_row, dtype=tf.int64)

    def draw() -> Any:
        return DRAWS[name](at(row.read_value()), seed.read_value(), tf.as_dtype(dtype))

    def for_xla() -> Any:
        with compiling([]):
            return draw()

    by_kernels = tf.cast(tf.function(draw, autograph=False)(), tf.float64)
    by_xla = tf.cast(tf.function(for_xla, jit_compile=True, autograph=False)(), tf.float64)
    rounding = 0.0
    if name == "normal":
        # XLA rounds logarithm and sine otherwise.
        rounding = {"float32": 3e-6, "bfloat16": 2e-2, "float16": 2e-3}[dtype]
    elif name == "uniform":
        # Where the processor can, XLA rounds a product and a sum once: float32 everywhere, float16
        # with AVX512-FP16. The difference is at most one unit in the last place of 2.
        rounding = {"float32": 2.4e-7, "bfloat16": 0.0, "float16": 2.0e-3}[dtype]
    np.testing.assert_allclose(by_xla, by_kernels, rtol=0, atol=rounding)
    assert np.unique(by_kernels).size > 1


@pytest.mark.parametrize("dtype", ["int32", "int64", "uint8"])
def test_xla_draws_the_same_whole_numbers(dtype: str) -> None:
    seed, row = tf.Variable([3, 11]), tf.Variable(5, dtype=tf.int64)

    def draw() -> Any:
        part = at(row.read_value())
        return randomness.randint(part, seed.read_value(), (ROWS, 3), 0, 200, dtype)

    def for_xla() -> Any:
        with compiling([]):
            return draw()

    by_kernels = tf.function(draw, autograph=False)()
    by_xla = tf.function(for_xla, jit_compile=True, autograph=False)()
    np.testing.assert_array_equal(by_xla, by_kernels)


def test_xla_refuses_numbers_of_another_type() -> None:
    obstacles: list[str] = []
    with compiling(obstacles), pytest.raises(Exception, match="float64"):
        DRAWS["uniform"](at(tf.constant(0, tf.int64)), tf.constant([1, 2]), tf.float64)
    assert obstacles == ["draws float64 numbers, and XLA would draw other ones"]

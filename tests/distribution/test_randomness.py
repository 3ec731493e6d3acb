"""Tests the random numbers of rows: on each replica, and where XLA compiles a step."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmulti.distribution import randomness, row_labels
from tfmulti.distribution.replica_slice import ReplicaSlice, compiling

pytestmark = pytest.mark.mirrored

ROWS, ALL_ROWS = 7, 50


def at(first_row: Any) -> ReplicaSlice:
    """Returns a slice of 7 rows of 50."""
    weight = tf.constant(ROWS / ALL_ROWS, tf.float64)
    counts = (tf.constant(ROWS, tf.int64), first_row, tf.constant(ALL_ROWS, tf.int64))
    return ReplicaSlice(weight, *counts, ROWS, False, False)


# Each takes a tensor with rows, and returns one of which some entries of axis 0 belong to each row.
SHAPED: dict[str, Callable[[Any], Any]] = {
    "rows": lambda x: x,
    "rows of a size that the counter divides": lambda x: tf.concat([x, x[:, :1]], 1),
    "several entries": lambda x: tf.reshape(tf.stack([x, x], 1), [-1, 3]),
    "flat": lambda x: tf.reshape(x, [-1]),
}
# Each has the arguments of a draw of Keras for a tensor.
DRAWN: dict[str, Callable[[Any], dict[str, Any]]] = {
    "uniform": lambda x: {"shape": tf.shape(x), "minval": -1, "maxval": 2, "dtype": "float32"},
    "normal": lambda x: {"shape": tf.shape(x), "mean": 0, "stddev": 1, "dtype": "float64"},
    "dropout": lambda x: {"inputs": x, "rate": 0.3, "noise_shape": None},
    "truncated_normal": lambda x: {
        "shape": tf.shape(x),
        "mean": 0.0,
        "stddev": 1.0,
        "dtype": "float32",
    },
}


def drawn(
    name: str,
    shaped: Callable[[Any], Any],
    first: int,
    count: int,
    *,
    in_parts: bool = False,
    columns: int | None = 3,
) -> np.ndarray:
    """Returns what a slice of some rows of 7 draws in a step, which knows so many columns."""
    original = getattr(keras.src.backend.tensorflow.random, name)
    draw = functools.partial(randomness.DRAWS[name], original)

    @tf.function(autograph=False)
    def step(x: Any, own: Any, row: Any) -> Any:
        row_labels.begin(x, [])
        weight = tf.cast(own, tf.float64) / ROWS
        part = ReplicaSlice(weight, own, row, tf.constant(ROWS, tf.int64), None, False, False)
        value = tf.concat([x[:, 0], shaped(x)[:, 0]], 0) if in_parts else shaped(x)
        return randomness.by_parts(draw, part, tf.constant([3, 4]), DRAWN[name](value))

    unknown = tf.TensorSpec([None, columns], tf.float32)
    number = tf.TensorSpec([], tf.int64)
    concrete = step.get_concrete_function(unknown, number, number)
    rows = tf.ones((count, 3))
    return np.asarray(concrete(rows, tf.constant(count, tf.int64), tf.constant(first, tf.int64)))


@pytest.mark.parametrize(("shape", "columns"), [*((s, 3) for s in SHAPED), ("flat", None)])
@pytest.mark.parametrize("name", DRAWN)
def test_each_replica_draws_its_rows_of_one_tensor(
    name: str, shape: str, columns: int | None
) -> None:
    slices = [(0, 3), (3, 3), (6, 1)]
    parts = [drawn(name, SHAPED[shape], *rows, columns=columns) for rows in slices]
    whole = drawn(name, SHAPED[shape], 0, ROWS, columns=columns)
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    assert np.unique(whole).size > 1


@pytest.mark.parametrize("name", DRAWN)
def test_concatenated_rows_draw_the_numbers_of_one_tensor(name: str) -> None:
    """The second part has two entries for each row, and the number of rows is odd."""
    shaped = SHAPED["several entries"]
    parts = [drawn(name, shaped, *rows, in_parts=True) for rows in [(0, 3), (3, 3), (6, 1)]]
    whole = drawn(name, shaped, 0, ROWS, in_parts=True)
    # The entries of the first part stand before those of the second one.
    sides = [[part[:k] for part, k in zip(parts, (3, 3, 1), strict=True)]]
    sides.append([part[k:] for part, k in zip(parts, (3, 3, 1), strict=True)])
    np.testing.assert_array_equal(np.concatenate([*sides[0], *sides[1]]), whole)
    # One device draws all of them at once.
    seed = randomness.Drawn(tf.constant([3, 4]))
    given = DRAWN[name](tf.ones(3 * ROWS))
    expected = getattr(keras.src.backend.tensorflow.random, name)(**given, seed=seed)
    np.testing.assert_array_equal(whole, expected)


SHAPES = [(ROWS, 3), (ROWS, 4), (ROWS,)]
DRAWS: dict[str, Callable[..., Any]] = {
    "uniform": lambda part, seed, shape, dtype: randomness.uniform(part, seed, shape, -1, 2, dtype),
    "normal": lambda part, seed, shape, dtype: randomness.normal(part, seed, shape, 0, 1, dtype),
    "dropout": lambda part, seed, shape, dtype: randomness.dropout(
        None, part, seed, tf.ones(shape, dtype), 0.3, None
    ),
}


@pytest.mark.parametrize(
    ("shape", "first_row"),
    [*itertools.product(SHAPES[:1], [0, 1, 2, 13]), *itertools.product(SHAPES[1:], [0, 13])],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", DRAWS)
def test_xla_draws_what_the_kernels_draw(
    name: str, dtype: str, shape: tuple[int, ...], first_row: int
) -> None:
    seed, row = tf.Variable([3, first_row + 11]), tf.Variable(first_row, dtype=tf.int64)

    def draw() -> Any:
        return DRAWS[name](at(row.read_value()), seed.read_value(), shape, tf.as_dtype(dtype))

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
        DRAWS["uniform"](at(tf.constant(0, tf.int64)), tf.constant([1, 2]), (ROWS, 3), tf.float64)
    assert obstacles == ["draws float64 numbers, and XLA would draw other ones"]

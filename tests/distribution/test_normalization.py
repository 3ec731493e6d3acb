"""Tests the gradient of BatchNormalization as one kernel: its use and its precision."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tfmulti.distribution import normalization
from tfmulti.distribution.replica_slice import ReplicaSlice, computing
from tfmulti.keras_patches import installation

pytestmark = pytest.mark.mirrored

KERNEL = "FusedBatchNormGradV3"
ROWS = 6


def whole(rows: int) -> ReplicaSlice:
    count = tf.constant(rows, tf.int64)
    return ReplicaSlice(tf.constant(1.0), count, tf.constant(0, tf.int64), count, rows, True, True)


def part(rows: int, *, counts: bool = True) -> ReplicaSlice:
    """Returns a slice that may be less than the whole batch, although there is no other replica."""
    none = tf.constant(0, tf.int64)
    return whole(rows)._replace(is_whole=False, own_rows=whole(rows).own_rows if counts else none)


def gradients_of(
    layer: Any, x: np.ndarray, upstream: np.ndarray, replica_slice: ReplicaSlice | None = None
) -> tuple[Any, set[str]]:
    """Returns the gradients in a slice (None: the whole batch), and the types of the operations."""
    installation.install()
    layer.build(x.shape)

    @tf.function
    def step(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(layer(x, training=True) * upstream)
        weights = [v.value for v in layer.trainable_variables]
        return tape.gradient(loss, [x, *weights])

    with computing(replica_slice or whole(len(x))):
        graph = step.get_concrete_function(tf.constant(x)).graph
        found = [g.numpy() for g in step(tf.constant(x))]
    return found, {operation.type for operation in graph.get_operations()}


def expected(x: np.ndarray, upstream: np.ndarray, epsilon: float) -> list[np.ndarray]:
    """Returns the gradients of Ioffe and Szegedy's formulas in 64 bits."""
    x, upstream = x.astype(np.float64), upstream.astype(np.float64)
    axes = tuple(range(x.ndim - 1))
    scale = 1 / np.sqrt(x.var(axes) + epsilon)
    normal = (x - x.mean(axes)) * scale
    by_beta, by_gamma = upstream.mean(axes), (upstream * normal).mean(axes)
    count = x.size // x.shape[-1]
    return [scale * (upstream - by_beta - normal * by_gamma), by_gamma * count, by_beta * count]


@pytest.mark.parametrize("shape", [(ROWS, 3), (ROWS, 5, 3), (ROWS, 4, 5, 3), (ROWS, 2, 4, 5, 3)])
def test_the_gradients_are_those_of_the_formulas(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    x = (2 + 3 * rng.standard_normal(shape)).astype(np.float32)
    upstream = rng.standard_normal(shape).astype(np.float32)
    found, kinds = gradients_of(keras.layers.BatchNormalization(), x, upstream)
    assert KERNEL in kinds
    for mine, true in zip(found, expected(x, upstream, 1e-3), strict=True):
        assert np.abs(mine - true).max() < 2e-6 * np.abs(true).max()


@pytest.mark.parametrize("counts", [True, False])
def test_a_replicas_own_statistics_also_use_the_kernel(counts: bool) -> None:
    """`sync_batch_norm` is off. A replica without rows learns nothing from the row it reads."""
    x = (2 + np.random.default_rng(0).standard_normal((ROWS, 4, 5, 3))).astype(np.float32)
    upstream = np.random.default_rng(1).standard_normal(x.shape).astype(np.float32)
    layer = keras.layers.BatchNormalization(momentum=0.5)
    replica_slice = part(ROWS, counts=counts)._replace(sync_batch_norm=False)
    found, kinds = gradients_of(layer, x, upstream, replica_slice)
    assert KERNEL in kinds
    for mine, true in zip(found, expected(x, upstream, 1e-3), strict=True):
        assert np.abs(mine - true).max() < 2e-6 * np.abs(true).max()
    moved = 0.5 * x.astype(np.float64).mean((0, 1, 2)) if counts else np.zeros(3)
    assert np.abs(layer.moving_mean.numpy() - moved).max() < 1e-6


@pytest.mark.parametrize(
    "options",
    [{"renorm": True}, {"axis": 1}, {"trainable": False}, {"dtype": "mixed_bfloat16"}],
)
def test_cases_that_the_kernel_does_not_support_stay_with_keras(options: dict[str, Any]) -> None:
    x = np.random.default_rng(0).standard_normal((ROWS, 4, 4, 4)).astype(np.float32)
    found, kinds = gradients_of(keras.layers.BatchNormalization(**options), x, x)
    assert KERNEL not in kinds
    assert np.isfinite(found[0]).all()


@pytest.mark.parametrize("options", [{"scale": False}, {"center": False}])
def test_without_scale_or_center(options: dict[str, Any]) -> None:
    x = np.random.default_rng(0).standard_normal((ROWS, 4, 4, 3)).astype(np.float32)
    upstream = np.random.default_rng(1).standard_normal(x.shape).astype(np.float32)
    found, kinds = gradients_of(keras.layers.BatchNormalization(**options), x, upstream)
    assert KERNEL in kinds
    true = expected(x, upstream, 1e-3)
    assert len(found) == 2
    assert np.abs(found[0] - true[0]).max() < 2e-6
    assert np.abs(found[1] - true[1 if "center" in options else 2]).max() < 2e-5


@pytest.mark.parametrize("make", [whole, part])
def test_a_second_derivative_is_that_of_keras(make: Any) -> None:
    """A gradient penalty differentiates the gradient, where Keras' variance has a constant mean."""
    x = tf.constant(np.random.default_rng(0).standard_normal((ROWS, 4, 4, 3)).astype(np.float32))
    layer = keras.layers.BatchNormalization()
    layer.build(x.shape)

    @tf.function
    def second(replica_slice: ReplicaSlice | None) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                loss = tf.reduce_sum(tf.sin(layer(x, training=True)))
            penalty = tf.reduce_sum(tf.square(inner.gradient(loss, x) - x))
        return outer.gradient(penalty, x)

    installation.install()
    plain = second.python_function(None)
    with computing(make(ROWS)):
        mine = second.python_function(None)
    assert np.abs(plain - mine).max() < 1e-5 * np.abs(plain).max()


def test_a_second_derivative_of_moments_is_that_of_tensorflow() -> None:
    x = tf.constant(np.random.default_rng(0).standard_normal((ROWS, 4, 3)).astype(np.float32))

    def second(moments: Any) -> Any:
        with tf.GradientTape() as outer:
            outer.watch(x)
            with tf.GradientTape() as inner:
                inner.watch(x)
                mean, variance = moments(x)
                loss = tf.reduce_sum(tf.sin((x - mean) * tf.math.rsqrt(variance + 1e-3)))
            penalty = tf.reduce_sum(tf.square(inner.gradient(loss, x) - x))
        return outer.gradient(penalty, x)

    plain = second(lambda x: tf.nn.moments(x, [0, 1]))
    mine = second(lambda x: normalization.global_moments(part(ROWS), x, None, [0, 1]))
    assert np.abs(plain - mine).max() < 1e-5 * np.abs(plain).max()


def test_a_batch_without_rows_changes_no_statistics() -> None:
    """A pass or a batch without rows reads a row that does not count."""
    installation.install()
    x = tf.constant(np.random.default_rng(0).standard_normal((1, 4, 4, 3)).astype(np.float32))
    layer = keras.layers.BatchNormalization(moving_mean_initializer="ones")
    layer.build(x.shape)
    with computing(part(1, counts=False)):
        layer(x, training=True)
    assert layer.moving_mean.numpy().tolist() == layer.moving_variance.numpy().tolist() == [1.0] * 3


@pytest.mark.parametrize("shape", [(0, 3), (0, 4, 4, 3)])
def test_a_part_without_rows_has_statistics_of_weight_zero(shape: tuple[int, ...]) -> None:
    """The model chooses an empty part of its rows, which is merged with other replicas' parts."""
    ones = tf.ones([3])
    y, count, mean, variance = normalization.normalized(part(2), tf.zeros(shape), ones, ones, 1e-3)
    assert y.shape == shape
    assert np.stack([count, mean, variance]).tolist() == [[0.0] * 3] * 3


@pytest.mark.parametrize(
    "channels", [3, normalization.SQUARED_BY_PRODUCT, normalization.SQUARED_BY_PRODUCT + 1]
)
@pytest.mark.parametrize("mean", [0.0, 1.0, 3.0, 1000.0])
def test_moments_of_images_lose_no_digits_to_a_large_mean(channels: int, mean: float) -> None:
    """With few channels squares are summed. A mean of 1000 deviations would lose all digits."""
    rng = np.random.default_rng(0)
    x = (mean + rng.standard_normal((8, 16, 16, channels))).astype(np.float32)
    found_mean, found = (part.numpy() for part in tf.function(normalization._moments)(x))
    true = x.astype(np.float64).var((0, 1, 2))
    assert np.abs(found / true - 1).max() < 2e-6
    assert np.abs(found_mean - x.astype(np.float64).mean((0, 1, 2))).max() < 1e-6 * max(mean, 1)


def kinds_of_kernels(make: Any) -> set[str]:
    """Returns the types of the operations that compute `make` of images, and its gradient.

    The types are those after TensorFlow's optimization. Only a session shows them.
    """
    metadata = tf.compat.v1.RunMetadata()
    options = tf.compat.v1.RunOptions(output_partition_graphs=True)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        given = tf.compat.v1.placeholder(tf.float32, [None, 8, 8, 16])
        filters = tf.ones([1, 1, 16, 16])
        loss = tf.reduce_sum(tf.square(make(tf.nn.conv2d(given, filters, 1, "VALID"))))
        found = [loss, tf.gradients(loss, given)[0]]
        session.run(found, {given: np.ones((4, 8, 8, 16))}, options, metadata)
    return {node.op for graph in metadata.partition_graphs for node in graph.node}


def test_a_relu_is_fused_into_the_kernel() -> None:
    """TensorFlow fuses it after a function with its own gradient, if one result of it is used."""
    ones = np.ones(16, np.float32)

    def plain(x: tf.Tensor) -> tf.Tensor:
        filters = tf.linalg.diag(tf.reduce_sum(x, [0, 1, 2]))[tf.newaxis, tf.newaxis]
        return tf.nn.relu(tf.nn.bias_add(tf.nn.conv2d(x, filters, 1, "VALID"), ones))

    def normalized(x: tf.Tensor) -> tf.Tensor:
        y, _, mean, _ = normalization.normalized(whole(4), x, ones, ones, 1e-3)
        return tf.nn.relu(y) + tf.reduce_sum(tf.stop_gradient(mean))

    if "Relu" in kinds_of_kernels(plain):
        pytest.skip("TensorFlow draws no rectifier into a convolution on this processor")
    assert "Relu" not in kinds_of_kernels(normalized)

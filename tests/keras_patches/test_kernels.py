"""Tests the faster kernels: Keras' outputs to the bit, and gradients as precise as Keras' own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.distribution.test_normalization import part, whole
from tests.support.forked import run
from tfmulti.distribution.replica_slice import ReplicaSlice, computing
from tfmulti.keras_patches import installation

pytestmark = pytest.mark.mirrored

# A function of the name of a floating-point type.
Make = Callable[[str], Any]


def attend(**options: Any) -> Make:
    return lambda dtype: lambda *inputs: keras.ops.dot_product_attention(*inputs, **options)


def of(kind: type[layers.Layer], *args: Any, **options: Any) -> Make:
    return lambda dtype: kind(*args, dtype=dtype, **options)


def mask(*shape: int) -> np.ndarray:
    """Returns a mask that hides all inputs from the first target."""
    seen = np.random.default_rng(1).random(shape) < 0.6
    seen[:, :, 0] = False
    return seen


TENSOR, HEADS = [(6, 5, 8)], [(3, 5, 2, 4), (3, 7, 2, 4), (3, 7, 2, 4)]
MANY_HEADS = [(3, 5, 4, 4), *HEADS[1:]]
Shapes = list[tuple[int, ...]]
KNOWN: dict[str, tuple[Make, Shapes]] = {
    "attention": (attend(), HEADS),
    "attention, scaled": (attend(scale=0.3), HEADS),
    "attention, masked": (attend(mask=mask(3, 1, 5, 7)), HEADS),
    "attention, causal": (attend(is_causal=True), HEADS),
    "attention, both": (attend(mask=mask(3, 2, 5, 7), is_causal=True), HEADS),
    "attention, grouped": (attend(), MANY_HEADS),
    "layer norm": (of(layers.LayerNormalization), TENSOR),
    "layer norm of rows": (of(layers.LayerNormalization, epsilon=0.1), [(6, 8)]),
    "layer norm of images": (of(layers.LayerNormalization, axis=3), [(6, 2, 3, 8)]),
    "layer norm, as it is": (of(layers.LayerNormalization, center=False, scale=False), TENSOR),
    "dense": (of(layers.Dense, 7), TENSOR),
    "dense, rectified": (of(layers.Dense, 7, "relu"), [(6, 5, 4, 8)]),
    "dense, softmax": (of(layers.Dense, 7, "softmax"), TENSOR),
    "dense, no bias": (of(layers.Dense, 7, "tanh", use_bias=False), TENSOR),
    "heads": (of(layers.EinsumDense, "abc,cde->abde", (None, 2, 4), bias_axes="de"), TENSOR),
    "of heads": (of(layers.EinsumDense, "abcd,cde->abe", (None, 6), "gelu"), HEADS[:1]),
    "any axes": (of(layers.EinsumDense, "...x,xy->...y", 3, bias_axes="y"), TENSOR),
}
LEFT: dict[str, tuple[Make, Shapes]] = {
    "attention, biased": (attend(bias=np.ones((1, 2, 5, 7))), HEADS),
    "layer norm of another axis": (of(layers.LayerNormalization, axis=1), TENSOR),
    "layer norm of two axes": (of(layers.LayerNormalization, axis=(1, 2)), TENSOR),
    "another equation": (of(layers.EinsumDense, "abc,bd->acd", (None, 4)), [(6, 8, 8)]),
    "another bias": (of(layers.EinsumDense, "abc,cd->abd", (5, 4), bias_axes="bd"), TENSOR),
    "dense of rows": (of(layers.Dense, 4, "relu"), [(6, 8)]),
}


def found(
    make: Make, shapes: Shapes, replica_slice: ReplicaSlice | None, dtype: str = "float32"
) -> Any:
    """Returns outputs, gradients, second derivatives, and the types of their operations.

    Without a replica slice they are Keras' own.
    """
    installation.install()
    rng = np.random.default_rng(0)
    inputs = [tf.constant((1.5 + rng.standard_normal(s)).astype(np.float32)) for s in shapes]
    inputs = [tf.cast(x, dtype) for x in inputs]
    function, weights = make(dtype), []
    if isinstance(function, keras.Layer):
        function.build(shapes[0])
        for v in function.trainable_variables:
            v.assign(rng.standard_normal(v.shape).astype(np.float32))
        weights = [v.value for v in function.trainable_variables]

    @tf.function
    def step(*inputs: tf.Tensor) -> Any:
        with tf.GradientTape() as second:
            second.watch(inputs)
            with tf.GradientTape() as tape:
                tape.watch(inputs)
                outputs = function(*inputs)
                loss = tf.reduce_sum(tf.sin(3.0 * outputs))
            gradients = tape.gradient(loss, [*inputs, *weights])
            penalty = tf.add_n([tf.reduce_sum(tf.square(g)) for g in gradients])
        return outputs, gradients, second.gradient(penalty, inputs)

    with computing(replica_slice) if replica_slice else nullcontext():
        graph = step.get_concrete_function(*inputs).graph
        return keras.tree.map_structure(np.asarray, step(*inputs)), sorted(
            operation.type for operation in graph.get_operations()
        )


@pytest.mark.parametrize("replica_slice", [whole(6), part(6)], ids=["whole", "part"])
@pytest.mark.parametrize("name", KNOWN)
def test_outputs_are_keras_own_and_gradients_those_of_64_bits(
    name: str, replica_slice: ReplicaSlice
) -> None:
    (outputs, *derivatives), kinds = found(*KNOWN[name], replica_slice)
    (keras_outputs, *keras_derivatives), keras_kinds = found(*KNOWN[name], None)
    (_, *expected), _ = found(*KNOWN[name], None, "float64")
    assert kinds != keras_kinds
    assert outputs.shape == keras_outputs.shape
    assert np.array_equal(outputs, keras_outputs)
    for order in (0, 1):
        for mine, theirs, true in zip(
            derivatives[order], keras_derivatives[order], expected[order], strict=True
        ):
            size = np.abs(true).max()
            error, of_keras = (np.abs(given - true).max() / size for given in (mine, theirs))
            assert error < 2 * of_keras + (5e-7, 2e-6)[order]


@pytest.mark.parametrize("name", LEFT)
def test_unknown_cases_are_left_to_keras(name: str) -> None:
    (outputs, *_), kinds = found(*LEFT[name], whole(6))
    (keras_outputs, *_), keras_kinds = found(*LEFT[name], None)
    assert kinds == keras_kinds
    assert np.array_equal(outputs, keras_outputs)


def test_other_types_are_left_to_keras() -> None:
    for name in ("attention", "layer norm", "dense", "heads"):
        kinds = [
            found(*KNOWN[name], replica_slice, "float64")[1] for replica_slice in (whole(6), None)
        ]
        assert kinds[0] == kinds[1]


def test_attention_without_einsum_takes_no_more_than_six_products() -> None:
    """They compute the output and the gradient. Keras takes six `Einsum`s."""
    query = tf.ones([2, 3, 1, 4])

    @tf.function
    def step(query: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(query)
            outputs = attend()("float32")(query, query, query)
        return tape.gradient(outputs, query)

    installation.install()
    with computing(whole(2)):
        graph = step.get_concrete_function(query).graph
    kinds = [operation.type for operation in graph.get_operations()]
    assert (kinds.count("BatchMatMulV2"), kinds.count("Einsum")) == (6, 0)


def test_softmax_leaves_its_logits_for_the_loss() -> None:
    """A loss of probabilities would take the logarithm of rounded numbers."""
    installation.install()
    layer = layers.Dense(2, "softmax", kernel_initializer="identity")
    with computing(whole(1)):
        probabilities = layer(tf.constant([[[200.0, 0.0], [0.0, 300.0]]]))
        loss = keras.losses.sparse_categorical_crossentropy(tf.constant([[1, 0]]), probabilities)
    # The largest loss by probabilities would be 16.1.
    assert np.array_equal(loss, [[200.0, 300.0]])


def test_keras_still_takes_einsum_for_attention() -> None:
    """The reason for `kernels.attention`. If this test fails, that function can be removed."""
    assert "Einsum" in found(*KNOWN["attention"], None)[1]


WITHOUT_KERNELS = """
import sys
import keras, numpy as np
import tfmulti

def trained(prepared):
    keras.utils.set_random_seed(1)
    layers = keras.layers
    model = keras.Sequential([
        keras.Input((8, 6)), layers.Dense(6), layers.LayerNormalization(),
        layers.Flatten(), layers.BatchNormalization(), layers.Dense(2),
    ])
    if prepared:
        tfmulti.prepare(model, seed=1)
    model.compile("adam", "mse")
    x = np.random.default_rng(0).normal(size=(12, 8, 6)).astype("float32")
    model.fit(x, x[:, 0, :2], batch_size=4, epochs=2, shuffle=False, verbose=0)
    return model.get_weights()

plain, prepared = trained(False), trained(True)
same = all(np.array_equal(a, b) for a, b in zip(plain, prepared, strict=True))
replaced = hasattr(keras.layers.LayerNormalization.call, "_tfmulti")
sys.exit(f"same={same} replaced={replaced}")
"""


@pytest.mark.parametrize(
    ("switch", "words"), [("0", "same=True replaced=False"), ("1", "same=False replaced=True")]
)
def test_the_environment_switches_the_kernels_off(tmp_path: Path, switch: str, words: str) -> None:
    """Without the kernels one device has Keras' numbers to the bit."""
    env = {"TFMULTI_CPU_KERNELS": switch}
    done = run(["-c", WITHOUT_KERNELS], tmp_path, limit_s=120, env=env)
    assert done.stderr.strip().splitlines()[-1] == words

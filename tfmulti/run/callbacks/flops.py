"""Counts the floating-point operations of training a model, and finds the peak of its devices.

TensorFlow's profiler counts the operations of the forward pass in its graph. The backward pass is
taken as twice the forward pass.
"""

from __future__ import annotations

import logging
import math
import random
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti.run.callbacks.peaks import peak_tflops

# For each matrix product of the forward pass, the backward pass has two: one for the gradient of
# the inputs and one for the gradient of the weights. Sources: Kaplan et al. 2020, "Scaling Laws for
# Neural Language Models", section 2.1; Chowdhery et al. 2022, "PaLM", appendix B.
BACKWARD_PER_FORWARD = 2

# The operations that call a `tf.function`.
_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})

# Operations whose matrix products the profiler does not count. With one of them the count would be
# too small.
_UNSEEN = frozenset(
    {
        *("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase"),
        *_CALLS,
        *("CudnnRNN", "CudnnRNNV2", "CudnnRNNV3"),
        *("Conv", "Conv3D", "SparseTensorDenseMatMul", "SparseMatMul", "XlaDotV2", "XlaConvV2"),
    }
)


def training_flops(model: keras.Model, inputs: Any) -> int | None:
    """Returns the floating-point operations of training on one example, or None if unknown.

    The number is that of the model's forward pass, and twice as many for the backward pass (see
    `BACKWARD_PER_FORWARD`). The loss, the optimizer and what `microbatches` computes again are not
    counted. The function traces the model, but runs and changes nothing.

    The number is unknown if the model is not built, or cannot be called because it has only a
    `train_step`. It is also unknown if the profiler cannot count an operation, as in a loop of a
    recurrent layer or a function of a SavedModel, or if the data does not fix all shapes.

    Args:
        model: the model.
        inputs: the form of the model's inputs, a nest of leaves with `shape` and `dtype`.
    """
    # Tracing a model that is not built would make its variables in the graph.
    if not model.built:
        return None
    random_states = random.getstate(), np.random.get_state()
    try:
        specs = tf.nest.map_structure(_of_one_example, inputs)
        forward = _count(_forward(model, specs))
    # The user's `call` may raise anything. Then the figure is left out.
    except Exception:
        return None
    # A `call` may draw random numbers in Python while it is traced. The first step must draw the
    # same ones.
    finally:
        random.setstate(random_states[0])
        np.random.set_state(random_states[1])
    return None if forward is None else forward * (1 + BACKWARD_PER_FORWARD)


def _forward(model: keras.Model, specs: Any) -> tf.Graph:
    """Returns the graph of a forward pass, in which the calls of `tf.function`s are expanded.

    The profiler does not count the operations of a called function. Keras 3.15 has such a function
    around a grouped convolution, for XLA.
    """
    graph = _traced(model, specs)
    if not any(operation.type in _CALLS for operation in graph.get_operations()):
        return graph
    before = tf.config.functions_run_eagerly()
    # This holds for all threads, so it is set for this trace only.
    tf.config.run_functions_eagerly(True)
    try:
        return _traced(model, specs)
    finally:
        tf.config.run_functions_eagerly(before)


def _traced(model: keras.Model, specs: Any) -> tf.Graph:
    """Returns the graph of a forward pass."""
    call = tf.function(lambda x: model(x, training=False), autograph=False)
    # Without the scope, losses and counters of layers would keep tensors of this graph.
    with keras.StatelessScope():
        return call.get_concrete_function(specs).graph


def _of_one_example(leaf: Any) -> tf.TensorSpec:
    """Returns the form of an input for one example, or raises ValueError if it is not fixed."""
    shape = tf.TensorShape([1, *leaf.shape[1:]])
    if not shape.is_fully_defined():
        raise ValueError("the number of operations depends on the data")
    return tf.TensorSpec(shape, leaf.dtype)


def _count(graph: tf.Graph) -> int | None:
    """Returns the floating-point operations of a graph, or None if it has uncounted ones."""
    operations = graph.get_operations()
    if any(operation.type in _UNSEEN for operation in operations):
        return None
    builder = tf.compat.v1.profiler.ProfileOptionBuilder
    options = builder(builder.float_operation()).with_empty_output().build()
    log = tf.get_logger()
    # The profiler logs a warning about a deprecated function that it calls itself.
    level, _ = log.level, log.setLevel(logging.ERROR)
    try:
        counted = tf.compat.v1.profiler.profile(graph, options=options).total_float_ops
    finally:
        log.setLevel(level)
    return int(counted) + sum(_einsum(o) for o in operations if o.type == "Einsum")


def _einsum(operation: Any) -> int:
    """Returns the operations of an einsum, which the profiler leaves out (TensorFlow 2.21)."""
    inputs = operation.get_attr("equation").decode().partition("->")[0].split(",")
    # With one input an einsum is a transposition, a diagonal or a sum, and has no product.
    if len(inputs) == 1:
        return 0
    sizes: dict[str, int] = {}
    for labels, tensor in zip(inputs, operation.inputs, strict=True):
        before, dots, after = labels.partition("...")
        shape = tensor.shape.as_list()
        sizes |= dict(zip(before, shape, strict=False))
        sizes |= dict(zip(after[::-1], shape[::-1], strict=False))
        middle = shape[len(before) : len(shape) - len(after)] if dots else []
        sizes |= {
            f"...{axis}": max(size, sizes.get(f"...{axis}", 1))
            for axis, size in enumerate(middle[::-1])
        }
    return 2 * math.prod(sizes.values())


def peak_of_devices(model: keras.Model, gpus: tuple[str, ...]) -> float | None:
    """Returns the peak TFLOP/s of one device of a model, or None if it is not known.

    It is not known for CPUs, for GPUs that are not in `peaks`, and for GPUs of several kinds.

    Args:
        model: the model, whose precision decides.
        gpus: the local devices of the model that are GPUs.
    """
    if not gpus:
        return None
    names = {
        tf.config.experimental.get_device_details(gpu).get("device_name", "")
        for gpu in tf.config.list_physical_devices("GPU")
    }
    if len(names) != 1:
        return None
    tf32 = tf.config.experimental.tensor_float_32_execution_enabled()
    return peak_tflops(names.pop(), model.dtype_policy.compute_dtype, tf32=tf32)

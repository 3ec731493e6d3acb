"""How many floating-point operations a model's training takes, and what its devices could do."""

from __future__ import annotations

import logging
import math
import random
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti.run.callbacks.peaks import peak_tflops

# The backward pass takes two products of matrices, for the gradients of inputs and of weights,
# where the forward pass takes one: Kaplan et al. 2020, "Scaling Laws for Neural Language Models",
# section 2.1; Chowdhery et al. 2022, "PaLM", appendix B.
BACKWARD_PER_FORWARD = 2

_CALLS = frozenset({"PartitionedCall", "StatefulPartitionedCall"})  # of a `tf.function`

# What holds products of matrices that the profiler does not see: a count would be too small.
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

    Those of the model's own forward pass, counted in its graph by TensorFlow's profiler, and
    twice as many for the backward pass (see `BACKWARD_PER_FORWARD`); the loss, the optimizer and
    what `microbatches` computes again are not counted. Unknown is what the profiler cannot count
    (loops such as a recurrent layer's, a SavedModel's functions, shapes that the data does not
    fix), a model that is not built, and one that cannot be called, with nothing but a
    `train_step`. Runs and changes nothing.

    Args:
        inputs: the form of the model's inputs, a nest of leaves with `shape` and `dtype`.
    """
    if not model.built:  # its variables would be made in the graph
        return None
    drawn = random.getstate(), np.random.get_state()
    try:
        specs = tf.nest.map_structure(_of_one_example, inputs)
        forward = _count(_forward(model, specs))
    except Exception:  # whatever a user's call does: the figure is left out
        return None
    finally:  # what a call draws by Python while it is traced, the first step draws again
        random.setstate(drawn[0])
        np.random.set_state(drawn[1])
    return None if forward is None else forward * (1 + BACKWARD_PER_FORWARD)


def _forward(model: keras.Model, specs: Any) -> tf.Graph:
    """Returns the graph of a forward pass, with what its `tf.function`s do in place of their calls.

    Keras 3.15 has one around a convolution in groups, for XLA; the profiler counts no call.
    """
    graph = _traced(model, specs)
    if not any(operation.type in _CALLS for operation in graph.get_operations()):
        return graph
    before = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)  # for all threads: no longer than this trace
    try:
        return _traced(model, specs)
    finally:
        tf.config.run_functions_eagerly(before)


def _traced(model: keras.Model, specs: Any) -> tf.Graph:
    call = tf.function(lambda x: model(x, training=False), autograph=False)
    with keras.StatelessScope():  # else losses and counters of layers would hold its tensors
        return call.get_concrete_function(specs).graph


def _of_one_example(leaf: Any) -> tf.TensorSpec:
    shape = tf.TensorShape([1, *leaf.shape[1:]])
    if not shape.is_fully_defined():
        raise ValueError("the number of operations depends on the data")
    return tf.TensorSpec(shape, leaf.dtype)


def _count(graph: tf.Graph) -> int | None:
    operations = graph.get_operations()
    if any(operation.type in _UNSEEN for operation in operations):
        return None
    builder = tf.compat.v1.profiler.ProfileOptionBuilder
    options = builder(builder.float_operation()).with_empty_output().build()
    log = tf.get_logger()
    level, _ = log.level, log.setLevel(logging.ERROR)  # it warns of a function of its own
    try:
        counted = tf.compat.v1.profiler.profile(graph, options=options).total_float_ops
    finally:
        log.setLevel(level)
    return int(counted) + sum(_einsum(o) for o in operations if o.type == "Einsum")


def _einsum(operation: Any) -> int:
    """Returns the operations of an einsum, which the profiler leaves out (TensorFlow 2.21)."""
    inputs = operation.get_attr("equation").decode().partition("->")[0].split(",")
    if len(inputs) == 1:  # a transposition, a diagonal or a sum: no product
        return 0
    sizes: dict[str, int] = {}
    for labels, tensor in zip(inputs, operation.inputs, strict=True):
        before, dots, after = labels.partition("...")
        shape = tensor.shape.as_list()
        sizes |= dict(zip(before, shape, strict=False))
        sizes |= dict(zip(after[::-1], shape[::-1], strict=False))
        middle = shape[len(before) : len(shape) - len(after)] if dots else []
        sizes |= {
            f"...{place}": max(size, sizes.get(f"...{place}", 1))
            for place, size in enumerate(middle[::-1])
        }
    return 2 * math.prod(sizes.values())


def peak_of_devices(model: keras.Model, gpus: tuple[str, ...]) -> float | None:
    """Returns the peak TFLOP/s of one of a model's devices, or None where it is not known.

    Args:
        gpus: the local devices that are GPUs; CPUs have no figure.
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

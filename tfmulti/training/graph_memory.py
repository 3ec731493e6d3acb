"""Tells how many bytes the tensors of a graph need at each of its operations.

The graph is walked in the order of the trace, and no step runs. A function that an operation calls
is walked, too: the body of a loop, the branches of a condition, or a `tf.function` in a layer.
A loop keeps in lists what its gradient needs of each pass, so its bytes grow with its passes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfmulti.keras_patches.tracing import graphs_called_by


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The result of these operations is their input under another name or shape.
_SAME_MEMORY = _names(
    "Identity IdentityN Reshape ExpandDims Squeeze StopGradient PreventGradient EnsureShape "
    "ReadVariableOp PlaceholderWithDefault CheckNumerics"
)
# These operations put tensors into a list, or take them out. They copy no tensor.
_OF_LISTS = _names(
    "TensorListPushBack TensorListPopBack TensorListSetItem TensorListGetItem TensorListResize "
    "OptionalFromValue OptionalGetValue"
)
# These operations make a list without tensors.
_EMPTY_LISTS = _names("EmptyTensorList TensorListReserve OptionalNone")
LOOPS = _names("While StatelessWhile")
# The result of these operations may take the memory of an input that nothing else needs.
_IN_PLACE = _names(
    "Add AddV2 AddN Sub Mul RealDiv Div Relu ReluGrad Relu6 Relu6Grad Elu EluGrad Selu Gelu Tanh "
    "TanhGrad Sigmoid SigmoidGrad Rsqrt Sqrt Square Neg Exp Log Erf Maximum Minimum BiasAdd "
    "Softmax LogSoftmax SelectV2 Pow DivNoNan MulNoNan SquaredDifference RsqrtGrad SqrtGrad Abs "
    "Softplus SoftplusGrad"
)


@dataclass(frozen=True)
class GraphMemory:
    """The bytes that the tensors of a graph need. Variables and arguments do not count.

    Attributes:
        needed: the bytes that are alive at each operation.
        results: for each result, the pieces of memory that it consists of, with their bytes.
        unknown: a reason for each part of the graph whose bytes cannot be told.
    """

    needed: list[int]
    results: list[dict[Any, int]]
    unknown: set[str]


@dataclass(frozen=True)
class _Outputs:
    """The memory of what an operation makes.

    Attributes:
        memory: for each output, the pieces of memory that it consists of.
        inner: the bytes that the operation needs while it runs.
        unknown: the reasons why that may be too little.
    """

    memory: list[tuple[Any, ...]]
    inner: int = 0
    unknown: set[str] = field(default_factory=set)


def memory_of_graph(graph: tf.Graph) -> GraphMemory:
    """Returns the bytes that the tensors of a graph need at each of its operations.

    The operations run in the order of the trace. A tensor's memory is free after the last operation
    that reads it.
    """
    operations = _in_order(graph)
    # A piece of memory has the name of the tensor for which it was made.
    sizes: dict[Any, int] = {}
    memory: dict[Any, tuple[Any, ...]] = {}
    made: dict[Any, _Outputs] = {}
    for op in operations:
        made[op] = _outputs_of(op, memory, sizes)
        memory.update(zip((o.ref() for o in op.outputs), made[op].memory, strict=True))
    readers: dict[Any, int] = {}
    for tensor in [*(i for op in operations for i in op.inputs), *graph.outputs]:
        for piece in memory[tensor.ref()]:
            readers[piece] = readers.get(piece, 0) + 1
    results = [{piece: sizes[piece] for piece in memory[o.ref()]} for o in graph.outputs]
    alive, needed = 0, []
    for op in operations:
        inputs = [piece for tensor in op.inputs for piece in memory[tensor.ref()]]
        own = {o.ref() for o in op.outputs} & sizes.keys()
        needs, taken = sum(sizes[piece] for piece in own), 0
        if op.type in _IN_PLACE and needs:
            last = (piece for piece in inputs if readers[piece] == inputs.count(piece))
            taken = next((sizes[piece] for piece in last if sizes[piece] == needs), 0)
        needed.append(alive + max(made[op].inner, needs - taken))
        alive += needs
        for piece in inputs:
            readers[piece] -= 1
        for piece in {piece for piece in [*inputs, *own] if not readers.get(piece)}:
            alive -= sizes[piece]
            sizes[piece] = 0
    return GraphMemory(needed, results, set().union(*(of.unknown for of in made.values())))


def _in_order(graph: tf.Graph) -> list[tf.Operation]:
    """Returns the operations in the order of the trace, but each one after its inputs.

    The gradient of a loop adds inputs to the loop that are made after it.
    """
    ordered: dict[tf.Operation, None] = {}
    waiting = graph.get_operations()[::-1]
    while waiting:
        missing = [t.op for t in waiting[-1].inputs if t.op not in ordered]
        if missing:
            waiting += missing
        else:
            ordered[waiting.pop()] = None
    return list(ordered)


def _outputs_of(
    op: tf.Operation, memory: dict[Any, tuple[Any, ...]], sizes: dict[Any, int]
) -> _Outputs:
    """Returns the memory of what an operation makes, and adds the sizes of its new pieces.

    Args:
        op: the operation.
        memory: the pieces of each tensor that was made before.
        sizes: the bytes of each piece.
    """
    inputs = [memory[tensor.ref()] for tensor in op.inputs]
    if op.type in _SAME_MEMORY and inputs:
        return _Outputs(inputs[: len(op.outputs)])
    if op.type in _OF_LISTS:
        pieces = tuple(dict.fromkeys(piece for each in inputs for piece in each))
        return _Outputs([pieces] * len(op.outputs))
    if op.type in _EMPTY_LISTS:
        return _Outputs([()])
    called = graphs_called_by(op)
    if op.type in LOOPS and "body" in called:
        return _outputs_of_loop(op, called["body"], inputs, sizes)
    unknown = set()
    if op.type == "TensorListFromTensor":
        own = [sum(sizes[piece] for piece in inputs[0])]
    else:
        own = [_size(output) for output in op.outputs]
        unknown = {
            f"the shape of {output.name} is known only while the step runs"
            for output in op.outputs
            if not output.shape.is_fully_defined() and output.dtype.is_floating
            if op.type != "Placeholder"
        }
    within = [memory_of_graph(graph) for graph in called.values()]
    for each in within:
        unknown |= each.unknown
        for index, output in enumerate(op.outputs):
            if output.dtype == tf.variant:
                own[index] = max(own[index], sum(each.results[index].values()))
    sizes.update(zip((output.ref() for output in op.outputs), own, strict=True))
    return _Outputs(
        [(output.ref(),) for output in op.outputs],
        max((max(each.needed, default=0) for each in within), default=0),
        unknown,
    )


def _outputs_of_loop(
    op: tf.Operation, body: Any, inputs: list[tuple[Any, ...]], sizes: dict[Any, int]
) -> _Outputs:
    """Returns the memory of the outputs of a loop.

    A forward loop adds tensors to its lists in each pass, so it needs most in its last pass. The
    loop of its gradient takes tensors out of these lists, so it needs most in its first pass.
    """
    a_pass, passes = memory_of_graph(body), _passes_of(op)
    taken_from = _lists_taken_from(body)
    # A list may keep the state of the pass before, which is an argument of this one.
    states = {
        argument.ref(): result
        for argument, result in zip(body.inputs, a_pass.results, strict=True)
        if argument.dtype != tf.variant and argument.ref() not in result
    }
    memory: list[tuple[Any, ...]] = []
    counted: set[Any] = set()
    growth, shrinkage = 0, 0.0
    for index, output in enumerate(op.outputs):
        result = a_pass.results[index]
        if index in taken_from:
            memory.append(())
            shrinkage += sum(sizes[piece] for piece in inputs[index]) / (passes or 1)
        elif result.keys() == {body.inputs[index].ref()}:
            memory.append(inputs[index])
        elif output.dtype == tf.variant:
            kept: dict[Any, int] = {}
            for piece, size in result.items():
                kept |= states.get(piece, {piece: size})
            added = sum(n for piece, n in kept.items() if piece not in counted)
            counted |= kept.keys()
            growth += added
            sizes[output.ref()] = added * (passes or 1)
            memory.append((*inputs[index], output.ref()))
        else:
            sizes[output.ref()] = _size(output)
            memory.append((output.ref(),))
    unknown = set(a_pass.unknown)
    if passes is None and growth:
        unknown.add(f"the number of passes of the loop {op.name} is known only while it runs")
    added_before = max(0, int(((passes or 1) - 1) * (growth - shrinkage)))
    return _Outputs(memory, max(a_pass.needed, default=0) + added_before, unknown)


def _lists_taken_from(body: Any) -> set[int]:
    """Returns the indices of the arguments from which the body of a loop takes tensors."""
    source = {argument.ref(): index for index, argument in enumerate(body.inputs)}
    taken_from = set()
    for op in body.get_operations():
        index = source.get(op.inputs[0].ref()) if len(op.inputs) else None
        if index is not None and op.type == "Identity":
            source[op.outputs[0].ref()] = index
        elif index is not None and op.type == "TensorListPopBack":
            taken_from.add(index)
    return taken_from


def _passes_of(loop: tf.Operation) -> int | None:
    """Returns the most passes that a loop may take, or None if the trace does not tell it.

    The second input of a loop is the `maximum_iterations` of `tf.while_loop`, or -1.
    """
    most = _static_value(loop.inputs[1])
    return most if most is not None and most >= 0 else None


def _static_value(tensor: tf.Tensor) -> int | None:
    """Returns the value of a whole number that constants alone decide, or None.

    `tf.get_static_value` does not know the maximum that Keras takes for the passes of its layers.
    """
    behind, waiting = set(), [tensor.op]
    while waiting:
        op = waiting.pop()
        if op.type == "Placeholder" or op.op_def.is_stateful:
            return None
        if op not in behind:
            behind.add(op)
            waiting.extend(each.op for each in op.inputs)
    # A session without GPUs takes no memory of a GPU.
    config = tf.compat.v1.ConfigProto(device_count={"GPU": 0})
    with tf.compat.v1.Session(graph=tensor.graph, config=config) as session:
        return int(session.run(tensor))


def _size(tensor: tf.Tensor) -> int:
    """Returns the bytes of a tensor that an operation makes; 0 for arguments and handles."""
    if tensor.op.type in ("Placeholder", "Const", "ReadVariableOp"):
        return 0
    if tensor.dtype in (tf.resource, tf.variant) or not tensor.shape.is_fully_defined():
        return 0
    return int(math.prod(tensor.shape.as_list()) * tensor.dtype.size)

"""Labels the tensors of a step: how each one depends on the rows of the global batch.

A replica traces the user's step for its own rows. Whether a tensor of that graph has the value of
one device depends on how it was computed. So this module reads the operations behind the tensor:

- ALIKE: the value is the same on every replica. It is a constant or a weight, or is computed from
  such values.
- ROWS: axis 0 counts this replica's rows, and each row is computed from its own row alone.
- COUNT: the value depends on the number of rows alone, such as a shape.
- MEAN: the mean of the replicas' values, weighted by their rows, is the value of one device.
- SUM: the value is linear in sums over rows and in means. Its factors are ALIKE or COUNT.
- GLOBAL: the value is computed in another way from sums, means or rows of the whole batch.
- MIXED: as ROWS, but computed with values that must be those of the global batch.
- LOCAL: none of these is known to be true.

`global_values` makes these tensors the values of one device. The result of an operation
that `row_rules` does not know is GLOBAL if its inputs have rows. So it is computed from the rows of
all replicas.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tensorflow as tf

from tfmulti.distribution import custom_gradients, row_sequences
from tfmulti.distribution.custom_gradients import has_custom_gradient, is_formula
from tfmulti.distribution.row_rules import (
    Kind,
    Label,
    Node,
    Parts,
    counts_own_rows,
    is_differentiable,
    is_linear,
    leaves_out_rows,
    parts_after,
    parts_of_rearranged,
    reads_all_rows,
    reduced_axes,
    repetition,
)

ALIKE, COUNT, MEAN, SUM, GLOBAL = (
    Label(kind) for kind in (Kind.ALIKE, Kind.COUNT, Kind.MEAN, Kind.SUM, Kind.GLOBAL)
)
_SOURCES = {"Const", "VarHandleOp"}
_READERS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"}


@dataclass
class _Marks:
    """What is known about the tensors of a graph, by their names.

    Attributes:
        labels: the labels that are known so far.
        given: the labels that `mark` has set.
        calls: for each output of a marked layer, the inputs of the layer.
        reductions: sums and means over rows, numbers of rows, and states of metrics.
        rearranged: rows that follow from other rows (`row_rules.parts_of_rearranged`).
        metric_handles: the handles of the metrics' variables: their ids, and the names of the
            graph's inputs that stand for them.
        origins: for inputs of functions, the tensors outside that they stand for.
    """

    labels: dict[str, Label] = field(default_factory=dict)
    given: dict[str, Label] = field(default_factory=dict)
    calls: dict[str, list[Any]] = field(default_factory=dict)
    reductions: set[str] = field(default_factory=set)
    rearranged: set[str] = field(default_factory=set)
    metric_handles: set[int | str] = field(default_factory=set)
    origins: dict[str, Any] = field(default_factory=dict)


_graphs: weakref.WeakKeyDictionary[tf.Graph, _Marks] = weakref.WeakKeyDictionary()
_given_in_branches: weakref.WeakKeyDictionary[tf.Graph, dict[str, Label]] = (
    weakref.WeakKeyDictionary()
)
# The branches that all replicas take, or none of them.
_common_branches: weakref.WeakSet[tf.Graph] = weakref.WeakSet()


def begin(data: Any, metric_variables: Iterable[Any]) -> None:
    """Begins the labels of the graph that is built now, in replica context.

    Args:
        data: a nest of tensors, this replica's rows.
        metric_variables: the Keras variables that hold this replica's part of each metric.
    """
    if tf.executing_eagerly():
        return
    graph = tf.compat.v1.get_default_graph()
    marks = _graphs.setdefault(graph, _Marks())
    for variable in metric_variables:
        # In a stateless scope the value is a tensor.
        handle = getattr(getattr(variable, "value", variable), "handle", None)
        if handle is not None:
            marks.metric_handles |= {id(handle), graph.capture(handle).name}
    for leaf in tf.nest.flatten(data):
        if isinstance(leaf, tf.Tensor):
            mark(leaf, rows((1,)))
        elif isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
            for part in tf.nest.flatten(leaf, expand_composites=True):
                mark(part, local("a ragged or sparse tensor"))


def rows(parts: Parts) -> Label:
    """Returns the label of a tensor that has rows in such parts."""
    return Label(Kind.ROWS, parts)


def local(reason: str) -> Label:
    """Returns the label LOCAL, with the reason why nothing else is known."""
    return Label(Kind.LOCAL, reason=reason)


# The classes of TensorFlow's graphs for the branches of conditions and the parts of loops.
_LOOPS = ("WhileBodyFuncGraph", "WhileCondFuncGraph")
_BRANCHES = ("CondBranchFuncGraph", *_LOOPS)


def is_branch(graph: tf.Graph) -> bool:
    """Returns whether a graph is that of a condition's branch, or of a part of a loop."""
    return type(graph).__name__ in _BRANCHES


def taken_by_all(branch: Callable[[], Any]) -> Callable[[], Any]:
    """Returns the function of a branch that all replicas take, or none of them."""

    def common() -> Any:
        _common_branches.add(tf.compat.v1.get_default_graph())
        return branch()

    return common


def may_be_left_out() -> bool:
    """Returns whether some replicas may not run the operations that are traced now.

    Operations inside a loop may run more often on one replica than on another. A branch may run on
    some replicas only, unless `taken_by_all` has marked it.
    """
    graph = tf.compat.v1.get_default_graph()
    while is_branch(graph):
        if graph not in _common_branches:
            return True
        graph = graph.outer_graph
    return False


@contextlib.contextmanager
def kept_in_branch() -> Iterator[bool]:
    """Keeps labels inside the context if a branch or loop of a labelled graph is built now.

    Yields whether that is so. A tensor from outside keeps its label. The values that a loop carries
    from pass to pass are LOCAL.
    """
    branches = []
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    while graph is not None and graph not in _graphs:
        branches.append(graph)
        # A function that XLA compiles also has a graph inside that of the step, but is no branch.
        graph = getattr(graph, "outer_graph", None) if is_branch(graph) else None
    if graph is None:
        branches = []
    for branch in branches:
        _graphs[branch] = _marks_of_branch(branch, _graphs[graph])
    try:
        yield bool(branches)
    finally:
        for branch in branches:
            del _graphs[branch]


def _marks_of_branch(branch: tf.Graph, marks: _Marks) -> _Marks:
    """Returns the marks of a branch in a graph with `marks`, with the labels that `mark` has set.

    These outlive `_graphs`. Others depend on the labels of the branch's inputs.
    """
    given = _given_in_branches.setdefault(branch, {})
    return _Marks(dict(given), given, metric_handles=marks.metric_handles)


def is_of_condition(reason: str) -> bool:
    """Returns whether a value is LOCAL because a condition computes it."""
    return reason.endswith(("(If)", "(Case)"))


# The operations of `tf.numpy_function` and `tf.py_function`.
PYTHON_FUNCTIONS = ("PyFunc", "PyFuncStateless", "EagerPyFunc")


def is_of_loop(reason: str) -> bool:
    """Returns whether a value is LOCAL because a loop computes it."""
    return reason.endswith("(While)")


def are_kept() -> bool:
    """Returns whether the graph that is built now has labels."""
    return not tf.executing_eagerly() and tf.compat.v1.get_default_graph() in _graphs


def mark(tensor: Any, label: Label) -> None:
    """Sets the label of a tensor of a graph that has labels; does nothing for other tensors."""
    marks = _marks_of(tensor)
    if marks is not None:
        marks.labels[tensor.name] = marks.given[tensor.name] = label


def is_marked(tensor: Any) -> bool:
    """Returns whether `mark` has set the label of a tensor."""
    marks = _marks_of(tensor)
    return marks is not None and tensor.name in marks.given


def mark_call(inputs: Any, outputs: Any) -> None:
    """Says that a layer computes each row of its outputs from the same row of its inputs.

    The labels of the outputs then follow from those of the inputs, and the operations of the layer
    are not read. The parts of ragged and sparse tensors are inputs, too.
    """
    leaves = tf.nest.flatten(inputs, expand_composites=True)
    input_tensors = [t for t in leaves if isinstance(t, tf.Tensor)]
    for output in tf.nest.flatten(outputs):
        marks = _marks_of(output)
        if marks is not None and output.shape.rank != 0:
            marks.calls.setdefault(output.name, input_tensors)


def custom_gradients_behind(target: tf.Tensor) -> list[str]:
    """Returns the names of custom gradients behind a tensor that are not known.

    Those inside a marked layer are known.
    """
    marks = _marks_of(target)
    if marks is None:
        return []
    # Whether a layer is read is known as soon as the label is.
    label_of(target)
    found: dict[str, None] = {}
    stack, visited = [target], {target.name}
    while stack:
        tensor = stack.pop()
        called = marks.calls.get(tensor.name)
        if called is None:
            found |= dict.fromkeys(custom_gradients.unknown_in(tensor.op))
        for behind in tensor.op.inputs if called is None else called:
            if behind.name not in visited and getattr(behind, "graph", None) is tensor.graph:
                visited.add(behind.name)
                stack.append(behind)
    return list(found)


def _marks_of(tensor: Any) -> _Marks | None:
    if tf.executing_eagerly() or not isinstance(tensor, tf.Tensor) or not hasattr(tensor, "graph"):
        return None
    return _graphs.get(tensor.graph)


def label_of(value: Any) -> Label:
    """Returns the label of a tensor, or of a number; LOCAL in a graph without labels.

    The labels of all tensors behind it are computed first. The loop has a stack, since a recursive
    function would exceed Python's limit in a long chain of operations.
    """
    if not isinstance(value, tf.Tensor):
        if isinstance(value, tf.IndexedSlices):
            return local("a gradient of lookups (tf.IndexedSlices) that the step has made")
        is_number = isinstance(value, (int, float, bool, np.generic, np.ndarray))
        return ALIKE if is_number else local(f"a {type(value).__name__}")
    marks = _marks_of(value)
    if marks is None:
        return local("a tensor of another graph, or of none")
    stack, visited = [value], set()
    while stack:
        tensor = stack[-1]
        if tensor.name in marks.labels:
            stack.pop()
            continue
        called = marks.calls.get(tensor.name)
        inputs = list(tensor.op.inputs) if called is None else called
        graph_inputs = [t for t in inputs if getattr(t, "graph", None) is tensor.graph]
        missing = [t for t in graph_inputs if t.name not in marks.labels]
        if missing:
            visited.add(tensor.name)
            stack += missing
            if any(t.name in visited for t in missing):
                # A marked layer has returned its own input or an older tensor, so the marks form a
                # cycle. Drop them, and read the operations.
                for name in visited:
                    marks.calls.pop(name, None)
                stack, visited = [value], set()
            continue
        labels = [marks.labels[t.name] for t in graph_inputs]
        if len(graph_inputs) < len(inputs):
            labels.append(local("a tensor of another graph"))
        label = _called(labels) if called is not None else _computed(marks, tensor, labels)
        # If the call gives no label, the operations of the layer are read one by one.
        if label is None:
            del marks.calls[tensor.name]
        else:
            marks.labels[tensor.name] = label
    return marks.labels[value.name]


def is_reduction_of_rows(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor is a sum, mean or number of rows, or a metric's state."""
    marks = _marks_of(tensor)
    # `label_of` also fills `marks.reductions`.
    label_of(tensor)
    return marks is not None and tensor.name in marks.reductions


def is_rearranged(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor has a row for each row, computed from other rows as they stand."""
    marks = _marks_of(tensor)
    # `label_of` also fills `marks.rearranged`.
    label_of(tensor)
    return marks is not None and tensor.name in marks.rearranged


def is_product_of_all_rows(tensor: Any) -> bool:
    """Returns whether a tensor comes from a matrix product that adds up over the rows of the batch.

    The first matrix has as many columns as one device has rows. A replica has fewer rows, and
    cannot compute the product. Operations by element may follow it.
    """
    while isinstance(tensor, tf.Tensor) and label_of(tensor).kind is Kind.GLOBAL:
        op = tensor.op
        if op.type in ("MatMul", "BatchMatMulV2"):
            first, second = op.inputs
            is_of_rows = label_of(first).has_rows and first.shape.rank == second.shape.rank == 2
            return is_of_rows and first.shape[1] is not None and second.shape[0] is None
        behind = [t for t in op.inputs if label_of(t).kind is not Kind.ALIKE]
        if len(behind) != 1 or behind[0].shape.rank != tensor.shape.rank:
            return False
        tensor = behind[0]
    return False


def is_state_of_metric(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor is this replica's value of a metric's variable."""
    marks = _marks_of(tensor)
    return marks is not None and _reads_metric(marks, tensor.op)


def outside_of_branches(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the tensor that an input of a branch or loop stands for; otherwise the same tensor.

    The tensor is one of a graph with labels.
    """
    marks = _marks_of(tensor)
    if marks is None or tensor.op.type != "Placeholder":
        return tensor
    outside = _origin(marks, tensor)
    return tensor if _marks_of(outside) is None else outside


def parts_counted(size: tf.Tensor) -> Parts | None:
    """Returns the parts of the rows that a size, or the first number of a shape, counts.

    None if it is not a whole multiple of the number of rows, or if that is not known.
    """
    op = size.op
    if op.type == "Shape":
        # A later axis of mixed rows may count the rows of all replicas.
        return None if label_of(size).kind is Kind.GLOBAL else label_of(op.inputs[0]).parts or None
    is_number = op.type in ("Reshape", "ExpandDims") and op.inputs[0].shape.rank == 0
    if is_number or op.type in ("Identity", "Cast", "Pack"):
        return parts_counted(op.inputs[0])
    if op.type == "ConcatV2":
        # An empty vector may stand first, as in `tf.repeat`.
        first = next((t for t in op.inputs if t.shape.num_elements() != 0), None)
        return None if first is None else parts_counted(first)
    if op.type == "Unpack":
        return parts_counted(op.inputs[0]) if size.value_index == 0 else None
    if op.type == "StridedSlice":
        begin, rank = tf.get_static_value(op.inputs[1]), op.inputs[0].shape[0]
        takes_first = op.get_attr("begin_mask") & 1 or (
            begin is not None and begin[0] in (0, -(rank or 0))
        )
        strides = tf.get_static_value(op.inputs[3])
        goes_on = strides is not None and strides[0] > 0 and size.shape.num_elements()
        return parts_counted(op.inputs[0]) if takes_first and goes_on else None
    if op.type == "AddV2":
        both = [parts_counted(number) for number in op.inputs]
        return (sum(both[0]) + sum(both[1]),) if both[0] and both[1] else None
    if op.type == "Mul":
        for factor, other in (list(op.inputs), list(op.inputs)[::-1]):
            value = tf.get_static_value(factor)
            # A shape may be multiplied by a vector, whose first number is that of the rows.
            times = 0 if value is None else np.ravel(value)[0]
            parts = parts_counted(other) if times == int(times) > 0 else None
            if parts is not None:
                return (int(times) * sum(parts),)
    return None


def may_count_rows(size: tf.Tensor) -> bool:
    """Returns whether a size may follow from the number of rows, as far as is known.

    The other sizes of a tensor with rows do not.
    """
    if label_of(size).kind is Kind.ALIKE:
        return False
    op = size.op
    if op.type == "Unpack" and size.value_index > 0:
        return may_count_rows(op.inputs[0]) and op.inputs[0].op.type != "Shape"
    if op.type == "StridedSlice" and op.inputs[0].op.type == "Shape":
        begin, rank = tf.get_static_value(op.inputs[1]), op.inputs[0].shape[0]
        return begin is None or begin[0] in (0, -(rank or 0))
    return not op.inputs or op.type == "Shape" or any(map(may_count_rows, op.inputs))


def _called(inputs: Sequence[Label]) -> Label | None:
    """Returns the label of a layer's output; None if the layer's operations must be read."""
    kinds = {label.kind for label in inputs}
    if kinds <= {Kind.ALIKE}:
        return ALIKE
    parts = {label.parts for label in inputs if label.kind is Kind.ROWS}
    if kinds <= {Kind.ALIKE, Kind.ROWS} and len(parts) == 1:
        return rows(parts.pop())
    return None


def _computed(marks: _Marks, output: tf.Tensor, inputs: Sequence[Label]) -> Label:
    """Returns the label of an operation's output from the labels of the inputs."""
    op, kinds = output.op, {label.kind for label in inputs}
    if _reads_metric(marks, op):
        marks.reductions.add(output.name)
        return Label(Kind.SUM)
    if _counts_entries(op):
        return ALIKE
    sequence = row_sequences.label_after(Node(op, inputs, output))
    if sequence is not None:
        return sequence
    if op.type in ("While", "StatelessWhile"):
        label = _of_loop(marks, output, inputs)
        if op.type == "While" or label.kind is not Kind.LOCAL or label.entries:
            return label
    for label in inputs:
        if label.kind is Kind.LOCAL:
            return local(label.reason)
    if op.type == "Placeholder":
        # A function's captured variable or eager tensor is the same on every replica.
        captured = _origin(marks, output)
        if outside_of_branches(output) is not output:
            return label_of(captured)
        if output.dtype == tf.resource or not hasattr(captured, "graph"):
            return ALIKE
        if type(op.graph).__name__ in _LOOPS:
            return local(f"the value {op.name!r} that a loop on tensors carries (While)")
        return local("a value of this replica alone, such as its number of rows")
    if op.type in ("If", "StatelessIf"):
        label = _of_condition(marks, output, inputs)
        if op.type == "If" or label.kind is not Kind.LOCAL:
            return label
    # Each call of a stateful operation may give another value, such as a random number.
    if op.op_def.is_stateful and op.type not in _READERS | _SOURCES:
        return local(f"the operation {op.name!r} ({op.type})")
    # `tf.squeeze` removes the axis of the rows if there is one row, so a rank may depend on them.
    if kinds <= {Kind.ALIKE} or (op.type == "Rank" and inputs[0].has_rows):
        return ALIKE
    if op.type in ("Shape", "Size"):
        return _counted(marks, output, inputs[0])
    is_opaque = has_custom_gradient(op) and not is_formula(output)
    if is_opaque and not kinds <= {Kind.ALIKE, Kind.ROWS}:
        return local(f"the custom gradient {op.name!r}")
    if kinds <= {Kind.ALIKE, Kind.COUNT}:
        repeated = repetition(op)
        if repeated is not None and label_of(repeated[0]).kind is Kind.ALIKE:
            parts = parts_counted(repeated[1])
            if parts is not None:
                return rows(parts)
        return ALIKE if leaves_out_rows(op) else COUNT
    node = Node(op, inputs, output)
    if any(label.has_rows for label in inputs):
        return _of_rows(marks, node)
    if kinds <= {Kind.ALIKE, Kind.COUNT, Kind.MEAN, Kind.SUM} and is_linear(node):
        return SUM if kinds & {Kind.SUM, Kind.COUNT} else MEAN
    return GLOBAL


def _counts_entries(op: tf.Operation) -> bool:
    """Returns whether an operation is `tf.shape(x)[0]` of a sequence, such as its time steps."""
    if op.type != "StridedSlice" or op.inputs[0].op.type != "Shape":
        return False
    begin, is_one = tf.get_static_value(op.inputs[1]), op.get_attr("shrink_axis_mask") == 1
    is_first = begin is not None and begin[0] == 0
    return is_first and is_one and bool(label_of(op.inputs[0].op.inputs[0]).entries)


def _of_condition(marks: _Marks, output: tf.Tensor, inputs: Sequence[Label]) -> Label:
    """Returns the label of what a condition computes.

    A condition that reads variables cannot be built again from other values, since the gradient by
    its variables would be lost. So the replicas must take the same branch, and the values of both
    branches must be right without a change.
    """
    op = output.op
    branches = [getattr(op, name, None) for name in ("_true_graph", "_false_graph")]
    if inputs[0].kind is Kind.ALIKE and None not in branches:
        labels = set()
        for graph in branches:
            labels |= {*_of_function(marks, graph, inputs[1:], [output.value_index])}
        (label, *others) = labels
        if not others and label.kind in (Kind.ALIKE, Kind.MEAN, Kind.ROWS):
            return label
        if labels == {ALIKE, MEAN}:
            return MEAN
    return local(f"the operation {op.name!r} (If)")


def _of_loop(marks: _Marks, output: tf.Tensor, inputs: Sequence[Label]) -> Label:
    """Returns the label of what a loop computes.

    It is known if all replicas make the same number of passes, and if a pass computes each row from
    the same row. A loop that reads variables cannot be built again from other values, since the
    gradient by its variables would be lost.
    """
    op = output.op
    unknown = local(f"the operation {op.name!r} ({op.type})")
    body, condition = (getattr(op, name, None) for name in ("_body_graph", "_cond_graph"))
    if body is None or condition is None or len(body.outputs) != len(inputs):
        return unknown
    labels = [
        label if label.kind in (Kind.ALIKE, Kind.ROWS) or label.entries else unknown
        for label in inputs
    ]
    # A pass may pass on what another value was before, so the labels change until they are stable.
    before: list[Label] = []
    while labels != before:
        before = labels
        after = _of_function(marks, body, labels, range(len(body.outputs)))
        labels = [
            row_sequences.joined(label, new, tensor.dtype) or unknown
            for label, new, tensor in zip(labels, after, body.outputs, strict=True)
        ]
    label: Label = labels[output.value_index]
    [again] = _of_function(marks, condition, labels, [0])
    if again.kind is not Kind.ALIKE:
        return unknown
    if label.entries:
        kind = Kind.LOCAL if op.type == "While" else Kind.GLOBAL
        return Label(kind, reason=unknown.reason, entries=label.entries)
    return label


def _of_function(
    marks: _Marks, graph: tf.Graph, inputs: Sequence[Label], indices: Iterable[int]
) -> list[Label]:
    """Returns labels of outputs of a branch or a part of a loop, from the labels of its inputs."""
    _graphs[graph] = _marks_of_branch(graph, marks)
    for tensor, label in zip(graph.inputs, inputs, strict=False):
        mark(tensor, label)
    try:
        return [label_of(graph.outputs[index]) for index in indices]
    finally:
        del _graphs[graph]


def _reads_metric(marks: _Marks, op: tf.Operation) -> bool:
    """Returns whether an operation reads a metric's variable."""
    if op.type != "ReadVariableOp" or not marks.metric_handles:
        return False
    handle = _origin(marks, op.inputs[0])
    return (handle.name if hasattr(handle, "graph") else id(handle)) in marks.metric_handles


def _origin(marks: _Marks, tensor: Any) -> Any:
    """Returns the tensor outside of all functions that an input of a function stands for.

    For a variable's handle it is the tensor outside of branches. To search the captures of a step
    for each of its variables would take time that grows with the square of their number.
    """
    if tensor.name not in marks.origins:
        outside: Any = tensor
        while hasattr(outside, "graph"):
            if tensor.dtype == tf.resource and not is_branch(outside.graph):
                break
            captures = {inside.name: out for out, inside in getattr(outside.graph, "captures", ())}
            if outside.name not in captures:
                break
            outside = captures[outside.name]
        marks.origins[tensor.name] = outside
    return marks.origins[tensor.name]


def _counted(marks: _Marks, output: tf.Tensor, label: Label) -> Label:
    """Returns the label of a shape, or of a size."""
    shape = output.op.inputs[0].shape
    if label.kind is Kind.MIXED and _may_count_all_rows(label, shape):
        return GLOBAL
    if label.has_rows and shape.rank is not None:
        marks.reductions.add(output.name)
        return COUNT
    if label.has_rows:
        return local(f"the shape of {output.op.inputs[0].name!r}, whose rank is not known")
    return ALIKE if shape.is_fully_defined() else GLOBAL


def _may_count_all_rows(label: Label, shape: tf.TensorShape) -> bool:
    """Returns whether an axis of mixed rows behind the first may count the rows of all replicas."""
    return not label.by_count and not (shape.rank and shape[1:].is_fully_defined())


def _of_rows(marks: _Marks, node: Node) -> Label:
    """Returns the label of what an operation computes from rows and maybe other values."""
    first, output = node.labels[0], node.output
    is_sum, is_mean = node.op.type == "Sum", node.op.type == "Mean" and is_differentiable(output)
    if first.has_rows and (is_sum or is_mean) and 0 in (reduced_axes(node) or ()):
        marks.reductions.add(output.name)
        if first.kind is Kind.MIXED and not first.by_count:
            return GLOBAL
        return MEAN if is_mean and first.kind is Kind.ROWS else SUM
    parts = parts_after(node)
    is_reshape = node.op.type == "Reshape" and first.has_rows
    if is_reshape and parts_counted(node.op.inputs[1]) == first.parts:
        # The first axis stays as it is, whatever the sizes of the others are.
        parts = first.parts
    is_sorted = node.op.type == "TopKV2" and node.ranks[0] == 1 and len(first.parts) == 1
    if parts is None and is_sorted and parts_counted(node.op.inputs[1]) == first.parts:
        rearranged: Parts | None = first.parts
    else:
        rearranged = parts_of_rearranged(node) if parts is None else None
    if rearranged is not None:
        marks.rearranged.add(output.name)
        return Label(Kind.MIXED, rearranged)
    takes_shape = any(counts_own_rows(node.op, i) for i in range(len(node.labels)))
    is_mixed = first.kind is Kind.MIXED and _may_count_all_rows(first, node.op.inputs[0].shape)
    if parts is None or (takes_shape and is_mixed):
        return GLOBAL
    value_labels = [label for i, label in enumerate(node.labels) if not counts_own_rows(node.op, i)]
    if any(
        reads_all_rows(node.op, i) and label.kind is not Kind.ALIKE
        for i, label in enumerate(node.labels)
    ):
        return Label(Kind.MIXED, parts)
    if all(label.kind in (Kind.ALIKE, Kind.ROWS) for label in value_labels):
        return rows(parts)
    known = (Kind.ALIKE, Kind.ROWS, Kind.COUNT)
    return Label(
        Kind.MIXED, parts, all(label.kind in known or label.by_count for label in value_labels)
    )


def is_of_several_rows(value: Any) -> bool:
    """Returns whether a value is a tensor that depends on several rows of the batch together."""
    kinds = (Kind.SUM, Kind.COUNT, Kind.GLOBAL, Kind.MIXED)
    return isinstance(value, tf.Tensor) and label_of(value).kind in kinds

"""Rules that say whether the output of an operation has the rows of the batch.

A tensor with rows has them along axis 0, in one or more concatenated parts. `Parts` has a number
for each part: how many entries of axis 0 a row has there. So a batch has the parts `(1,)`, and two
concatenated batches have `(1, 1)`. If a reshape splits each row of 4 values into entries of 2, the
parts `(1,)` become `(2,)`.

A rule looks at one output of an operation. It returns the parts of this output, if each row is
computed from the same row of the inputs. It returns None if that is not so, or is not known.
Operations and attributes: https://www.tensorflow.org/api_docs/python/tf/raw_ops
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import numpy as np
import tensorflow as tf

Parts = tuple[int, ...]


class Kind(Enum):
    """How a tensor depends on the rows of the batch; see `row_labels`."""

    ALIKE = "alike"
    ROWS = "rows"
    COUNT = "count"
    MEAN = "mean"
    SUM = "sum"
    GLOBAL = "global"
    MIXED = "mixed"
    LOCAL = "local"


@dataclass(frozen=True)
class Label:
    """How a tensor depends on the rows of the batch.

    Attributes:
        kind: one of the kinds that `row_labels` describes.
        parts: for ROWS and MIXED, how many entries of axis 0 a row has in each concatenated part; 0
            if that is not known.
        by_count: for MIXED, whether the tensor depends on other rows by their number alone.
        reason: for LOCAL, what is not known.
        entries: for a sequence (`row_sequences`), the parts that each of its entries has.
    """

    kind: Kind
    parts: Parts = ()
    by_count: bool = False
    reason: str = ""
    entries: Parts = ()

    @property
    def has_rows(self) -> bool:
        """Whether axis 0 of the tensor consists of rows of the batch."""
        return self.kind in (Kind.ROWS, Kind.MIXED)


class Node(NamedTuple):
    """One output of an operation, and the labels of the operation's inputs."""

    op: tf.Operation
    labels: Sequence[Label]
    output: tf.Tensor

    @property
    def ranks(self) -> list[int | None]:
        """The ranks of the inputs; None for a rank that is unknown during tracing."""
        return [tensor.shape.rank for tensor in self.op.inputs]

    def same_parts(self) -> Parts | None:
        """Returns the parts that all inputs with rows have; None if they differ."""
        parts = {label.parts for label in self.labels if label.has_rows}
        return parts.pop() if len(parts) == 1 else None

    def parts_if(self, condition: object) -> Parts | None:
        """Returns the parts of the first input if it has rows and the condition holds."""
        return self.labels[0].parts if self.labels[0].has_rows and condition else None

    def static(self, index: int) -> np.ndarray | None:
        """Returns the value of an input; None if it is unknown during tracing."""
        value = tf.get_static_value(self.op.inputs[index])
        return None if value is None else np.asarray(value)

    def axis(self, index: int, rank: int | None) -> int | None:
        """Returns the axis that an input gives, counted from the front; None if it is not known.

        Args:
            index: the index of the input.
            rank: the rank of the tensor that the axis belongs to.
        """
        value = self.static(index)
        return None if value is None or not rank else int(value.reshape([])) % rank

    def are_alike(self, labels: Sequence[Label]) -> bool:
        """Returns whether all labels are of the kind ALIKE."""
        return all(label.kind is Kind.ALIKE for label in labels)


Rule = Callable[[Node], "Parts | None"]


def parts_after(node: Node) -> Parts | None:
    """Returns the parts of an output by the rule of its operation; None if there is none."""
    rule = _RULES.get(node.op.type)
    return None if rule is None else rule(node)


def parts_of_rearranged(node: Node) -> Parts | None:
    """Returns the parts of an output that has a row for each row, computed from other rows.

    Such are rows in the reverse order, rows that are moved by some places, and running sums over
    the rows. None if the operation is none of these, or if several batches are concatenated.
    """
    first = node.labels[0]
    keeps_rows = node.op.type in _REARRANGING or _is_reversed(node)
    is_one_batch = len(first.parts) == 1 and first.parts != (0,)
    return node.parts_if(keeps_rows and is_one_batch and node.are_alike(node.labels[1:]))


def _is_reversed(node: Node) -> bool:
    """Returns whether an operation is `x[::-1]`, with or without indices for the other axes."""
    strides = node.static(3) if node.op.type == "StridedSlice" else None
    if strides is None or strides[0] != -1:
        return False
    names = ("ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
    changed = any(node.op.get_attr(name) & 1 for name in names)
    return not changed and bool(node.op.get_attr("begin_mask") & node.op.get_attr("end_mask") & 1)


def reduced_axes(node: Node) -> set[int] | None:
    """Returns the axes that a reduction sums or compares; None if they are not known."""
    axes, rank = node.static(1), node.ranks[0]
    if axes is None or rank is None:
        return None
    return {int(axis) % rank for axis in axes.reshape([-1])}


def counts_own_rows(op: tf.Operation, index: int) -> bool:
    """Returns whether an input of an operation on rows counts them, and so stays this replica's."""
    return (op.type, index) in {("Reshape", 1), ("BroadcastTo", 1), ("CropAndResize", 2)}


def reads_all_rows(op: tf.Operation, index: int) -> bool:
    """Returns whether each row of an output needs all rows of an input, if the input has rows.

    Such are the second matrix of a product, and the table of lookups by rows.
    """
    if op.type == "GatherV2":
        axis, rank = tf.get_static_value(op.inputs[2]), op.inputs[0].shape.rank
        is_first = axis is not None and (axis == 0 or axis + (rank or 0) == 0)
        return index == 0 and not op.get_attr("batch_dims") and is_first
    return (op.type, index) == ("MatMul", 1)


def is_differentiable(tensor: tf.Tensor) -> bool:
    """Returns whether a tensor may have a gradient: whether it has floats or complex numbers."""
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def is_linear(node: Node) -> bool:
    """Returns whether an operation is linear in the inputs that are sums or means."""
    varying = [i for i, label in enumerate(node.labels) if label.kind in (Kind.SUM, Kind.MEAN)]
    if node.op.type in _ADDITIVE:
        return True
    if node.op.type in _LINEAR_IN_FIRST:
        return varying == [0]
    if node.op.type == "Cast":
        return is_differentiable(node.op.inputs[0]) and is_differentiable(node.output)
    return node.op.type == "Mul" and len(varying) == 1


def varying_inputs(op: tf.Operation, labels: Sequence[Label]) -> set[int]:
    """Returns the indices of the inputs that may be replaced by one replica's parts of them.

    The operation must be linear in these inputs. Its output is then that replica's part, too.
    """
    if op.type in _ADDITIVE:
        return {i for i, tensor in enumerate(op.inputs) if tensor.dtype == op.outputs[0].dtype}
    if op.type == "Mul":
        return {i for i, label in enumerate(labels) if label.kind in (Kind.SUM, Kind.MEAN)}
    return {0}


def leaves_out_rows(op: tf.Operation) -> bool:
    """Returns whether an operation takes sizes of a shape other than the number of rows."""
    if op.type != "StridedSlice" or op.inputs[0].op.type != "Shape" or op.get_attr("begin_mask"):
        return False
    begin, rank = tf.get_static_value(op.inputs[1]), op.inputs[0].op.inputs[0].shape.rank
    return begin is not None and bool(rank) and int(begin[0]) % rank > 0


def repetition(op: tf.Operation) -> tuple[tf.Tensor, tf.Tensor] | None:
    """Returns what an operation repeats along axis 0, and how often; None if it does not.

    The second result is a number, or a shape that begins with the number.
    """
    if not op.outputs[0].shape.rank or not op.outputs[0].shape[1:].is_fully_defined():
        return None
    if op.type == "Fill":
        return op.inputs[1], op.inputs[0]
    repeated = op.inputs[0]
    if op.type == "BroadcastTo" and repeated.shape.rank is not None:
        is_new = repeated.shape.rank < op.outputs[0].shape.rank
        return (repeated, op.inputs[1]) if is_new or repeated.shape[0] == 1 else None
    if op.type == "Tile" and repeated.shape.rank and repeated.shape[0] == 1:
        return repeated, op.inputs[1]
    return _repeated_by_tile(op) if op.type == "Reshape" else None


def _repeated_by_tile(op: tf.Operation) -> tuple[tf.Tensor, tf.Tensor] | None:
    """Returns `repetition` for `tf.repeat`, which tiles along a new axis and then reshapes."""
    tile = op.inputs[0].op
    if tile.type != "Tile" or tile.inputs[1].op.type != "Pack":
        return None
    shape, amounts = tile.inputs[0].shape, list(tile.inputs[1].op.inputs)
    known = [tf.get_static_value(amount) for amount in amounts]
    if known.count(None) != 1 or any(value not in (None, 1) for value in known):
        return None
    axis = known.index(None)
    inner = [int(size) for size in op.outputs[0].shape[1:]]
    is_first = shape.is_fully_defined() and all(size == 1 for size in shape[: axis + 1])
    if not is_first or list(shape[axis + 1 :]) != inner:
        return None
    return tile.inputs[0], amounts[axis]


def _elementwise(node: Node) -> Parts | None:
    """Rule of operations on elements: an input without rows is the same for each row."""
    rank = node.output.shape.rank
    for tensor, label in zip(node.op.inputs, node.labels, strict=True):
        input_rank = tensor.shape.rank
        if rank is None or input_rank is None or input_rank > rank:
            return None
        if label.has_rows and input_rank < rank:
            return None
        if not label.has_rows and input_rank == rank and tensor.shape[0] != 1:
            return None
    return node.same_parts()


def _each_of_its_input(node: Node) -> Parts | None:
    """Rule of operations whose outputs each have the rows of the input at their index."""
    label = node.labels[node.output.value_index]
    are_known = all(other.has_rows or other.kind is Kind.ALIKE for other in node.labels)
    return label.parts if are_known and label.has_rows else None


def _along_last_axis(node: Node) -> Parts | None:
    """Rule of operations along the last axis, which must not be that of the rows."""
    rank = node.ranks[0]
    all_rows = all(label.has_rows for label in node.labels)
    return node.same_parts() if rank is not None and rank > 1 and all_rows else None


def _along_last_axes(node: Node) -> Parts | None:
    """Rule of operations on vectors, matrices or more, with numbers that are alike."""
    return node.parts_if(
        (node.ranks[0] or 0) > _LAST_AXES[node.op.type] and node.are_alike(node.labels[1:])
    )


def _rolled(node: Node) -> Parts | None:
    """Rule of entries that move along axes, which must not be that of the rows."""
    axes, rank = node.static(2), node.ranks[0]
    return node.parts_if(axes is not None and rank and np.all(axes % rank))


def _top_of_last_axis(node: Node) -> Parts | None:
    """Rule of operations that select from the last axis of the first input."""
    return node.parts_if((node.ranks[0] or 0) > 1 and node.are_alike(node.labels[1:]))


def _first_by_others(node: Node) -> Parts | None:
    """Rule of operations on rows with other inputs that are alike, such as a filter."""
    return node.parts_if(node.are_alike(node.labels[1:]))


def _of_matrices(node: Node) -> Parts | None:
    """Rule of products of matrices: of rows, or of a matrix for each row."""
    left, right = node.labels
    first, second = node.ranks
    if first is None or second is None:
        return None
    if node.op.type == "MatMul":
        return node.parts_if(not (node.op.get_attr("transpose_a") or _needs_all_rows(node)))
    if left.has_rows and right.has_rows:
        return node.same_parts() if first == second > 2 else None
    rows, rank, other = (left, first, second) if left.has_rows else (right, second, first)
    alike = Kind.ALIKE in (left.kind, right.kind)
    return rows.parts if alike and rank > max(2, other) else None


def _needs_all_rows(node: Node) -> bool:
    """Returns whether no replica can compute a product, whose second matrix has the rows.

    The first matrix has as many columns as one device has rows, as in a graph convolution.
    TensorFlow takes that for the number of rows wherever it can, so the product is none of rows.
    """
    first, second = node.op.inputs
    is_of_rows = node.labels[1].has_rows and not node.op.get_attr("transpose_b")
    return is_of_rows and first.shape[1] is not None and second.shape[0] is None


def _not_along_rows(node: Node) -> Parts | None:
    """Rule of reductions: they must leave the axis of the rows."""
    axes = reduced_axes(node)
    return node.parts_if(axes is not None and 0 not in axes)


def _concatenated(node: Node) -> Parts | None:
    """Rule of a concatenation, which joins parts if it is along the axis of the rows."""
    axis, rows = node.axis(len(node.labels) - 1, node.output.shape.rank), node.labels[:-1]
    if axis is None or not all(label.has_rows for label in rows):
        return None
    if axis:
        return node.same_parts()
    parts = tuple(k for label in rows for k in label.parts)
    return parts if all(parts) else None


def _stacked(node: Node) -> Parts | None:
    """Rule of a stack, whose new axis must not be the first."""
    rank = node.output.shape.rank
    have_rows = all(label.has_rows for label in node.labels)
    return node.same_parts() if rank and have_rows and node.op.get_attr("axis") % rank else None


def _unstacked(node: Node) -> Parts | None:
    """Rule of an unstacking, which must not be along the axis of the rows."""
    rank = node.ranks[0]
    return node.parts_if(rank is not None and node.op.get_attr("axis") % rank)


def _split(node: Node) -> Parts | None:
    """Rule of a split, which must not be along the axis of the rows."""
    data, axis = (1, 0) if node.op.type == "Split" else (0, 2)
    rows = node.labels[data]
    return rows.parts if rows.has_rows and node.axis(axis, node.ranks[data]) else None


def _expanded(node: Node) -> Parts | None:
    """Rule of a new axis, which must not be the first."""
    return node.parts_if(node.axis(1, node.output.shape.rank))


def _squeezed(node: Node) -> Parts | None:
    """Rule of removed axes, which must not include that of the rows."""
    rank, axes = node.ranks[0], node.op.get_attr("squeeze_dims")
    return node.parts_if(rank and axes and all(axis % rank for axis in axes))


def _transposed(node: Node) -> Parts | None:
    """Rule of a transposition, which must leave the first axis in its place."""
    order = node.static(1)
    return node.parts_if(order is not None and len(order) and order[0] == 0)


def _sliced(node: Node) -> Parts | None:
    """Rule of a slice, which must take all rows."""
    begin, size = node.static(1), node.static(2)
    return node.parts_if(begin is not None and size is not None and begin[0] == 0 and size[0] == -1)


def _strided(node: Node) -> Parts | None:
    """Rule of a slice with strides, which must take all rows."""
    op, strides = node.op, node.static(3)
    changed = op.get_attr("new_axis_mask") | op.get_attr("shrink_axis_mask")
    if changed & 1 or strides is None or strides[0] != 1:
        return None
    # An ellipsis at the front must stand for at least the first axis.
    if op.get_attr("ellipsis_mask") & 1:
        count, rank = op.inputs[1].shape[0], node.ranks[0]
        return node.parts_if(count is not None and rank is not None and count - 1 < rank)
    return node.parts_if(op.get_attr("begin_mask") & op.get_attr("end_mask") & 1)


def _reshaped(node: Node) -> Parts | None:
    """Rule of a reshape: a row may become several, or be put together from several entries."""
    if not node.labels[0].has_rows or not node.output.shape.rank:
        return None
    old_size, new_size = _size_of_row(node.op.inputs[0].shape), _size_of_row(node.output.shape)
    if node.output.shape.rank == 1:
        return tuple(k * (old_size or 0) for k in node.labels[0].parts)
    if new_size is None:
        shape = tf.get_static_value(node.op.inputs[1], partial=True)
        sizes = [None] if shape is None else list(shape)[1:]
        new_size = _product(sizes)
    parts = node.labels[0].parts
    if not old_size or not new_size or any(k * old_size % new_size for k in parts):
        return None
    return tuple(k * old_size // new_size for k in parts)


def _size_of_row(shape: tf.TensorShape) -> int | None:
    """Returns the number of values of an entry of axis 0; None if it is not known."""
    return _product([shape[axis] for axis in range(1, shape.rank)]) if shape.rank else None


def _product(sizes: Sequence[int | None]) -> int | None:
    """Returns the product of sizes; None if one is not known."""
    product = 1
    for size in sizes:
        if size is None or size < 0:
            return None
        product *= int(size)
    return product


def _widened(node: Node) -> Parts | None:
    """Rule of padding and tiling, which must leave the axis of the rows."""
    if node.op.type == "Tile":
        # The other numbers need not be known.
        times = tf.get_static_value(node.op.inputs[1], partial=True)
        return node.parts_if(times is not None and times[0] is not None and times[0] == 1)
    amounts = node.static(1)
    return node.parts_if(amounts is not None and np.all(amounts[0] == 0))


def _looked_up(node: Node) -> Parts | None:
    """Rule of lookups: in a table, or among the rows, by indices that are rows; within rows."""
    table, indices = node.labels[:2]
    batched = node.op.get_attr("batch_dims")
    axis = 0 if node.op.type == "ResourceGather" else node.axis(2, node.ranks[0])
    if axis is None:
        return None
    if axis == 0 and not batched:
        return indices.parts if indices.has_rows else None
    if not table.has_rows or not axis:
        return None
    if indices.kind is Kind.ALIKE and not batched:
        return table.parts
    return node.same_parts() if indices.has_rows and batched else None


def _one_hot(node: Node) -> Parts | None:
    """Rule of one-hot vectors, whose axis must not be the first."""
    return node.parts_if(node.op.get_attr("axis") != 0 and node.are_alike(node.labels[1:]))


def _cropped(node: Node) -> Parts | None:
    """Rule of crops of images: the box at an index must be of the image at this index."""
    numbers = node.op.inputs[2].op
    ends = [numbers.inputs[i] for i in (0, 2)] if numbers.type == "Range" else []
    is_each = [tf.get_static_value(end) for end in ends] == [0, 1]
    images, boxes, indices = node.labels[:3]
    # A literal number of indices would be that of all replicas.
    has_rows = images.has_rows and boxes.has_rows and indices.kind is Kind.COUNT
    return node.same_parts() if is_each and has_rows else None


def _by_equation(node: Node) -> Parts | None:
    """Rule of Einstein sums, whose first letter must stand for the rows."""
    equation = node.op.get_attr("equation")
    equation = equation.decode() if isinstance(equation, bytes) else equation
    inputs, _, output = equation.replace(" ", "").partition("->")
    letter, terms = output[:1], inputs.split(",")
    if not letter or letter == ".":
        return None
    for term, label in zip(terms, node.labels, strict=True):
        if label.has_rows != term.startswith(letter) or letter in term[1:]:
            return None
    return node.same_parts() if letter not in output[1:] else None


# Operations that are linear in all their inputs together.
_ADDITIVE = {"Add", "AddV2", "Sub", "AddN", "Neg", "Identity", "StopGradient", "Pack", "ConcatV2"}
# Operations that are linear in their first input.
_LINEAR_IN_FIRST = {
    *("CheckNumerics", "DivNoNan", "ExpandDims", "Mean", "PreventGradient", "RealDiv", "Reshape"),
    *("Squeeze", "StridedSlice", "Sum", "Transpose", "Unpack"),
}
_ELEMENTWISE = """
    Abs Acos Acosh Add AddN AddV2 Angle Asin Asinh Atan Atan2 Atanh BesselI0e BesselI1e BiasAdd
    Bitcast BitwiseAnd BitwiseOr BitwiseXor Bucketize Cast Ceil CheckNumerics ClipByValue Complex
    ComplexAbs Conj Cos Cosh Digamma Div DivNoNan Elu EluGrad Equal Erf Erfc Erfinv Exp Expm1 Floor
    FloorDiv FloorMod Greater GreaterEqual Identity Igamma Igammac Imag Inv IsFinite IsInf IsNan
    LeakyRelu LeakyReluGrad Less LessEqual Lgamma Log Log1p LogicalAnd LogicalNot LogicalOr Maximum
    Minimum Mod Mul MulNoNan Ndtri Neg NextAfter NotEqual OnesLike Pow PreventGradient Real RealDiv
    Reciprocal ReciprocalGrad Relu Relu6 Relu6Grad ReluGrad Rint Round Rsqrt RsqrtGrad Select
    SelectV2 Selu SeluGrad Sigmoid SigmoidGrad Sign Sin Sinh Softplus SoftplusGrad Softsign
    SoftsignGrad Sqrt SqrtGrad Square SquaredDifference StopGradient Sub Tan Tanh TanhGrad
    TruncateDiv TruncateMod Xdivy Xlog1py Xlogy ZerosLike
"""
_OF_TEXTS = """
    AsString RegexFullMatch RegexReplace StaticRegexFullMatch StaticRegexReplace StringJoin
    StringLength StringLower StringStrip StringToHashBucket StringToHashBucketFast
    StringToHashBucketStrong StringToNumber StringUpper
"""
_BY_WEIGHTS = """
    AvgPool AvgPool3D Conv2D Conv3D DepthToSpace DepthwiseConv2dNative EnsureShape LRN MaxPool
    MaxPool3D ResizeArea ResizeBicubic ResizeBilinear ResizeNearestNeighbor SpaceToDepth
"""
_ALONG_LAST_AXIS = """
    LogSoftmax Softmax SoftmaxCrossEntropyWithLogits SparseSoftmaxCrossEntropyWithLogits
"""
# These keep the number of rows, also along the axis of the rows.
_REARRANGING = {"Cumprod", "Cumsum", "CumulativeLogsumexp", "ReverseV2", "Roll"}
# How many of the last axes these operations read together.
_LAST_AXES = {
    **dict.fromkeys(("AdjustHue", "AdjustSaturation", "AdjustContrastv2"), 3),
    **dict.fromkeys(("FFT", "IFFT", "IRFFT", "MatrixDiagV3", "RFFT"), 1),
    **dict.fromkeys(("FFT2D", "IFFT2D", "IRFFT2D", "RFFT2D"), 2),
    **dict.fromkeys(("Cholesky", "LogMatrixDeterminant", "MatrixBandPart", "MatrixDeterminant"), 2),
    **dict.fromkeys(("MatrixDiagPartV3", "MatrixInverse", "Qr", "SelfAdjointEigV2", "Svd"), 2),
    **dict.fromkeys(("FFT3D", "IFFT3D", "IRFFT3D", "RFFT3D"), 3),
}
_ALONG_GIVEN_AXES = """
    All Any ArgMax ArgMin Cumprod Cumsum EuclideanNorm Max Mean Min Prod ReverseV2 Sum
"""
_RULES: dict[str, Rule] = {
    **dict.fromkeys((*_ELEMENTWISE.split(), *_OF_TEXTS.split()), _elementwise),
    **dict.fromkeys(_BY_WEIGHTS.split(), _first_by_others),
    **dict.fromkeys(_ALONG_LAST_AXIS.split(), _along_last_axis),
    **dict.fromkeys(_ALONG_GIVEN_AXES.split(), _not_along_rows),
    **dict.fromkeys(_LAST_AXES, _along_last_axes),
    **dict.fromkeys(("MatMul", "BatchMatMul", "BatchMatMulV2", "BatchMatMulV3"), _of_matrices),
    **dict.fromkeys(("Split", "SplitV"), _split),
    **dict.fromkeys(("Pad", "PadV2", "MirrorPad", "Tile"), _widened),
    **dict.fromkeys(("GatherV2", "ResourceGather"), _looked_up),
    "TopKV2": _top_of_last_axis,
    "ConcatV2": _concatenated,
    "CropAndResize": _cropped,
    "Einsum": _by_equation,
    "ExpandDims": _expanded,
    "IdentityN": _each_of_its_input,
    "OneHot": _one_hot,
    "Pack": _stacked,
    "Reshape": _reshaped,
    "Roll": _rolled,
    "Slice": _sliced,
    "Squeeze": _squeezed,
    "StridedSlice": _strided,
    "Transpose": _transposed,
    "Unpack": _unstacked,
}

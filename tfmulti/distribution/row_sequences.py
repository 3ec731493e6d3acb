"""Rules for sequences: tensors and lists whose entries each have the rows of the batch.

A tensor such as `[time, rows, features]` has the rows along axis 1. Recurrent layers and scans make
such tensors, and take them apart into lists of tensors (`TensorArray`), one for each time step. The
label of a sequence is GLOBAL, or LOCAL behind a loop, for all operations but those here. Its
`entries` are the parts of the rows that each entry has, so that these operations find rows again.
"""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfmulti.distribution.row_rules import Kind, Label, Node, Parts, reduced_axes


def label_after(node: Node) -> Label | None:
    """Returns the label of an output that is a sequence or a part of one; None for any other."""
    has_entries = bool(node.labels) and bool(node.labels[0].entries)
    rule = (_OF_SEQUENCES if has_entries else _OF_OTHERS).get(node.op.type)
    return None if rule is None else rule(node)


def joined(first: Label, second: Label, dtype: tf.DType) -> Label | None:
    """Returns the label of a value that a loop passes on, which has one of two labels.

    None if nothing is known of such a value. A new list has the label ALIKE until a loop has put
    rows into it.

    Args:
        first: the label before the loop.
        second: the label after a pass of the loop.
        dtype: the type of the value.
    """
    if first == second:
        return first
    is_list = dtype == tf.variant
    for empty, other in ((first, second), (second, first)):
        if is_list and empty.kind is Kind.ALIKE and other.entries:
            return other
    same = first.entries == second.entries
    return second if is_list and first.entries and same else None


def _sequence(node: Node, entries: Parts) -> Label:
    """Returns the label of a sequence that an operation makes."""
    for label in node.labels:
        if label.kind is Kind.LOCAL:
            return Label(Kind.LOCAL, reason=label.reason, entries=entries)
    return Label(Kind.GLOBAL, entries=entries)


def _of_entry(node: Node, *others: int) -> Label | None:
    """Returns the label of an entry of a sequence, if the other inputs are alike."""
    is_known = node.are_alike([node.labels[i] for i in others])
    return Label(Kind.ROWS, node.labels[0].entries) if is_known else None


def _transposed(node: Node) -> Label | None:
    """Rule of a transposition that swaps the first two axes, of a sequence or of rows."""
    order, label = node.static(1), node.labels[0]
    if order is None or list(order[:2]) != [1, 0]:
        return None
    if label.kind is Kind.ROWS:
        return _sequence(node, label.parts)
    return _of_entry(node) if label.entries else None


def _entry(node: Node) -> Label | None:
    """Rule of an entry of a list, at an index that is alike."""
    return _of_entry(node, 1)


def _with_entry(node: Node) -> Label | None:
    """Rule of a list in which one entry is replaced."""
    sequence, index, item = node.labels
    is_list = sequence.entries or sequence.kind is Kind.ALIKE
    if not is_list or index.kind is not Kind.ALIKE or item.kind is not Kind.ROWS:
        return None
    return _sequence(node, item.parts) if sequence.entries in ((), item.parts) else None


def _same(node: Node) -> Label | None:
    """Rule of an operation whose output has the same entries, such as a tensor made of a list."""
    return _sequence(node, node.labels[0].entries)


def _reduced(node: Node) -> Label | None:
    """Rule of a sum or another reduction over the entries."""
    is_over_entries = reduced_axes(node) == {0} and not node.op.get_attr("keep_dims")
    return _of_entry(node) if is_over_entries else None


def _reversed(node: Node) -> Label | None:
    """Rule of a reversal of the entries."""
    axes = node.static(1)
    return _same(node) if axes is not None and list(axes) == [0] else None


def _sliced(node: Node) -> Label | None:
    """Rule of `x[t]`."""
    op = node.op
    masks = {name: op.get_attr(f"{name}_mask") for name in ("shrink_axis", "new_axis", "ellipsis")}
    count = op.inputs[1].shape[0]
    if masks != {"shrink_axis": 1, "new_axis": 0, "ellipsis": 0} or count != 1:
        return None
    return _of_entry(node, 1)


def _stacked(node: Node) -> Label | None:
    """Rule of a stack of tensors with rows along a new first axis."""
    are_rows = all(label.kind is Kind.ROWS for label in node.labels)
    parts = node.same_parts()
    if not are_rows or parts is None or node.op.get_attr("axis") != 0:
        return None
    return _sequence(node, parts)


def _unstacked(node: Node) -> Label | None:
    """Rule of the tensors along the first axis."""
    return None if node.op.get_attr("axis") else _of_entry(node)


_Rules = dict[str, Callable[[Node], Label | None]]
# The rules of operations whose first input is a sequence.
_OF_SEQUENCES: _Rules = {
    **dict.fromkeys(("All", "Any", "Max", "Mean", "Min", "Prod", "Sum"), _reduced),
    "Identity": _same,
    "ReverseV2": _reversed,
    "StridedSlice": _sliced,
    "TensorListFromTensor": _same,
    "TensorListGetItem": _entry,
    "TensorListSetItem": _with_entry,
    "TensorListStack": _same,
    "Transpose": _transposed,
    "Unpack": _unstacked,
}
# The rules of other operations that make a sequence.
_OF_OTHERS: _Rules = {
    "Pack": _stacked,
    "TensorListSetItem": _with_entry,
    "Transpose": _transposed,
}

"""Builds values of the global batch from what one replica computes from its own rows.

The labels of `row_labels` show where rows were reduced or mixed. From there on this module builds
the operations again, on sums over all replicas or on the rows of all replicas. So every formula is
right: a sum, a mean over unmasked rows, or a contrastive loss.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from tfmulti.distribution import custom_gradients, losses, row_labels
from tfmulti.distribution.custom_gradients import custom_gradient
from tfmulti.distribution.replica_context import (
    gather_rows_with_gradient,
    global_gradient,
    sum_with_gradient,
)
from tfmulti.distribution.replica_slice import PerThread, ReplicaSlice
from tfmulti.distribution.row_labels import label_of
from tfmulti.distribution.row_rules import (
    Kind,
    Label,
    counts_own_rows,
    is_differentiable,
    reads_all_rows,
    varying_inputs,
)
from tfmulti.distribution.tape_records import TapeRecord
from tfmulti.errors import ModelError


@dataclass
class _Built:
    """The tensors that were built for one replica, by the names of the step's own tensors.

    Attributes:
        averages: values in the form of `averaged`.
        globals: values in the form of `of_one_device`.
        rows: this replica's rows, computed with values of the global batch.
        leaves: tensors of the user's step from which the others were built.
        watched: the values of one device by which tapes differentiate in place of the step's own.
        mixes: whether replicas may use a value of the global batch differently. This is so if
            `rows` depend on other rows by more than their number.
    """

    averages: dict[str, tf.Tensor] = field(default_factory=dict)
    globals: dict[str, tf.Tensor] = field(default_factory=dict)
    rows: dict[str, tf.Tensor] = field(default_factory=dict)
    leaves: dict[str, tf.Tensor] = field(default_factory=dict)
    watched: dict[str, tf.Tensor] = field(default_factory=dict)
    mixes: bool = False


# Gets a tensor of the step and the one that was made of it (`global_values.rows_of_one_device`).
IsLost = Callable[[tf.Tensor, tf.Tensor], bool]
# By the replica's index, since the replicas of a process are traced into one graph.
_built: weakref.WeakKeyDictionary[tf.Graph, dict[int, _Built]] = weakref.WeakKeyDictionary()
# What the tape has recorded that this thread asks for a gradient; None if that is unknown.
asked_tape: PerThread[TapeRecord | None] = PerThread(None)


def own_part(replica_slice: ReplicaSlice, of_all: tf.Tensor) -> tf.Tensor:
    """Returns the part of the rows of all replicas that this replica reads."""
    entries = tf.shape(of_all, tf.int64)[0] // tf.maximum(replica_slice.global_rows, 1)
    count = tf.maximum(replica_slice.own_rows, 1)
    # A replica without rows reads one that does not count.
    first = tf.minimum(replica_slice.first_row, replica_slice.global_rows - count)
    return of_all[entries * first : entries * (first + count)]


@contextlib.contextmanager
def builder_of(replica_slice: ReplicaSlice, value: tf.Tensor) -> Iterator[Builder]:
    """Yields a builder that builds from a value, in the graph of the value.

    This may be the step's graph while a branch of a condition is traced. So replicas exchange the
    value outside of the branch.
    """
    with value.graph.as_default():
        yield Builder(replica_slice, value.graph)


Build = Callable[["Builder", tf.Tensor], tf.Tensor]


def _outside_of_branches(build: Build) -> Build:
    """Returns a method that builds a tensor from outside of a branch there, and not in the branch.

    Inside the branch an input stands for such a tensor. So replicas exchange its values outside,
    where all of them come by.
    """

    @functools.wraps(build)
    def build_outside(self: Builder, value: tf.Tensor) -> tf.Tensor:
        outside = row_labels.outside_of_branches(value)
        if outside is value or label_of(value).kind in (Kind.ALIKE, Kind.LOCAL):
            return build(self, value)
        with builder_of(self._replica_slice, outside) as builder:
            return build(builder, outside)

    return build_outside


class Builder:
    """Builds values of the global batch in the graph of one replica's step."""

    def __init__(self, replica_slice: ReplicaSlice, graph: tf.Graph) -> None:
        self._replica_slice, self._graph = replica_slice, graph
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        number = int(tf.get_static_value(replica))
        self._built = _built.setdefault(graph, {}).setdefault(number, _Built())

    def leaves_behind(self, built: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the step's tensors from which tensors were built, and that have a gradient."""
        leaves, visited, stack = [], set(), list(built)
        while stack:
            tensor = stack.pop()
            if tensor.name in visited:
                continue
            visited.add(tensor.name)
            if tensor.name not in self._built.leaves or self._is_unknown_to_tape(tensor):
                stack += tensor.op.inputs
            elif is_differentiable(tensor) and tensor.op.type != "Const":
                leaves.append(tensor)
        return leaves[::-1]

    def on_tape(self, built: tf.Tensor) -> tf.Tensor:
        """Returns the same value, which a gradient tape can differentiate by the step's tensors.

        A tape does not record the operations that `_again` creates.
        """
        leaves = self.leaves_behind([built]) if is_differentiable(built) else []
        if not leaves or leaves[0] is built:
            return built

        @custom_gradient
        def identity(value: tf.Tensor, *_: tf.Tensor) -> Any:
            def back(upstream: tf.Tensor) -> Any:
                gradients = self.gradients(built, leaves, upstream)
                if losses.is_recorded.get():
                    self._leaf(upstream)
                    gradients = [
                        g if g is None else self.factor_on_tape(tf.convert_to_tensor(g))
                        for g in gradients
                    ]
                return (None, *gradients)

            return tf.identity(value), back

        recorded: tf.Tensor = identity(built, *leaves)
        return recorded

    def factor_on_tape(self, built: tf.Tensor) -> tf.Tensor:
        """Returns what `on_tape` does, for a value by which each replica multiplies its own part.

        So the gradients by this value differ between replicas, and must be summed.
        """
        value = self.on_tape(built)
        self._built.mixes = self._built.mixes or value is not built
        return value

    def gradients(self, built: Any, leaves: Sequence[tf.Tensor], upstream: Any = None) -> list[Any]:
        """Returns the gradients of built values by tensors of the user's step.

        The tape does not differentiate values that it has not recorded.
        """
        stops = [*leaves, *self._constants(leaves)]
        found: list[Any] = tf.gradients(built, leaves, upstream, stop_gradients=stops)
        return found

    def _is_unknown_to_tape(self, leaf: tf.Tensor) -> bool:
        """Returns whether another tape watches a leaf than the one that is asked for a gradient."""
        record = asked_tape.get()
        is_watched = any(leaf is new for new in self._built.watched.values())
        return is_watched and record is not None and not record.follows(leaf)

    def _constants(self, leaves: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the built values of operations that the tape has not recorded.

        The values that were built from the leaves themselves are left out.
        """
        record, built = asked_tape.get(), self._built
        if record is None or record.graph is not self._graph:
            return []
        unrecorded = record.unrecorded()
        of_leaves = {leaf.name for leaf in leaves}
        of_leaves |= {name for name, new in built.watched.items() if new.name in of_leaves}
        return [
            tensor
            for table in (built.averages, built.globals, built.rows)
            for name, tensor in table.items()
            if name.rpartition(":")[0] in unrecorded
            and name not in of_leaves
            and tensor.name != name
        ]

    def watched(self, value: tf.Tensor, is_lost: IsLost = lambda *_: False) -> tf.Tensor:
        """Returns a value of one device, or this replica's rows of it, by which to differentiate.

        Later the builder uses the new tensor wherever the step uses the given one. If `is_lost`
        says so of the tensor that was made before, another one is made from the same leaves.
        """
        label, built = label_of(value), self._built
        if value.name in built.watched and is_lost(value, built.watched[value.name]):
            old = built.rows[value.name] = built.watched.pop(value.name)
            built.leaves.pop(old.name, None)
        if value.name not in built.watched:
            if label.kind is Kind.MIXED:
                new = built.rows[value.name] = self.on_tape(self.rows(value))
                row_labels.mark(new, row_labels.rows(label.parts))
            else:
                new = built.globals[value.name] = self.on_tape(self.whole(value))
                built.averages[value.name] = new
                row_labels.mark(new, row_labels.ALIKE)
            built.watched[value.name] = self._leaf(new)
        return built.watched[value.name]

    def has_built(self, value: tf.Tensor) -> bool:
        """Returns whether values of the global batch were built from a value built again."""
        return value.name in self._built.rows or value.name in self._built.globals

    def watched_instead(self, sources: Any) -> Any:
        """Returns sources with those tensors that tapes watch in their place (`watched`)."""
        watched = self._built.watched

        def instead(source: Any) -> Any:
            return watched.get(source.name, source) if isinstance(source, tf.Tensor) else source

        return tf.nest.map_structure(instead, sources) if watched else sources

    def summed(self, target: tf.Tensor) -> tf.Tensor:
        """Returns a value with the gradient of the sum of a target's numbers on all replicas."""
        kind = label_of(target).kind
        if kind in (Kind.ROWS, Kind.MIXED):
            rows = self._counted(self.rows(target))
            return self._over_weight(rows)
        if kind in (Kind.ALIKE, Kind.MEAN, Kind.LOCAL):
            return self._leaf(target)
        return self.average(target) if kind in (Kind.SUM, Kind.COUNT) else self.whole(target)

    @_outside_of_branches
    def average(self, value: tf.Tensor) -> tf.Tensor:
        """Returns a value that is linear in sums and means, in the form of `averaged`."""
        built = self._built.averages
        if value.name not in built:
            built[value.name] = self._linear(value, self.average, as_sum=False)
        return built[value.name]

    @_outside_of_branches
    def part(self, value: tf.Tensor) -> tf.Tensor:
        """Returns a value that is linear in sums and means, in the form of `part_of_sum`."""
        kind = label_of(value).kind
        if kind is Kind.SUM and not row_labels.is_reduction_of_rows(value):
            return self._linear(value, self.part, as_sum=True)
        if kind is Kind.SUM:
            return value if row_labels.is_state_of_metric(value) else self._own_sum(value)
        if kind is Kind.MEAN and is_differentiable(value):
            return tf.math.multiply_no_nan(value, tf.cast(self._replica_slice.weight, value.dtype))
        # Replica 0 has rows in every step. So it gives the whole value, and the others give 0.
        number = tf.distribute.get_replica_context().replica_id_in_sync_group
        whole = self.whole(value)
        return tf.where(number == 0, whole, tf.zeros_like(whole))

    def _linear(
        self, value: tf.Tensor, build_input: Callable[[tf.Tensor], tf.Tensor], *, as_sum: bool
    ) -> tf.Tensor:
        """Returns a linear value, built from the inputs of its operation in the same form.

        Args:
            value: a tensor.
            build_input: builds that form of an input.
            as_sum: whether the form is that of `part_of_sum`; otherwise it is that of `averaged`.
        """
        label, op = label_of(value), value.op
        if label.kind is Kind.COUNT:
            return self._count(value)
        if label.kind is not Kind.SUM:
            return self._leaf(value)
        if not is_differentiable(value) and not as_sum:
            return self.whole(value)
        # A replica whose weight is 0 may hold a part of a metric's state.
        if row_labels.is_state_of_metric(value):
            return self.whole(value)
        if row_labels.is_reduction_of_rows(value):
            if op.type == "Sum":
                return self._over_weight(self._own_sum(value))
            return self._own_reduction(value)
        varying = varying_inputs(op, [label_of(t) for t in op.inputs])
        return self._again(
            value,
            [build_input(t) if i in varying else self.whole(t) for i, t in enumerate(op.inputs)],
        )

    @_outside_of_branches
    def whole(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the value of one device, the same on every replica."""
        built = self._built.globals
        if value.name not in built:
            self._build_needed(value)
            built[value.name] = self._whole(value)
            if built[value.name] is not value:
                # If the values are indices, all replicas look up the same entries.
                row_labels.mark(built[value.name], row_labels.ALIKE)
        return built[value.name]

    def _build_needed(self, value: tf.Tensor) -> None:
        """Builds what `whole` or `rows` of a value will need, in the order of the graph.

        Without it these two would call each other for every operation of a long chain, and exceed
        Python's recursion limit.
        """
        stack = self._needed(value)
        while stack:
            tensor = stack[-1]
            if self._is_built(tensor):
                stack.pop()
            elif needed := self._needed(tensor):
                stack += needed
            elif label_of(tensor).kind is Kind.MIXED:
                self.rows(tensor)
            else:
                self.whole(tensor)

    def _needed(self, value: tf.Tensor) -> list[tf.Tensor]:
        """Returns those inputs of a value's operation that must be built first."""
        op = value.op
        inputs = list(op.inputs)
        if label_of(value).kind is Kind.MIXED:
            inputs = [t for i, t in enumerate(inputs) if not counts_own_rows(op, i)]
        elif row_labels.is_state_of_metric(value):
            return []
        elif row_labels.is_reduction_of_rows(value) and value.shape.is_fully_defined():
            inputs = inputs[:1]
        return [t for t in inputs if not self._is_built(t)]

    def _is_built(self, value: tf.Tensor) -> bool:
        """Returns whether a value is built already, need not be built, or is built elsewhere."""
        if row_labels.outside_of_branches(value) is not value:
            return True
        kind = label_of(value).kind
        if kind is Kind.MIXED:
            return value.name in self._built.rows
        return kind not in (Kind.GLOBAL, Kind.SUM) or value.name in self._built.globals

    def _whole(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the value of one device, from inputs that were built before."""
        label, op = label_of(value), value.op
        if label.kind in (Kind.ALIKE, Kind.LOCAL):
            return self._leaf(value)
        if label.kind is Kind.COUNT:
            return self._count(value)
        if row_labels.is_rearranged(value):
            return self._again(value, [self.whole(t) for t in op.inputs])
        if label.kind in (Kind.ROWS, Kind.MIXED):
            return self._all_rows(self.rows(value), label)
        if label.kind is Kind.MEAN and not self._follows_in_branch(value):
            return self._total(self._leaf(value), is_sum=False)
        if row_labels.is_state_of_metric(value):
            return self._total(self._leaf(value), is_sum=True)
        if row_labels.is_reduction_of_rows(value):
            if not value.shape.is_fully_defined():
                return self._again(value, [self.whole(t) for t in op.inputs])
            if op.type == "Sum":
                return self._total(self._own_sum(value), is_sum=True)
            return self._total(self._own_reduction(value), is_sum=False)
        return self._again(value, [self.whole(t) for t in op.inputs])

    def _follows_in_branch(self, value: tf.Tensor) -> bool:
        """Returns whether a branch computes a value from sums and means alone.

        Replicas cannot exchange it there, but they can exchange what comes from outside.
        """
        kinds = {label_of(t).kind for t in value.op.inputs}
        is_linear = bool(kinds) and kinds <= {Kind.ALIKE, Kind.COUNT, Kind.MEAN, Kind.SUM}
        is_reduction = row_labels.is_reduction_of_rows(value)
        return row_labels.is_branch(self._graph) and is_linear and not is_reduction

    @_outside_of_branches
    def rows(self, value: tf.Tensor) -> tf.Tensor:
        """Returns this replica's rows, computed with values of the global batch where needed.

        Raises:
            ModelError: such a value needs a collective, and the step takes several passes.
        """
        label, built = label_of(value), self._built.rows
        if label.kind is not Kind.MIXED:
            return self._leaf(value)
        if value.name not in built:
            self._build_needed(value)
            self._built.mixes = self._built.mixes or not label.by_count
            if row_labels.is_rearranged(value):
                built[value.name] = own_part(self._replica_slice, self.whole(value))
                return built[value.name]
            inputs = []
            for i, tensor in enumerate(value.op.inputs):
                has_rows = label_of(tensor).kind in (Kind.ROWS, Kind.MIXED)
                if counts_own_rows(value.op, i):
                    inputs.append(tensor)
                elif has_rows and not reads_all_rows(value.op, i):
                    inputs.append(self.rows(tensor))
                else:
                    inputs.append(self.whole(tensor))
            built[value.name] = self._again(value, inputs)
        return built[value.name]

    def _leaf(self, value: tf.Tensor) -> tf.Tensor:
        """Returns a tensor of the user's step, and notes it, since gradients continue there."""
        self._built.leaves.setdefault(value.name, value)
        return value

    def _own_sum(self, value: tf.Tensor) -> tf.Tensor:
        """Returns a sum over those of this replica's rows that count."""
        return self._counted(self._own_reduction(value))

    def _own_reduction(self, value: tf.Tensor) -> tf.Tensor:
        """Returns a sum or mean over the rows that this replica reads."""
        if label_of(value.op.inputs[0]).kind is not Kind.MIXED:
            return self._leaf(value)
        return self._again(value, [self.rows(value.op.inputs[0]), value.op.inputs[1]])

    def _counted(self, value: tf.Tensor) -> tf.Tensor:
        """Returns a value of this replica's rows, or 0 if its only row does not count."""
        counts = tf.cast(self._replica_slice.own_rows > 0, value.dtype)
        if is_differentiable(value):
            return tf.math.multiply_no_nan(value, counts)
        return value * counts

    def _over_weight(self, value: tf.Tensor) -> tf.Tensor:
        """Returns a part of a sum divided by the weight, as a part of a mean over replicas."""
        dtype = value.dtype if is_differentiable(value) else tf.float32
        weight = tf.cast(self._replica_slice.weight, dtype)
        return tf.math.divide_no_nan(tf.cast(value, weight.dtype), weight)

    @_outside_of_branches
    def _count(self, value: tf.Tensor) -> tf.Tensor:
        """Returns a value that depends on the number of rows, for the global batch."""
        built = self._built.globals
        if value.name not in built:
            op = value.op
            if row_labels.is_reduction_of_rows(value):
                built[value.name] = self._global_shape(value)
            elif label_of(value).kind is Kind.ALIKE:
                return self._leaf(value)
            else:
                built[value.name] = self._again(value, [self._count(t) for t in op.inputs])
            row_labels.mark(built[value.name], row_labels.ALIKE)
        return built[value.name]

    def _global_shape(self, value: tf.Tensor) -> tf.Tensor:
        """Returns the shape or size that a tensor with rows has on one device."""
        tensor = value.op.inputs[0]
        read_rows = tf.cast(tf.maximum(self._replica_slice.own_rows, 1), value.dtype)
        global_rows = tf.cast(self._replica_slice.global_rows, value.dtype)
        shape = tf.shape(tensor, value.dtype)
        # A row has the same number of entries of axis 0 on every replica.
        first_size = shape[0] // read_rows * global_rows
        global_shape = tf.concat([[first_size], shape[1:]], 0)
        return global_shape if value.op.type == "Shape" else tf.reduce_prod(global_shape)

    def _all_rows(self, rows: tf.Tensor, label: Label) -> tf.Tensor:
        """Returns the rows of all replicas, in the order of one device."""
        self._check_exchange()
        replica_slice = self._replica_slice
        read_rows = tf.maximum(replica_slice.own_rows, 1)
        if len(label.parts) == 1:
            return self._gathered(rows, tf.shape(rows, tf.int64)[0] // read_rows)
        sizes = [tf.cast(k, tf.int64) * read_rows for k in label.parts]
        parts = tf.split(rows, sizes)
        return tf.concat(
            [
                self._gathered(part, tf.cast(k, tf.int64))
                for part, k in zip(parts, label.parts, strict=True)
            ],
            0,
        )

    def _gathered(self, rows: tf.Tensor, entries: tf.Tensor) -> tf.Tensor:
        """Returns the rows of all replicas, with `entries` entries of axis 0 for a row."""
        replica_slice = self._replica_slice
        replica_slice.note_gather()
        of_all = functools.partial(_whole_gradient, replica_slice, self._built)
        return gather_rows_with_gradient(replica_slice, rows, entries, of_all)

    def _total(self, value: tf.Tensor, *, is_sum: bool) -> tf.Tensor:
        """Returns the sum of all replicas' parts of a sum, or their mean weighted by rows."""
        self._check_exchange()
        replica_slice, built = self._replica_slice, self._built
        if not is_differentiable(value):
            return sum_with_gradient(value)

        @custom_gradient
        def summed(value: tf.Tensor) -> Any:
            weight = tf.cast(replica_slice.weight, value.dtype)

            def back(upstream: tf.Tensor) -> tf.Tensor:
                of_all = _whole_gradient(replica_slice, built, upstream)
                return tf.math.divide_no_nan(of_all, weight) if is_sum else of_all

            own = value if is_sum else tf.math.multiply_no_nan(value, weight)
            return sum_with_gradient(own), back

        found: tf.Tensor = summed(value)
        return found

    def _check_exchange(self) -> None:
        """Raises ModelError where replicas cannot exchange values for a step of the user's own."""
        if row_labels.is_branch(self._graph):
            raise ModelError(
                "the step changes a metric or a variable inside a condition or a loop, by a value "
                "that needs the rows of all replicas, which cannot be exchanged there. Compute the "
                "value outside, and choose between it and the old one by tf.where."
            )
        if losses.in_passes():
            raise ModelError(
                "the step computes a value from all rows of a batch together, which --microbatches "
                "splits. Return a value for each example from its own row, let the optimizer clip "
                "gradients (global_clipnorm=…), or leave --microbatches out."
            )

    def _again(self, value: tf.Tensor, inputs: Sequence[tf.Tensor]) -> tf.Tensor:
        """Returns the same output of the same operation with other inputs."""
        op = value.op
        # `tf.custom_gradient` makes an IdentityN, whose gradient is by the old inputs.
        if op.type == "IdentityN":
            return inputs[value.value_index]
        inputs = [
            tf.cast(new_input, old_input.dtype) if new_input.dtype != old_input.dtype else new_input
            for new_input, old_input in zip(inputs, op.inputs, strict=True)
        ]
        if all(new is old for new, old in zip(inputs, op.inputs, strict=True)):
            return value
        attributes = {
            name: attribute
            for name, attribute in op.node_def.attr.items()
            if not name.startswith("_") or name == "_gradient_op_type"
        }
        if op.type.endswith("PartitionedCall") and "_gradient_op_type" not in attributes:
            # Inside two tapes TensorFlow makes a loop a function, whose gradient only these tapes
            # know. A `tf.autodiff.ForwardAccumulator` makes each operation one.
            raise ModelError(
                "the train_step differentiates a loop or a condition on tensors inside two "
                "gradient tapes, or uses a ForwardAccumulator, for a value that needs the rows of "
                "all replicas. Compute the value without a loop, for example by a sum or a matrix "
                "product, and differentiate it with gradient tapes."
            )
        new_op = value.graph.create_op(
            op.type,
            list(inputs),
            [output.dtype for output in op.outputs],
            attrs=attributes,
            op_def=op.op_def,
            # A name must not begin with "_".
            name=op.name.rpartition("/")[2].lstrip("_") + "_of_global_batch",
        )
        new_value = new_op.outputs[value.value_index]
        if new_value.shape.rank is None and value.shape.rank is not None:
            new_value.set_shape([None] * value.shape.rank)
        # If TensorFlow has no gradient for an operation, the step gives it nothing but data.
        has_gradient = custom_gradients.Registry.has_gradient(new_op)
        return new_value if has_gradient else tf.stop_gradient(new_value)


def _whole_gradient(replica_slice: ReplicaSlice, built: _Built, upstream: tf.Tensor) -> tf.Tensor:
    """Returns the global batch's gradient with respect to a value that all replicas share.

    If everything that depends on the value is alike on all replicas, each replica already has this
    gradient. Otherwise the replicas' parts are summed.
    """
    # The gradient of a lookup of rows (`tf.gather`) is a tf.IndexedSlices.
    upstream = tf.convert_to_tensor(upstream)
    return global_gradient(replica_slice, upstream) if built.mixes else upstream

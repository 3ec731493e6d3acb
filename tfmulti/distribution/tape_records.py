"""What a gradient tape has recorded of a step's graph.

A tape differentiates by nothing that was computed before it began, after it ended, or while it was
stopped. Values of the global batch are built later, from the step's operations. So their gradients
must stop at the operations that the tape has not recorded. TensorFlow does not tell which these
are, so this module notes when a tape records, by the number of operations in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from tfmulti.distribution.row_rules import is_differentiable


class TapeRecord:
    """Notes when one tape has recorded operations of one graph.

    Attributes:
        graph: the graph of the step.
        replica: the index of the replica whose step has made the tape.
    """

    def __init__(self, graph: tf.Graph, replica: int) -> None:
        self.graph, self.replica = graph, replica
        # When the tape began and ended, in turns.
        self._changes: list[int] = []
        self._followed: set[str] = set()
        self._watched_at: dict[str, int] = {}

    @property
    def is_recording(self) -> bool:
        """Whether the tape records now."""
        return len(self._changes) % 2 == 1

    def begin(self) -> None:
        """Notes that the tape records from now on."""
        if not self.is_recording:
            self._changes.append(self._now())

    def end(self) -> None:
        """Notes that the tape records no longer."""
        if self.is_recording:
            self._changes.append(self._now())

    def watch(self, tensor: tf.Tensor, *, is_followed: bool) -> None:
        """Notes that the tape watches a tensor of the graph from now on.

        Args:
            tensor: the tensor.
            is_followed: whether a tape has followed the tensor since it was computed.
        """
        self._followed.add(tensor.name)
        if tensor.graph is self.graph and not (is_followed and self.has_recorded(tensor)):
            self._watched_at.setdefault(tensor.name, self._now())

    def follows(self, tensor: tf.Tensor) -> bool:
        """Returns whether the tape watches a tensor, or has recorded how it was computed."""
        return tensor.name in self._followed or self.has_recorded(tensor)

    def has_recorded(self, tensor: tf.Tensor) -> bool:
        """Returns whether the tape has recorded how a tensor was computed, as far as is known."""
        return tensor.graph is not self.graph or tensor.op.name not in self.unrecorded()

    def unrecorded(self) -> set[str]:
        """Returns the names of those operations of the graph that the tape has not recorded."""
        return {
            op.name
            for (index, op), is_on in zip(self._operations(), self._states(), strict=False)
            if not is_on or self._is_before_watch(index, op)
        }

    def _now(self) -> int:
        return len(self.graph.get_operations())

    def _operations(self) -> Iterator[tuple[int, tf.Operation]]:
        return enumerate(self.graph.get_operations())

    def _states(self) -> Iterator[bool]:
        """Yields for each operation of the graph whether the tape was recording."""
        is_on, index = False, 0
        for change in (*self._changes, self._now()):
            yield from (is_on for _ in range(index, change))
            is_on, index = not is_on, change

    def _is_before_watch(self, index: int, op: tf.Operation) -> bool:
        """Returns whether an operation uses only tensors that the tape began to watch later."""
        if index >= max(self._watched_at.values(), default=0):
            return False
        inputs = [t for t in op.inputs if is_differentiable(t) and t.op.type != "Const"]
        return bool(inputs) and all(index < self._watched_at.get(t.name, 0) for t in inputs)

"""Notes what a step computes, in order, to find the place where two runs differ first.

Inside `noting()`, a step that `returning_notes` has made notes the outputs of layers and losses,
and the gradients that optimizers apply. Each note has the line of the user's program that computes
the value. Each thread has its own notes, because the replicas of a process are traced in several.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from tfmulti.distribution.replica_slice import PerThread
from tfmulti.training.state.user_lines import is_of_user

KINDS = ("layer", "loss", "gradient")


@dataclass
class Notes:
    """The values that one run of a step has computed.

    Attributes:
        keys: for each note its kind (one of `KINDS`), its name, and how many notes with both came
            before it.
        lines: for each note the line of the user's program, or None if it is unknown.
        tensors: for each note the value.
        graph: the graph that is traced, or None in eager mode.
    """

    keys: list[tuple[str, str, int]] = field(default_factory=list)
    lines: list[str | None] = field(default_factory=list)
    tensors: list[tf.Tensor] = field(default_factory=list)
    graph: Any = None

    def add(self, kind: str, name: str, value: Any) -> None:
        """Notes a tensor of the step's graph, and ignores any other value.

        A tensor inside a loop or a condition has another graph. The step cannot return it.

        Args:
            kind: `layer`, `loss` or `gradient`.
            name: the name of the layer, the loss or the variable.
            value: the value.
        """
        if isinstance(value, tf.IndexedSlices):
            value = tf.convert_to_tensor(value)
        if not isinstance(value, tf.Tensor) or value.dtype == tf.string:
            return
        if isinstance(value, keras.KerasTensor) or getattr(value, "graph", None) is not self.graph:
            return
        count = sum(key[:2] == (kind, name) for key in self.keys)
        self.keys.append((kind, name, count))
        self.lines.append(line_of(getattr(value, _SOURCE, value)))
        self.tensors.append(value)


_notes: PerThread[Notes | None] = PerThread(None)
# The attribute of a tensor that names the tensor in whose place it is.
_SOURCE = "tfmulti_source"


def set_source(value: tf.Tensor, source: Any) -> None:
    """Notes that a tensor stands for another one, its source, whose line its notes get."""
    if hasattr(value, "graph"):
        setattr(value, _SOURCE, source)


@contextlib.contextmanager
def noting() -> Iterator[None]:
    """Makes layers, losses and optimizers note what they compute, inside the context."""
    methods: list[tuple[Any, str, Callable[[Callable[..., Any]], Any]]] = [
        (keras.layers.Layer, "__call__", _noting_outputs("layer")),
        (keras.losses.Loss, "__call__", _noting_outputs("loss")),
        (keras.optimizers.Optimizer, "apply", _noting_gradients),
    ]
    originals = [(cls, name, vars(cls).get(name)) for cls, name, _ in methods]
    for cls, name, decorator in methods:
        setattr(cls, name, decorator(getattr(cls, name)))
    try:
        yield
    finally:
        for cls, name, original in originals:
            # The class has inherited the method, so it must not keep one of its own.
            if original is None:
                delattr(cls, name)
            else:
                setattr(cls, name, original)


def _noting_outputs(kind: str) -> Callable[[Callable[..., Any]], Any]:
    """Returns a decorator for a method, which notes each tensor that the method returns."""

    def make(original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(self, *args, **kwargs)
            notes = _notes.get()
            if notes is not None:
                for value in tf.nest.flatten(result):
                    notes.add(kind, str(getattr(self, "name", type(self).__name__)), value)
            return result

        return call

    return make


def _noting_gradients(original: Callable[..., Any]) -> Any:
    """Returns an optimizer's `apply` that notes each gradient."""

    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        notes = _notes.get()
        if notes is not None:
            # Without variables the optimizer uses those that it was built for.
            variables = trainable_variables
            if variables is None:
                variables = range(len(grads))
            for gradient, variable in zip(grads, variables, strict=False):
                name = getattr(variable, "path", getattr(variable, "name", f"number {variable}"))
                notes.add("gradient", str(name), gradient)
        return original(self, grads, trainable_variables)

    return apply


def returning_notes(
    step: Callable[[Any], Any], keep: Callable[[Notes], None]
) -> Callable[[Any], Any]:
    """Returns a step that returns the tensors that it has noted, and gives `keep` the notes."""

    def notes_of(data: Any) -> Any:
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        notes = Notes(graph=graph)
        with _notes.set_to(notes):
            step(data)
        keep(notes)
        return [tf.identity(tensor) for tensor in notes.tensors]

    return with_line_marker(notes_of)


def with_line_marker(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns the step in a wrapper, by whose name `line_of` finds the user's lines.

    AutoGraph converts the user's step, but not this wrapper, so the name stays the same.
    """

    def step_of_the_user(data: Any) -> Any:
        return step(data)

    unread: Callable[[Any], Any] = tf.autograph.experimental.do_not_convert(step_of_the_user)
    return unread


def line_of(value: tf.Tensor) -> str | None:
    """Returns `file:line (source)` of the user's step that computes a tensor, or None.

    Args:
        value: a tensor. For an eager tensor it is the line that runs at the time of the call.
    """
    try:
        frames: Sequence[Any] = value.op.traceback
    except (AttributeError, ValueError):
        # An eager tensor has no operation.
        frames = traceback.extract_stack()
    inside = None
    for number, frame in enumerate(frames):
        if frame.name == "step_of_the_user":
            inside = number
    if inside is None:
        return None
    for frame in reversed(list(frames)[inside + 1 :]):
        if is_of_user(frame.filename):
            source = linecache.getline(frame.filename, frame.lineno).strip()
            place = f"{os.path.basename(frame.filename)}:{frame.lineno}"
            return place + (f" ({source})" if source else "")
    return None

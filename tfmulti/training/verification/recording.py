"""What a step computes on its way, written down in order: to name where two runs part.

Inside `recording(notes)`, in this thread, the outputs of layers and losses and the gradients that
optimizers apply are noted, with the line of the user's program that they come from.
"""

from __future__ import annotations

import contextlib
import functools
import linecache
import os
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfmulti.distribution.replica_slice import PerThread


@dataclass
class Notes:
    """What one run of a step has computed: kinds, names and lines, and as many tensors."""

    keys: list[tuple[str, str, int]] = field(default_factory=list)
    lines: list[str | None] = field(default_factory=list)
    tensors: list[tf.Tensor] = field(default_factory=list)
    graph: Any = None

    def add(self, kind: str, name: str, value: Any) -> None:
        """Notes a tensor; what is inside a loop or a condition cannot be brought out."""
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
_SOURCE = "tfmulti_source"  # an attribute of a tensor


def stand_for(value: tf.Tensor, source: Any) -> None:
    """Says that a tensor is in the place of another, whose line is that of a note of it."""
    if hasattr(value, "graph"):
        setattr(value, _SOURCE, source)


@contextlib.contextmanager
def watched() -> Iterator[None]:
    """Inside, layers, losses and optimizers tell what they compute to who records."""
    owners: list[tuple[Any, str, Callable[[Callable[..., Any]], Any]]] = [
        (keras.layers.Layer, "__call__", _telling("layer")),
        (keras.losses.Loss, "__call__", _telling("loss")),
        (keras.optimizers.Optimizer, "apply", _telling_gradients),
    ]
    own = [(owner, name, vars(owner).get(name)) for owner, name, _ in owners]
    for owner, name, make in owners:
        setattr(owner, name, make(getattr(owner, name)))
    try:
        yield
    finally:
        for owner, name, before in own:
            if before is None:
                delattr(owner, name)  # it inherited it
            else:
                setattr(owner, name, before)


def _telling(kind: str) -> Callable[[Callable[..., Any]], Any]:
    def make(original: Callable[..., Any]) -> Any:
        @functools.wraps(original)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            found = original(self, *args, **kwargs)
            notes = _notes.get()
            if notes is not None:
                for value in tf.nest.flatten(found):
                    notes.add(kind, str(getattr(self, "name", type(self).__name__)), value)
            return found

        return call

    return make


def _telling_gradients(original: Callable[..., Any]) -> Any:
    @functools.wraps(original)
    def apply(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
        notes = _notes.get()
        if notes is not None:
            # With none given, the optimizer was built for them.
            variables = trainable_variables
            if variables is None:
                variables = range(len(grads))
            for gradient, variable in zip(grads, variables, strict=False):
                name = getattr(variable, "path", getattr(variable, "name", f"number {variable}"))
                notes.add("gradient", str(name), gradient)
        return original(self, grads, trainable_variables)

    return apply


def recorded(step: Callable[[Any], Any], keep: Callable[[Notes], None]) -> Callable[[Any], Any]:
    """Returns a step that returns the tensors that were noted; `keep` gets the notes."""

    def notes_of(data: Any) -> Any:
        graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
        notes = Notes(graph=graph)
        with _notes.set_to(notes):
            step(data)
        keep(notes)
        return [tf.identity(tensor) for tensor in notes.tensors]

    return marked(notes_of)


def marked(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Returns the same step, within which `line_of` finds lines; AutoGraph reads what it calls."""

    def step_of_the_user(data: Any) -> Any:
        return step(data)

    unread: Callable[[Any], Any] = tf.autograph.experimental.do_not_convert(step_of_the_user)
    return unread


_LIBRARY_FOLDERS = (
    *(
        os.path.dirname(os.path.abspath(str(file))) + os.sep
        for file in (keras.__file__, tf.__file__)
    ),
    f"{Path(__file__).resolve().parents[2]}{os.sep}",  # that of tfmulti
    sysconfig.get_paths()["stdlib"] + os.sep,
)


def line_of(value: tf.Tensor) -> str | None:
    """Returns `file:line (source)` of the user's step that computes a tensor, if it is there."""
    try:
        frames: Sequence[Any] = value.op.traceback
    except (AttributeError, ValueError):  # an eager tensor has no operation
        frames = traceback.extract_stack()
    inside = None
    for number, frame in enumerate(frames):
        if frame.name == "step_of_the_user":
            inside = number
    if inside is None:
        return None
    for frame in reversed(list(frames)[inside + 1 :]):
        file = os.path.abspath(frame.filename)
        if file.startswith(_LIBRARY_FOLDERS) or "__autograph_generated_file" in file:
            continue
        if not os.path.exists(file) or os.sep + "site-packages" + os.sep in file:
            continue
        source = linecache.getline(file, frame.lineno).strip()
        return f"{os.path.basename(file)}:{frame.lineno}" + (f" ({source})" if source else "")
    return None

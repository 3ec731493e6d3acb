"""Lets the user's code in a step find one device when it asks for the strategy.

Code that was written for `tf.distribute` asks for the number of replicas, to divide by it, and adds
values up over the replicas. In a step of a prepared model its values are those of one device
already. So the user's code finds one replica there, as with plain Keras on one device. Keras,
TensorFlow and tfmulti themselves find the real strategy. Only `all_gather` in an eager `train_step`
exchanges rows, since no labels tell there how values depend on them.

| what | private name | upstream | can go when |
|---|---|---|---|
| `install` | public: `tf.distribute.has_strategy`, `Strategy.num_replicas_in_sync`, `ReplicaContext.num_replicas_in_sync`, `replica_id_in_sync_group`, `all_reduce`, `all_gather`, `merge_call` | none | these functions know about replicas |
"""  # noqa: E501

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfmulti.distribution import row_labels
from tfmulti.distribution.replica_slice import current
from tfmulti.errors import ModelError
from tfmulti.keras_patches.patching import replace

_LIBRARIES = ("keras.", "tensorflow.", "tfmulti.")
# These call functions for the user: for code that `tf.function` has converted, and for nests.
_CALLERS = ("tensorflow.python.autograph.", "tensorflow.python.util.")
# Has `tf.nn.compute_average_loss` and `tf.nn.scale_regularization_loss`, which ask for the user.
_ASKS_FOR_THE_USER = "tensorflow.python.ops.nn_impl_distribute"


def install() -> None:
    """Patches what the code of a step may ask of the strategy and of its replica's context."""
    context = tf.distribute.ReplicaContext
    for owner in (tf.distribute.Strategy, context):
        _answer(owner, "num_replicas_in_sync", lambda: 1)
    _answer(context, "replica_id_in_sync_group", lambda: tf.constant(0, tf.int32))
    replace(tf.distribute, "has_strategy", _has_strategy)
    replace(context, "all_reduce", _all_reduce)
    replace(context, "all_gather", _all_gather)
    # `keras_patches.layers` has replaced it once.
    replace(context, "merge_call", _merge_call, mark="_tfmulti_in_steps")


def _answer(owner: type, name: str, on_one_device: Callable[[], Any]) -> None:
    """Replaces a property of a class by one that gives the value of one device in a step."""
    original = getattr(owner, name).fget
    if hasattr(original, "_tfmulti"):
        return

    @functools.wraps(original)
    def read(self: Any) -> Any:
        return on_one_device() if _is_asked_in_step() else original(self)

    vars(read)["_tfmulti"] = True
    setattr(owner, name, property(read))


def _is_asked_in_step() -> bool:
    """Returns whether the user's code calls the caller of this function in a step."""
    if current() is None:
        return False
    frame: Any = inspect.currentframe()
    frame = frame.f_back.f_back
    while _module_of(frame).startswith(_CALLERS):
        frame = frame.f_back
    module = _module_of(frame)
    return module == _ASKS_FOR_THE_USER or not module.startswith(_LIBRARIES)


def _module_of(frame: types.FrameType | None) -> str:
    return str(frame.f_globals.get("__name__", "")) if frame is not None else ""


def _has_strategy(original: Callable[[], bool]) -> Callable[[], bool]:
    def has_strategy() -> bool:
        return not _is_asked_in_step() and original()

    return has_strategy


def _all_reduce(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_reduce(self: Any, reduce_op: Any, value: Any, options: Any = None) -> Any:
        if not _is_asked_in_step():
            return original(self, reduce_op, value, options)
        return tf.nest.map_structure(_as_tensor, value)

    return all_reduce


def _as_tensor(value: Any) -> Any:
    return value if isinstance(value, tf.IndexedSlices) else tf.convert_to_tensor(value)


def _all_gather(original: Callable[..., Any]) -> Callable[..., Any]:
    def all_gather(self: Any, value: Any, axis: Any, options: Any = None) -> Any:
        is_of_one_device = _is_asked_in_step() and _is_as_on_one_device()
        if not is_of_one_device:
            return original(self, value, axis, options)
        return tf.nest.map_structure(_as_tensor, value)

    return all_gather


def _merge_call(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a `merge_call` whose result is not known to be that of one device."""

    def merge_call(self: Any, *args: Any, **kwargs: Any) -> Any:
        replica_slice = current()
        if replica_slice is not None and _is_asked_in_step():
            if replica_slice.has_all_rows:
                raise ModelError(
                    "the step calls merge_call of its replica's context, which gives another value "
                    "than on one device. Leave it out: each value of a step is that of all rows."
                )
            if not replica_slice.is_whole:
                replica_slice.note_unknown("a merge_call of the user's own")
        return original(self, *args, **kwargs)

    return merge_call


def _is_as_on_one_device() -> bool:
    """Returns whether a value counts as that of all rows without an exchange by the user's code.

    So it is if this replica computes all rows, or if labels tell how values depend on the rows.
    """
    replica_slice = current()
    if replica_slice is not None and replica_slice.has_all_rows:
        return True
    with row_labels.kept_in_branch() as is_branch:
        return is_branch or row_labels.are_kept()

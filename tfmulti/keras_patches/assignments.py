"""Patches of assignments: a variable that the user's own code changes gets one device's value.

A change of some entries of a `tf.Variable` is made as an assignment of all of them.

| what | name | upstream | can go when |
|---|---|---|---|
| assignments | public: `keras.Variable.assign`; private: `assign`, `assign_add`, `assign_sub` of `DistributedVariable`, `MirroredVariable`, `SyncOnReadVariable` and `ResourceVariable` | none | a variable that a step changes gets the value of the global batch |
| changes of some entries | private: `scatter_*`, `batch_scatter_update`, `_strided_slice_assign` of the same classes | none | the same |
| changes by a handle | public: the assignments, scatters and optimizers' steps of `tf.raw_ops` | none | the same |
"""  # noqa: E501

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

import keras
import tensorflow as tf
from tensorflow.python.distribute.values import (
    DistributedVariable,
    MirroredVariable,
    SyncOnReadVariable,
)
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tfmulti.distribution import custom_steps, global_values, losses, row_labels
from tfmulti.distribution.replica_slice import ReplicaSlice
from tfmulti.distribution.row_rules import Kind
from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import ModelError
from tfmulti.keras_patches.layers import in_layer_of_keras
from tfmulti.keras_patches.metrics import part_of_state
from tfmulti.keras_patches.model_structure import is_seed
from tfmulti.keras_patches.patching import in_replica_slice, replace
from tfmulti.keras_patches.variables import tf_variable_of

NewValue = Callable[..., tf.Tensor]


class StatesOfMetrics:
    """Notes which states of metrics were changed outside of a step, such as by a callback."""

    # The ids of the `tf.Variable`s.
    changed: ClassVar[set[int]] = set()


def _by_rows(compute: NewValue) -> NewValue:
    """Returns what computes the new value for a method that takes `tf.IndexedSlices`."""

    def new_value(value: tf.Tensor, sparse_delta: Any, *_: Any, **__: Any) -> tf.Tensor:
        return compute(value, tf.expand_dims(sparse_delta.indices, -1), sparse_delta.values)

    return new_value


def _by_indices(compute: NewValue) -> NewValue:
    """Returns what computes the new value for a method that takes indices and updates."""

    def new_value(value: tf.Tensor, indices: Any, updates: Any, name: Any = None) -> tf.Tensor:
        return compute(value, indices, tf.convert_to_tensor(updates, value.dtype))

    return new_value


def _by_slice(old_value: tf.Tensor, *, value: Any, name: Any, **bounds: Any) -> tf.Tensor:
    """Returns the new value for `variable[…].assign(value)`."""
    value = tf.convert_to_tensor(value, old_value.dtype)
    return tf.raw_ops.TensorStridedSliceUpdate(input=old_value, value=value, **bounds)


_COMPUTE = {
    "update": tf.tensor_scatter_nd_update,
    "add": tf.tensor_scatter_nd_add,
    "sub": tf.tensor_scatter_nd_sub,
    "max": tf.tensor_scatter_nd_max,
    "min": tf.tensor_scatter_nd_min,
}
_SLICE = "_strided_slice_assign"
# The raw operations that change a variable: assignments, changes of entries, steps of optimizers.
_RAW_CHANGE = re.compile(
    r"(Assign\w*Variable|ResourceS(parse|catter|tridedSlice)|ResourceApply)\w*"
)
# What computes the new value of all entries, by the name of the method that changes some.
_OF_ENTRIES: dict[str, NewValue] = {
    **{f"scatter_{name}": _by_rows(compute) for name, compute in _COMPUTE.items()},
    **{f"scatter_nd_{name}": _by_indices(compute) for name, compute in _COMPUTE.items()},
    _SLICE: _by_slice,
}


def install() -> None:
    """Patches the methods by which a step may change variables."""
    # The other assigning methods of `keras.Variable` call its `assign`.
    replace(keras.Variable, "assign", in_replica_slice(_assign))
    for variable in (DistributedVariable, MirroredVariable, SyncOnReadVariable, ResourceVariable):
        for name in ("assign", "assign_add", "assign_sub"):
            is_of_parts = variable is SyncOnReadVariable and name == "assign"
            replace(variable, name, _assign_parts if is_of_parts else in_replica_slice(_assign))
        for name in dir(variable):
            if name.startswith(("scatter_", "batch_scatter_", _SLICE)):
                replace(variable, name, in_replica_slice(_assign_entries))
    for name in (*_COMPUTE, "mul", "div"):
        replace(tf.compat.v1, f"scatter_{name}", in_replica_slice(_by_method))
    for name in ("add", "sub", "update"):
        replace(tf.compat.v1, f"scatter_nd_{name}", in_replica_slice(_by_method))
    for name in dir(tf.raw_ops):
        if _RAW_CHANGE.match(name):
            replace(tf.raw_ops, name, in_replica_slice(_change_by_raw_operation))


def _change_by_raw_operation(
    original: Callable[..., Any], replica_slice: ReplicaSlice, *args: Any, **kwargs: Any
) -> Any:
    """Notes that it is not understood how `tf.raw_ops` changes a variable, given by its handle."""
    if _is_change_by_user():
        reason = f"a change of a variable by tf.raw_ops ({original.__name__})"
        replica_slice.note_unknown(reason)
    return original(*args, **kwargs)


def _by_method(
    original: Callable[..., Any],
    replica_slice: ReplicaSlice,
    ref: Any,
    indices: Any,
    updates: Any,
    **_: Any,
) -> Any:
    """Changes some entries by the variable's method, in the place of a function of TensorFlow 1."""
    change = getattr(ref.value if isinstance(ref, keras.Variable) else ref, original.__name__)
    if original.__name__.startswith("scatter_nd_"):
        return change(indices, updates)
    return change(tf.IndexedSlices(updates, indices))


def _assign(
    original: Callable[..., Any],
    replica_slice: ReplicaSlice,
    variable: Any,
    value: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Assigns a value. A variable that is no metric's gets the value of the global batch.

    A metric's states are parts, which add up to that value.

    Raises:
        ModelError: tfmulti has not found the variable, and the replicas have no equal copies.
    """
    is_by_user = _is_change_by_user()
    if isinstance(value, (list, tuple)):
        value = tf.convert_to_tensor(value, variable.dtype)
    # Other patches handle the assignments within Keras' own layers, and in optimizers.
    if is_by_user or not (in_layer_of_keras.get() or custom_steps.gradients_are_global.get()):
        kind = replica_slice.states.get(id(variable))
        if kind is None and is_by_user:
            _refuse_change(variable)
        if kind == "other":
            kind = "layer" if _needs_one_value(replica_slice, variable, value, is_by_user) else None
        with row_labels.kept_in_branch():
            is_known = global_values.are_known(replica_slice)
            may_be_left_out = is_known and row_labels.may_be_left_out()
            if kind and may_be_left_out:
                replica_slice.note_unknown("a condition or a loop that changes a variable")
            is_local = row_labels.label_of(value).kind is Kind.LOCAL
            is_equal = is_known and not is_local and not may_be_left_out
            replica_slice.note_assigned(variable, is_equal)
            if kind == "layer":
                if losses.in_passes():
                    name = getattr(variable, "path", variable.name)
                    replica_slice.note_unknown(f"the variable {name!r}, which each pass changes")
                value = global_values.of_one_device(replica_slice, value)
            elif kind == "metric":
                value = part_of_state(replica_slice, variable, value)
            if kind and tf.is_tensor(value) and value.shape.rank is None:
                # Keras compares the shapes. Here the number of rows is not known, and the rank of
                # what some operations compute from them is not known either.
                value = tf.ensure_shape(value, variable.shape)
    else:
        replica_slice.note_assigned(variable, False)
    return original(variable, value, *args, **kwargs)


def _assign_parts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an `assign` for a variable whose value is the sum of a part on each replica.

    Outside of a replica TensorFlow gives each of them the value divided by their number. That cuts
    whole numbers, such as the counts of a metric that a callback updates. So the first replica gets
    a whole number, and the others get 0.
    """
    in_step = in_replica_slice(_assign)(original)

    def assign(self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.distribute.has_strategy() and tf.distribute.get_replica_context():
            return in_step(self, value, *args, **kwargs)
        StatesOfMetrics.changed.add(id(self))
        if not (self.dtype.is_integer and self.aggregation is tf.VariableAggregation.SUM):
            return original(self, value, *args, **kwargs)
        strategy = self.distribute_strategy
        has_first = placement_of(strategy).is_chief
        for index, copy in enumerate(strategy.experimental_local_results(self)):
            with tf.device(copy.device):
                copy.assign(value if has_first and index == 0 else tf.zeros_like(copy))
        return self

    return assign


def _needs_one_value(
    replica_slice: ReplicaSlice, variable: keras.Variable, value: Any, is_by_user: bool
) -> bool:
    """Returns whether a variable of no layer and no metric of the model gets a value of the rows.

    Such are variables of optimizers, of random generators, and of the user's own objects.

    Raises:
        ModelError: the copies of the variable differ between replicas, or all replicas share it.
    """
    with row_labels.kept_in_branch():
        if not global_values.are_known(replica_slice):
            return False
        kind = row_labels.label_of(value).kind
    # The state of a random generator is not known in a loop, where each replica changes it alike.
    is_drawn = is_seed(variable) and kind is Kind.LOCAL
    needs_one = is_by_user or not (kind is Kind.ALIKE or is_drawn)
    tf_variable, context = tf_variable_of(variable), tf.distribute.get_replica_context()
    if context is not None and context.num_replicas_in_sync > 1:
        # The copies of a metric's variable are parts of a sum.
        is_of_metric = isinstance(tf_variable, SyncOnReadVariable)
        if is_of_metric or (needs_one and not isinstance(tf_variable, MirroredVariable)):
            _refuse_change(variable)
    return needs_one


def _assign_entries(
    original: Callable[..., Any], replica_slice: ReplicaSlice, variable: Any, *args: Any, **kw: Any
) -> Any:
    """Changes some entries of a `tf.Variable`, by an assignment of all of them.

    Products and quotients of entries stay as they are, and are noted as not understood.

    Raises:
        ModelError: tfmulti has not found the variable.
    """
    if not _is_change_by_user():
        return original(variable, *args, **kw)
    if id(variable) not in replica_slice.states:
        _refuse_change(variable)
    new_value = _OF_ENTRIES.get(original.__name__)
    if new_value is None:
        replica_slice.note_unknown(f"a change of some entries of the variable {variable.name!r}")
        replica_slice.note_assigned(variable, False)
        return original(variable, *args, **kw)
    return variable.assign(new_value(variable.read_value(), *args, **kw))


# The packages whose own changes of variables have patches of their own.
_LIBRARIES = ("keras", "tensorflow", "tfmulti")
# The modules whose functions change a variable for their caller: this one, `in_replica_slice`,
# `assign_add` of a Keras variable, `variable[…].assign` and `tf.compat.v1.assign`.
_PASS_ON = (
    __name__,
    in_replica_slice.__module__,
    "keras.src.backend.common.variables",
    "tensorflow.python.ops.array_ops",
    "tensorflow.python.ops.state_ops",
)


def _is_change_by_user() -> bool:
    """Returns whether the user's code changes a variable in a compiled step of several replicas.

    An optimizer of the user's own does not count, since it gets the same gradients on all replicas.
    """
    context = tf.distribute.get_replica_context()
    is_of_several = context is not None and context.num_replicas_in_sync > 1
    if not is_of_several or tf.executing_eagerly() or custom_steps.gradients_are_global.get():
        return False
    frame: Any = inspect.currentframe()
    while (module := str(frame.f_globals.get("__name__"))) in _PASS_ON:
        frame = frame.f_back
    return module.partition(".")[0] not in _LIBRARIES


def _refuse_change(variable: Any) -> NoReturn:
    """Raises ModelError for a change of a variable of which only the user's code knows."""
    raise ModelError(
        f"the step changes the variable {variable.name!r}, which was no attribute of the model, "
        "its layers or metrics when the step began. So each replica would change it by its own "
        "rows, and no checkpoint would have it. Keep it, or the metric that it belongs to, in an "
        "attribute, such as self.last = tf.Variable(0.0), and change a Keras variable by its own "
        "assign."
    )

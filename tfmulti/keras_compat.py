"""Every touch of a private name of Keras, each with the reason and when it can go.

Written against Keras 3.12 to 3.16. `tests/mirrored/test_keras_compat.py` holds a test for
each function here that fails when Keras no longer needs it, or no longer has the name.

| function | private name | upstream | can go when |
|---|---|---|---|
| `build_from_specs` | `Trainer._symbolic_build` | keras#20585 | `fit` builds on MultiWorkerMirroredStrategy |
| `losses_of_one_device` | `losses.loss.scale_loss_for_distribution`, `unscale_…`, `reduce_weighted_values` | keras#20585 | losses say by which rows they are averaged |
| `take_reduced_gradients` | `TFOptimizer._all_reduce_sum_gradients` | keras#20585 | optimizers take global gradients |
| `_unless_unknown` | the same | keras#20585 | the same |
| `batches_of` | `trainers.data_adapters.get_data_adapter` | none: not exported | Keras exports it |
| `initial_epoch_of` | `Trainer._initial_epoch` | none | BackupAndRestore has a public way |
"""  # noqa: E501

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.optimizer import TFOptimizer
from keras.src.losses import loss as loss_module
from keras.src.trainers import data_adapters

from tfmulti.errors import ModelError

Gradients = Sequence[Any]


def build_from_specs(model: keras.Model, specs: Any) -> None:
    """Builds layers, losses, metrics and optimizer from the form of one batch.

    Keras does this in `fit` from a real batch, which fails on a tuple of PerReplica values
    (`_maybe_symbolic_build`). `specs` is one batch's `(x, y, sample_weight)`, each leaf with
    `shape` and `dtype`. Call it inside the strategy's scope, on every worker.
    """
    model._symbolic_build(data_batch=specs)


_thread = threading.local()


@contextlib.contextmanager
def losses_of_one_device(share: tf.Tensor) -> Iterator[None]:
    """Inside, in this thread, a loss is this replica's part of what one device would compute.

    Keras divides each loss by the number of replicas and the optimizer then sums the
    gradients: right only where all replicas have the same number of rows and the loss passes
    through Keras' own reduction. Here a replica's loss is such that the mean over the
    replicas, each weighing by its `share` of the global batch's rows, is the loss of the
    global batch: a mean over rows stays as it is, a sum or a mean by weights is scaled.
    """
    _install_loss_scaling()
    before = getattr(_thread, "share", None)
    _thread.share = share
    try:
        yield
    finally:
        _thread.share = before


def _install_loss_scaling() -> None:
    if not hasattr(TFOptimizer._all_reduce_sum_gradients, "_tfmulti"):
        TFOptimizer._all_reduce_sum_gradients = _unless_unknown(
            TFOptimizer._all_reduce_sum_gradients
        )
    for name in ("scale_loss_for_distribution", "unscale_loss_for_distribution"):
        original = getattr(loss_module, name)
        if not hasattr(original, "_tfmulti"):
            setattr(loss_module, name, _unless_one_device(original))
    if not hasattr(loss_module.reduce_weighted_values, "_tfmulti"):
        loss_module.reduce_weighted_values = _part_of_global(loss_module.reduce_weighted_values)


def _unless_one_device(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @functools.wraps(original)
    def scale(value: Any) -> Any:
        return original(value) if getattr(_thread, "share", None) is None else value

    scale._tfmulti = True  # type: ignore[attr-defined]
    return scale


def _part_of_global(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: Any = "sum_over_batch_size",
        dtype: Any = None,
    ) -> Any:
        loss = original(values, sample_weight, mask, reduction, dtype)
        share = getattr(_thread, "share", None)
        context = tf.distribute.get_replica_context()
        if share is None or context is None or context.num_replicas_in_sync == 1:
            return loss
        if reduction == "sum":
            part = tf.ones_like(share)
        else:
            divisor = _divisor(values, sample_weight, mask, reduction)
            if divisor is None:
                return loss
            own = tf.where(share > 0, divisor, 0.0)
            part = tf.math.divide_no_nan(own, context.all_reduce("SUM", own))
        return loss * tf.cast(tf.math.divide_no_nan(part, share), loss.dtype)

    reduce._tfmulti = True  # type: ignore[attr-defined]
    return reduce


def _divisor(values: Any, sample_weight: Any, mask: Any, reduction: Any) -> tf.Tensor | None:
    """Returns what Keras divides a replica's summed loss by, where that is not its rows."""
    if reduction in (None, "none"):
        return None
    weighs = reduction == "mean_with_sample_weight" and sample_weight is not None
    if mask is None and not weighs:
        return None
    # Keras' own weights of the values; those of masked ones are 0.
    ones = tf.ones_like(tf.convert_to_tensor(values), tf.float32)
    weights = ones if mask is None else tf.cast(mask, tf.float32)
    if weighs:
        given = tf.cast(sample_weight, tf.float32)
        if mask is None:
            return tf.reduce_sum(given)
        given, weights = loss_module.squeeze_or_expand_to_same_rank(given, weights)
        weights = weights * given
    return tf.reduce_sum(weights)


def _unless_unknown(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def reduce(optimizer: Any, grads_and_vars: Any) -> Any:
        several = tf.distribute.get_strategy().num_replicas_in_sync > 1
        if several and getattr(_thread, "share", None) is not None:
            raise ModelError(
                f"the train_step applies gradients with a {type(optimizer).__name__} that is not "
                "part of the model, so they would be summed, not averaged. Keep it as an "
                "attribute of the model."
            )
        return original(optimizer, grads_and_vars)

    reduce._tfmulti = True  # type: ignore[attr-defined]
    return reduce


class _TakesReducedGradients:
    def _all_reduce_sum_gradients(self, grads_and_vars: Any) -> Any:
        return list(grads_and_vars)


class _ReducesFirst(_TakesReducedGradients):
    _tfmulti_reduce: Callable[[Gradients], list[Any]]

    def apply(self, grads: Gradients, trainable_variables: Any = None) -> Any:
        if tf.distribute.get_replica_context() is not None:
            grads = self._tfmulti_reduce(grads)
        return super().apply(grads, trainable_variables)  # type: ignore[misc]


def take_reduced_gradients(
    optimizer: keras.optimizers.Optimizer, reduce: Callable[[Gradients], list[Any]]
) -> None:
    """Makes `optimizer.apply` reduce the gradients by `reduce` first, and never again.

    Clipping, finite checks and loss scaling inside the optimizer then see the gradient of
    the global batch; Keras reduces after them. The optimizer keeps its class' name and
    module, so that it is saved as before.
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        _mix_in(inner, _TakesReducedGradients)
    _mix_in(optimizer, _ReducesFirst)
    vars(optimizer)["_tfmulti_reduce"] = reduce


def _mix_in(thing: Any, mixin: type) -> None:
    if not isinstance(thing, mixin):
        object.__setattr__(thing, "__class__", derived_class(type(thing), (mixin, type(thing))))


_derived: dict[tuple[type, ...], type] = {}
_original: dict[type, type] = {}


def derived_class(original: type, bases: tuple[type, ...]) -> type:
    """Returns a class over `bases` that bears the name and module of `original`."""
    if bases not in _derived:
        names = {"__module__": original.__module__, "__qualname__": original.__qualname__}
        _derived[bases] = type(original.__name__, bases, names | {"__doc__": original.__doc__})
        _original[_derived[bases]] = original
    return _derived[bases]


@contextlib.contextmanager
def original_classes(*things: Any) -> Iterator[None]:
    """Inside, the objects have the classes that they had before tfmulti derived from them.

    Keras writes public classes by identity; what is saved inside is as plain Keras saves it.
    """
    changed: list[tuple[Any, type]] = []
    for thing in things:
        while (original := _original.get(type(thing))) is not None:
            changed.append((thing, type(thing)))
            object.__setattr__(thing, "__class__", original)
    try:
        yield
    finally:
        for thing, derived in reversed(changed):
            object.__setattr__(thing, "__class__", derived)


def batches_of(x: Any, class_weight: Any = None) -> Any:
    """Returns Keras' own adapter of a Dataset, PyDataset, generator or DataLoader.

    It has `get_tf_dataset()`, `num_batches`, `on_epoch_begin()` and `on_epoch_end()`.
    """
    return data_adapters.get_data_adapter(x=x, class_weight=class_weight)


def initial_epoch_of(model: keras.Model, initial_epoch: int) -> int:
    """Returns the epoch that a BackupAndRestore callback wants to start from, or the given one."""
    return int(getattr(model, "_initial_epoch", None) or initial_epoch)

"""Checks of a model before it is trained, and the building of parts that are not built yet."""

from __future__ import annotations

import contextlib
import functools
import itertools
import traceback
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti.distribution import python_attributes
from tfmulti.distribution.replica_context import metric_variables
from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import ModelError, TfmultiError, without_layer
from tfmulti.keras_patches.classes import original_classes
from tfmulti.keras_patches.model_structure import (
    build_from_specs,
    has_own_step,
    has_unbuilt_losses,
    is_built,
    layers_of,
    metrics_one_by_one,
)
from tfmulti.keras_patches.optimizers import inner_optimizers, take_reduced_gradients
from tfmulti.keras_patches.patching import is_of_keras
from tfmulti.training.state import model_search, relocation
from tfmulti.training.state.trainer_state import state_of
from tfmulti.training.state.user_lines import is_of_user


def check_compiled(model: keras.Model) -> None:
    """Raises an error if the model is not compiled.

    Raises:
        ModelError: `compile` was not called.
    """
    if not model.compiled:
        raise ModelError("the model is not compiled. Call model.compile(...) first.")


def warn_of_kept_slots(model: keras.Model) -> None:
    """Warns on the chief of an optimizer that begins with other slots than with plain Keras.

    On one device plain Keras builds an optimizer while it traces the first step. TensorFlow drops
    what `build` assigns there. In Keras only this optimizer's `build` assigns its slots.
    """
    is_chief = placement_of(model.distribute_strategy).is_chief
    # An older Keras lacks this optimizer.
    kept = getattr(keras.optimizers, "ScheduleFreeAdamW", ())
    for optimizer in with_inner_optimizers(model):
        is_new = isinstance(optimizer, kept) and not optimizer.built
        if is_new and not model.run_eagerly and is_chief:
            warnings.warn(
                "ScheduleFreeAdamW begins with a momentum that plain Keras on one device loses, so "
                "its numbers differ. Call optimizer.build(model.trainable_variables) before fit, "
                "and plain Keras has the same numbers (docs/exactness.md).",
                stacklevel=4,
            )


def check_overrides(model: keras.Model) -> None:
    """Raises an error if the model's class overrides a method that `prepare` replaces.

    Raises:
        ModelError: the class overrides `make_train_function` or one of its siblings.
    """
    for name in ("make_train_function", "make_test_function", "make_predict_function"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise ModelError(
                f"{type(model).__name__} overrides {name}, which is what prepare() replaces. "
                f"Override {name.split('_')[1]}_step instead."
            )


def check_scope(model: keras.Model) -> None:
    """Raises an error if a variable was made outside the strategy's scope.

    Raises:
        ModelError: there is such a variable in the model, its optimizers or its metrics.
    """
    strategy = model.distribute_strategy
    parts = {
        "model's": model.variables,
        "optimizer's": [v for o in optimizers_of(model) for v in o.variables],
        # A `metrics` property of the user's own may read attributes that `compile` makes.
        "metrics'": metric_variables(model) if model.compiled else [],
    }
    for name, variables in parts.items():
        for variable in variables:
            if not strategy.extended.variable_created_in_scope(variable.value):
                raise ModelError(
                    f"the {name} variable {variable.path!r} was not made inside the "
                    "strategy's scope, so its replicas would drift apart. "
                    f"{relocation.SCOPE_ADVICE}"
                )


def check_metrics_add_up(model: keras.Model) -> None:
    """Raises an error if a metric has a bool as its state and there are several replicas.

    Raises:
        ModelError: there are several replicas, and a metric's variable is a bool.
    """
    if model.distribute_strategy.num_replicas_in_sync == 1:
        return
    for variable in metric_variables(model):
        if variable.dtype == "bool":
            raise ModelError(
                f"the metrics' variable {variable.path!r} is a bool. The replicas' states of a "
                "metric are added up, so keep a number, such as a count."
            )


def warn_of_initial_states(model: keras.Model) -> None:
    """Warns on the chief of a metric whose `reset_state` does not set the numbers it begins with.

    Plain Keras builds some metrics after their first reset, so its first epoch begins with these
    numbers. Here each metric is reset first, and each replica would begin with all of the numbers.
    A metric of Keras begins with 0, unless the user has updated it before.
    """
    placement = placement_of(model.distribute_strategy)
    for metric in metrics_one_by_one(model):
        variables = [relocation.components(v.value) for v in metric.variables]
        initial = [[part.numpy() for part in parts] for parts in variables]
        if not any(np.any(values) for values in initial):
            continue
        if is_of_keras(type(metric)):
            # Plain Keras resets a metric that is an attribute of the model before each epoch.
            is_compiled = not any(metric is other for other in model.metrics)
            if placement.is_chief and is_compiled:
                _warn_of_earlier_rows(metric)
            continue
        with python_attributes.kept([metric]):
            for part in itertools.chain(*variables):
                part.assign(tf.zeros_like(part))
            metric.reset_state()
        # Each replica gets its part of a number, and the first one gets a whole number.
        others = placement.replicas / placement.local_replicas
        reset = [
            sum(part.numpy() for part in parts) * (1 if parts[0].dtype.is_integer else others)
            for parts in variables
        ]
        for parts, values in zip(variables, initial, strict=True):
            for part, value in zip(parts, values, strict=True):
                part.assign(value)
        same = all(
            np.allclose(a[0], b, equal_nan=True) for a, b in zip(initial, reset, strict=True)
        )
        if not same and placement.is_chief:
            warnings.warn(
                f"the metric {metric.name!r} begins with numbers that its reset_state does not "
                "set, so its first results may differ from plain Keras. Set them in reset_state, "
                "and give each compile a new metric.",
                stacklevel=4,
            )


def _warn_of_earlier_rows(metric: keras.metrics.Metric) -> None:
    """Warns of a metric of Keras that has counted rows before `compile` got it."""
    warnings.warn(
        f"the metric {metric.name!r} has counted rows before this compile. The first epoch counts "
        "its own rows. In plain Keras it counts the earlier ones, too. Give each compile a new "
        "metric.",
        stacklevel=5,
    )


def check_rows_are_free(model: keras.Model) -> None:
    """Raises an error if a layer keeps a state for each row and there are several replicas.

    Raises:
        ModelError: there are several replicas, and a layer is stateful.
    """
    if model.distribute_strategy.num_replicas_in_sync == 1:
        return
    for layer in layers_of(model):
        if getattr(layer, "stateful", False):
            raise ModelError(
                f"the layer {layer.name!r} is stateful: it keeps a state for each row of a batch, "
                "which replicas share out. Make it with stateful=False, or train on one device."
            )


def with_inner_optimizers(model: keras.Model) -> list[Any]:
    """Returns what `optimizers_of` does, and the optimizers inside these."""
    optimizers = optimizers_of(model)
    return [*optimizers, *itertools.chain(*map(inner_optimizers, optimizers))]


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns the compiled optimizer, and those that the model holds for its own train_step.

    The model may hold them as attributes, in lists and dicts of attributes, or in its layers.
    """
    optimizers: list[keras.optimizers.Optimizer] = []
    visited: set[int] = set()

    def search(value: Any) -> None:
        if id(value) in visited:
            return
        visited.add(id(value))
        inner: list[Any] = []
        if isinstance(value, keras.optimizers.Optimizer):
            optimizers.append(value)
        elif isinstance(value, Mapping):
            inner = list(value.values())
        elif isinstance(value, (list, tuple)):
            inner = list(value)
        elif isinstance(value, keras.layers.Layer):
            inner = [getattr(value, "optimizer", None), *vars(value).values()]
        for item in inner:
            search(item)

    search(model)
    return optimizers


@contextlib.contextmanager
def as_made(model: keras.Model) -> Iterator[None]:
    """Gives the model and its optimizers back the user's classes inside the context."""
    with original_classes(model, *with_inner_optimizers(model)):
        yield


def build(
    model: keras.Model, specs: Any, *, step: str = "train_step", optimizers: bool = False
) -> None:
    """Builds, in the strategy's scope, the parts of a model that a batch needs.

    Every worker calls it. Then it checks that the model can be trained by the replicas.

    Args:
        model: the prepared and compiled model.
        specs: `(x, y, sample_weight)` of one batch; each leaf has a `shape` and a `dtype`.
        step: the method of the model that takes the batch.
        optimizers: whether to build all optimizers now, which a checkpoint needs, and the metrics
            that the step makes. Otherwise the optimizer of Keras' own train_step is built just
            before the first step, and those of a user's train_step are built when it first applies
            gradients. A MultiOptimizer is built now in any case.

    Raises:
        ModelError: the model cannot compute such a batch, or a part was made outside the scope. Or
            there are several replicas, and a layer is stateful or a metric's variable is a bool.
    """
    # Plain Keras builds an eager model in its first step, so building must not count as a step.
    is_first_test = step == "test_step" and model.test_function is None
    is_watched = model.run_eagerly or is_first_test
    own_objects = model_search.find(model).own_objects if is_watched else []
    before = python_attributes.read(own_objects)
    with python_attributes.kept(own_objects if model.run_eagerly else []):
        _build(model, specs, step, optimizers=optimizers)
    # Plain Keras builds nothing before its first test_step.
    switched = python_attributes.first_switch(before) if is_first_test else None
    if switched and placement_of(model.distribute_strategy).is_chief:
        warnings.warn(
            f"{switched} has changed in Python while the model was built, so the test_step runs "
            "the code for the new value. In plain Keras the first test_step runs the code for the "
            "old one. Keep the value in a variable (self.add_weight).",
            stacklevel=4,
        )
    check_scope(model)
    check_metrics_add_up(model)
    check_rows_are_free(model)
    if model.train_function is None and model.test_function is None:
        state, metrics = state_of(model), list(model.metrics)
        # Without a new `compile` the metrics go on as before.
        if list(map(id, state.checked_metrics)) != list(map(id, metrics)):
            state.checked_metrics = metrics
            warn_of_initial_states(model)


def _build(model: keras.Model, specs: Any, step: str, *, optimizers: bool) -> None:
    """Builds the parts of a model, for `build`."""
    has_own = has_own_step(model, step)
    trace = functools.cache(functools.partial(_trace_own_step, model, specs, step))
    # `train_on_batch` and `test_on_batch` come here with each batch.
    function = model.train_function if step == "train_step" else model.test_function
    is_new = has_own and function is None
    if is_new and _has_unbuilt_layers(model):
        # The model's `call` need not use all layers that the step calls.
        trace()
    with_losses = not (has_own and _computes_no_losses(model, specs, trace))
    several = model.distribute_strategy.num_replicas_in_sync > 1
    try:
        _build_from_specs(model, specs, with_losses=with_losses)
    except Exception as error:
        if isinstance(_cause_of(error), AttributeError):
            raise _cause_of(error) from None
        check_metrics_add_up(model)
        if _takes_batches_as_keras(model):
            explain(model, specs, error)
            raise
        # A user's step may need no call(), as for a GAN. It may also take batches of another form
        # than (x, y, sample_weight), as for a siamese network. Such a step builds its parts itself.
    if step == "train_step":
        if _has_unbuilt_layers(model):
            # A layer may call others in training alone.
            trace()
        optimizers = optimizers or any(_is_built_early(model, o) for o in optimizers_of(model))
        if optimizers:
            # A step of the user's own may update some of the weights only, and then Keras builds
            # the optimizer for these. A trace finds them, but would run an eager step's code.
            is_one_in_eager_mode = model.run_eagerly and len(optimizers_of(model)) == 1
            build_optimizer(model, has_all_weights=is_one_in_eager_mode)
            build_optimizers(model, specs)
    # A metric that a replica's step makes would have variables of which that step knows nothing. A
    # metric that is made after a checkpoint was read would not get its state.
    if is_new and (several or optimizers) and _makes_metrics(model):
        trace()


def _has_unbuilt_layers(model: keras.Model) -> bool:
    """Returns whether a layer that may have weights is not built."""
    return any(not layer.built and not _only_holds(layer) for layer in layers_of(model))


def build_optimizer(model: keras.Model, *, has_all_weights: bool = False) -> None:
    """Builds, in the scope, the optimizer of a model whose train_step is Keras' own.

    Plain Keras does so in the first step. Until then a callback may say which weights are trained.

    Args:
        model: the prepared and compiled model, whose layers are built.
        has_all_weights: whether the optimizer gets all trained weights in any case.
    """
    if model.optimizer is None or model.optimizer.built:
        return
    if has_all_weights or not has_own_step(model, "train_step"):
        with model.distribute_strategy.scope():
            model.optimizer.build(model.trainable_variables)


def is_traced_late(model: keras.Model) -> bool:
    """Returns whether no trace of the train_step tells which weights an optimizer gets."""
    return bool(model.run_eagerly) and has_own_step(model, "train_step")


def _is_built_early(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> bool:
    """Returns whether an optimizer is to be built at the beginning of `fit`, and is not built yet.

    `LossScaleOptimizer.scale_loss` multiplies by a constant until then, and by the scale of the
    last step afterwards. A MultiOptimizer has no optimizers until then.
    """
    scales_losses = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
    # An older Keras lacks MultiOptimizer.
    return not optimizer.built and (
        hasattr(optimizer, "optimizers") or (scales_losses and has_own_step(model, "train_step"))
    )


def _build_from_specs(model: keras.Model, specs: Any, **parts: bool) -> None:
    """Builds layers, metrics and maybe other parts in the scope; see `build_from_specs`."""
    with model.distribute_strategy.scope():
        try:
            build_from_specs(model, specs, **parts)
        except Exception:
            if not model.run_eagerly:
                raise
            # An eager metric may compute with NumPy, and then it cannot be traced. If Keras has
            # built the metrics by now, it does not trace them a second time.
            build_from_specs(model, specs, **parts)
            metrics = metrics_one_by_one(model)
            if any(not m.variables and is_of_keras(type(m)) for m in metrics):
                raise


def explain(model: keras.Model, specs: Any, error: Exception) -> None:
    """Raises a ModelError in one line if an error tells that a model and its data do not match.

    Args:
        model: the model.
        specs: `(x, y, sample_weight)` of the batch that it cannot compute.
        error: what Keras has raised.

    Raises:
        ModelError: a shape, a type or a value of the batch has led to the error.
    """
    cause = _cause_of(error)
    if isinstance(cause, TfmultiError) or not isinstance(
        cause, ValueError | TypeError | NotImplementedError | tf.errors.InvalidArgumentError
    ):
        return
    x, _, _ = keras.utils.unpack_x_y_sample_weight(specs)
    inputs = ", ".join(f"{tuple(s.shape)} {tf.as_dtype(s.dtype).name}" for s in tf.nest.flatten(x))
    reason = without_layer(str(cause)).strip().partition("\n")[0].rstrip(".")
    frames = [f for f in traceback.extract_tb(cause.__traceback__) if is_of_user(f.filename)]
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    advice = "Change the model or the data."
    if "create a variable while in a stateless scope" in reason:
        advice = "Call the model on a batch before fit, and Keras makes the variable."
    elif "is out of scope" in reason:
        reason = "a condition or a loop on tensors assigns a variable that is read after it"
        advice = "Assign the variable outside: variable.assign(keras.ops.where(…, new, variable))."
    raise ModelError(
        f"{type(model).__name__} cannot compute a batch of inputs {inputs}: "
        f"{reason or type(cause).__name__}{place}. {advice}"
    ) from error


def _cause_of(error: Exception) -> BaseException:
    """Returns the error of a layer, for which Keras may raise another one with its own advice."""
    return error.__context__ or error if type(error) is RuntimeError else error


def _takes_batches_as_keras(model: keras.Model) -> bool:
    """Returns whether both steps are Keras' own, which take (x, y, sample_weight)."""
    return not (has_own_step(model, "train_step") or has_own_step(model, "test_step"))


def _trace_own_step(model: keras.Model, specs: Any, step: str) -> bool:
    """Traces a step of the user's own without side effects, and returns whether it did not fail.

    The trace builds, in the scope, what plain Keras builds when it traces the step: layers, metrics
    and compiled losses that the step uses. A step that was traced before is not traced again.
    """
    if step == "test_step":
        return model.test_function is not None or _built_by_trace(model, model.test_step, specs)
    variables_of = state_of(model).traced.optimizer_variables
    if variables_of is None:
        variables_of = _trace_without_effect(model, specs)
    return all(optimizer in variables_of for optimizer in optimizers_of(model))


def _computes_no_losses(model: keras.Model, specs: Any, trace: Callable[[], bool]) -> bool:
    """Returns whether a step of the user's own computes none of several compiled losses.

    A trace of the step shows it, since it builds the losses that the step computes.
    """
    targets = specs[1] if isinstance(specs, tuple) and len(specs) > 1 else None
    return has_unbuilt_losses(model, targets) and trace() and has_unbuilt_losses(model, targets)


def _only_holds(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer is a model without a `build` of its own, so without own weights."""
    return isinstance(layer, keras.Model) and type(layer).build is keras.Model.build


def build_optimizers(model: keras.Model, specs: Any) -> None:
    """Builds, in the scope, the optimizers that a train_step of the user's own uses.

    A trace of the step without side effects shows which variables each optimizer gets.

    Args:
        model: the prepared and compiled model.
        specs: the nest that the step takes; each leaf has a `shape` and a `dtype`.
    """
    unbuilt = [optimizer for optimizer in optimizers_of(model) if not optimizer.built]
    variables_of = state_of(model).traced.optimizer_variables or {}
    if any(optimizer not in variables_of for optimizer in unbuilt):
        variables_of = _trace_without_effect(model, specs)
    with model.distribute_strategy.scope():
        for optimizer in unbuilt:
            if variables_of.get(optimizer) is not None:
                optimizer.build(list(variables_of[optimizer]))
            elif optimizer is model.optimizer and optimizer not in variables_of:
                # The trace has failed before. Keras gives all weights to this optimizer.
                optimizer.build(model.trainable_variables)


def _trace_without_effect(model: keras.Model, specs: Any) -> dict[Any, Any]:
    """Traces the train_step without side effects, and returns the variables of each optimizer.

    The value is None for an optimizer that the step does not use. If the step fails, the optimizers
    that it would have used later are missing. No optimizer builds itself. The result is stored in
    `TracedStep.optimizer_variables`.
    """
    variables_of: dict[Any, Any] = {}
    state_of(model).traced.optimizer_variables = variables_of

    def note(optimizer: Any, gradients: Any, variables: Any) -> bool:
        variables_of[optimizer] = variables
        return True

    for optimizer in optimizers_of(model):
        take_reduced_gradients(optimizer, lambda gradients, _: list(gradients), note)
    if _built_by_trace(model, model.train_step, specs):
        variables_of |= dict.fromkeys(o for o in optimizers_of(model) if o not in variables_of)
    return variables_of


# Keras calls these methods before a step, and in a scope.
_BEFORE_STEPS = {"__init__", "build", "compile", "from_config"}


def _makes_metrics(model: keras.Model) -> bool:
    """Returns whether a step may build a metric, or make one.

    A method of the user's own that names a class of metrics may make one.
    """
    if not all(map(is_built, model.metrics)):
        return True
    classes = {n for n, v in vars(keras.metrics).items() if isinstance(v, type)}
    return any(
        classes & set(part.co_names)
        for name, method in model_search.methods_of_user(model)
        if name not in _BEFORE_STEPS and hasattr(method, "__code__")
        for part in (method.__code__, *method.__code__.co_consts)
        if isinstance(part, types.CodeType)
    )


def _built_by_trace(model: keras.Model, step: Callable[[Any], Any], specs: Any) -> bool:
    """Traces a step of a model without side effects, and returns whether the step did not fail.

    Layers and metrics that the trace builds get their variables in the strategy's scope. An error
    of the step is raised again when the step itself is traced.
    """
    unbuilt = [layer for layer in layers_of(model) if not layer.built]
    if _traced(model, step, specs):
        return True
    # Variables that a trace makes have no gradients in it, so a step ends at its first gradient. A
    # second trace has the variables, and builds the metrics that come after the gradient.
    has_built = any(layer.built for layer in unbuilt)
    return has_built and not all(map(is_built, model.metrics)) and _traced(model, step, specs)


def _traced(model: keras.Model, step: Callable[[Any], Any], specs: Any) -> bool:
    """Traces a step once, for `_built_by_trace`."""
    without_effect = keras.StatelessScope()
    without_effect.__enter__()
    succeeded = False
    # Inside the strategy's scope a gradient tape does not accept variables of all replicas.
    with relocation.without_strategy(None), contextlib.suppress(Exception):
        # As in Keras, AutoGraph reads no step. A step that always runs eagerly may need it here.
        traced = tf.function(step, autograph=model.run_eagerly)
        traced.get_concrete_function(tf.nest.map_structure(_spec, specs))
        succeeded = True
    with model.distribute_strategy.scope():
        # The scope makes the variables when it ends.
        without_effect.__exit__()
    return succeeded


def _spec(leaf: Any) -> Any:
    return leaf if isinstance(leaf, tf.TypeSpec) else tf.TensorSpec(leaf.shape, leaf.dtype)

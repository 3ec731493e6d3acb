"""What must hold of a model before it is trained, and building what is not built yet."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf

from tfmulti.distribution.replica_context import metric_variables
from tfmulti.errors import ModelError
from tfmulti.keras_patches.classes import original_classes
from tfmulti.keras_patches.model_structure import build_from_specs, layers_of
from tfmulti.keras_patches.optimizers import inner_optimizers, take_reduced_gradients
from tfmulti.training.state import relocation
from tfmulti.training.state.trainer_state import state_of


def check_compiled(model: keras.Model) -> None:
    """Raises ModelError where `compile` was not called."""
    if not model.compiled:
        raise ModelError("the model is not compiled. Call model.compile(...) first.")


def check_overrides(model: keras.Model) -> None:
    """Raises ModelError where the model's class replaces what `prepare` replaces."""
    for name in ("make_train_function", "make_test_function", "make_predict_function"):
        if getattr(type(model), name) is not getattr(keras.Model, name):
            raise ModelError(
                f"{type(model).__name__} overrides {name}, which is what prepare() replaces. "
                f"Override {name.split('_')[1]}_step instead."
            )


def check_scope(model: keras.Model) -> None:
    """Raises ModelError where a variable was made outside the strategy's scope."""
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
                    "strategy's scope, so its replicas would drift apart. Build and compile the "
                    "model inside 'with strategy.scope():'."
                )


def check_rows_are_free(model: keras.Model) -> None:
    """Raises ModelError where a layer keeps something for each row, and replicas share rows."""
    if model.distribute_strategy.num_replicas_in_sync == 1:
        return
    for layer in layers_of(model):
        if getattr(layer, "stateful", False):
            raise ModelError(
                f"the layer {layer.name!r} is stateful: it keeps a state for each row of a batch, "
                "which replicas share out. Make it with stateful=False, or train on one device."
            )


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns the compiled optimizer, and those that the model holds for its own train_step.

    It finds them as attributes, in lists and dicts of attributes, and in sub-models.
    """
    found: dict[int, keras.optimizers.Optimizer] = {}
    seen: set[int] = set()

    def look(thing: Any) -> None:
        if id(thing) in seen:
            return
        seen.add(id(thing))
        if isinstance(thing, keras.optimizers.Optimizer):
            found[id(thing)] = thing
        elif isinstance(thing, Mapping):
            list(map(look, thing.values()))
        elif isinstance(thing, (list, tuple)):
            list(map(look, thing))
        elif isinstance(thing, keras.Model):
            look(getattr(thing, "optimizer", None))
            list(map(look, list(vars(thing).values())))

    look(model)
    return list(found.values())


@contextlib.contextmanager
def as_made(model: keras.Model) -> Iterator[None]:
    """Inside, the model and its optimizers have the classes that the user made them of."""
    things = [model, *optimizers_of(model)]
    things += [inner for t in things[1:] for inner in inner_optimizers(t)]
    with original_classes(*things):
        yield


def build(model: keras.Model, specs: Any, *, optimizers: bool = False) -> None:
    """Builds what a batch of this form needs, in the scope. Every worker calls it.

    With `optimizers` also those of a train_step of its own, which one device needs no sooner.

    Raises:
        ModelError: a part was made outside the scope.
    """
    _build_by_own_step(model, specs)
    try:
        with model.distribute_strategy.scope():
            build_from_specs(model, specs)
    except Exception as error:
        if "Mixing different tf.distribute.Strategy" in str(error):
            raise ModelError(
                "the optimizer was made outside the strategy's scope. Make it and compile the "
                "model inside 'with strategy.scope():'."
            ) from None
        if _takes_batches_as_keras(model):
            raise
        # A step of the user's own may need no call(), as a GAN's, or take batches of another form
        # than (x, y, sample_weight), as a siamese network's: the step itself builds its parts.
    if optimizers or model.distribute_strategy.num_replicas_in_sync > 1:
        build_optimizers(model, specs)
    check_scope(model)
    check_rows_are_free(model)


def _takes_batches_as_keras(model: keras.Model) -> bool:
    """Whether both steps are Keras' own, which take a batch as (x, y, sample_weight)."""
    own, base = type(model), keras.Model
    return own.train_step is base.train_step and own.test_step is base.test_step


def _build_by_own_step(model: keras.Model, specs: Any) -> None:
    """Builds the layers that a train_step of the user's own calls, in the scope.

    Keras alone builds them when it traces that step: `call` need not use all of them.
    """
    if type(model).train_step is keras.Model.train_step or state_of(model).taken is not None:
        return
    if any(not layer.built for layer in layers_of(model)):
        _trace_without_effect(model, specs)


def build_optimizers(model: keras.Model, specs: Any) -> None:
    """Builds the optimizers that a train_step of the user's own holds, in the scope.

    It takes a trace of the step without effect to see which variables each one gets. On several
    replicas they would build themselves too late, within the compiled step.
    """
    unbuilt = [optimizer for optimizer in optimizers_of(model) if not optimizer.built]
    taken = state_of(model).taken or {}
    if any(optimizer not in taken for optimizer in unbuilt):
        taken = _trace_without_effect(model, specs)
    with model.distribute_strategy.scope():
        for optimizer in unbuilt:
            if taken.get(optimizer) is not None:
                optimizer.build(list(taken[optimizer]))


def _trace_without_effect(model: keras.Model, specs: Any) -> dict[Any, Any]:
    """Traces the train_step, and returns and keeps the variables that each optimizer gets.

    They are None for an optimizer that the step does not use; where the step fails, those that it
    would have used later are missing. The variables that layers make then are made in the scope.
    No optimizer builds itself.
    """
    found: dict[Any, Any] = {}
    state_of(model).taken = found

    def note(optimizer: Any, gradients: Any, variables: Any) -> bool:
        found[optimizer] = variables
        return True

    for optimizer in optimizers_of(model):
        take_reduced_gradients(optimizer, list, note)
    without_effect = keras.StatelessScope()
    without_effect.__enter__()
    outside = relocation.without_strategy(None)  # a tape takes no variables of all replicas
    with outside, contextlib.suppress(Exception):  # the step itself will tell
        tf.function(model.train_step).get_concrete_function(tf.nest.map_structure(_spec, specs))
        found |= {each: None for each in optimizers_of(model) if each not in found}
    with model.distribute_strategy.scope():
        without_effect.__exit__()  # makes variables
    return found


def _spec(leaf: Any) -> Any:
    return leaf if isinstance(leaf, tf.TypeSpec) else tf.TensorSpec(leaf.shape, leaf.dtype)

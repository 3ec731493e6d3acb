"""Random numbers of a step: each replica draws those that one device draws for its rows.

One device draws a tensor of random numbers for the global batch. Each replica gets the numbers
that stand at its own rows of that tensor (`distribution.randomness`). So all replicas must draw
from the same seed. Keras keeps its generator for draws without a seed once per thread, and
TensorFlow traces each replica in its own thread. `step_generator` returns one generator for
all replicas in its place.

| what | private name | upstream | can go when |
|---|---|---|---|
| draws | `backend.tensorflow.random.*`, `_cast_seed`, `draw_seed` | none | replicas have different masks |
| `global_seed` | `tensorflow.python.eager.context.global_seed` | none | TensorFlow tells the seed that `tf.random.set_seed` has set |
| draws without a seed | `global_seed_generator`, `make_default_seed`, `GLOBAL_SEED_GENERATOR`, `global_state` | none | the generator has a copy on each replica |
"""  # noqa: E501

from __future__ import annotations

import contextlib
import functools
import inspect
import random
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.backend.tensorflow import random as random_module
from keras.src.random.seed_generator import (
    GLOBAL_SEED_GENERATOR,
    draw_seed,
    global_seed_generator,
    make_default_seed,
)
from tensorflow.python.eager import context

from tfmulti.distribution import randomness
from tfmulti.distribution.replica_slice import (
    ReplicaSlice,
    current,
    is_compiling,
    refuse_to_compile,
)
from tfmulti.keras_patches.patching import replace

# The attribute of a strategy that holds the generator of `step_generator`.
_GENERATOR = "_tfmulti_generator"
# The generators from which a step has drawn.
_drawn_from: weakref.WeakSet[keras.random.SeedGenerator] = weakref.WeakSet()


def install() -> None:
    """Patches all drawing functions of Keras' TensorFlow backend."""
    for name, draw in randomness.DRAWS.items():
        replace(random_module, name, _drawn_by(draw))


def global_seed() -> int | None:
    """Returns TensorFlow's global seed, or None if the program has not set it."""
    seed: int | None = context.global_seed()
    return seed


def step_generator(model: keras.Model) -> keras.random.SeedGenerator | None:
    """Returns the generator for draws without a seed in a model's steps; None means Keras' own.

    With one replica Keras' own generator serves. With several, the generator has a copy of its
    state on each replica. It replaces Keras' generator at once if Keras has made one. Otherwise
    `share_generator` lets it replace Keras' as soon as a step has drawn from it.
    """
    strategy = model.distribute_strategy
    if strategy.num_replicas_in_sync == 1:
        return None
    keras_generator = global_generator()
    generator: keras.random.SeedGenerator | None = vars(strategy).get(_GENERATOR)
    if generator is not None and generator is keras_generator:
        return generator
    if generator is None or generator in _drawn_from:
        with strategy.scope():
            # With a seed given, Keras draws none from Python's generator.
            generator = keras.random.SeedGenerator(0)
        vars(strategy)[_GENERATOR] = generator
    generator.state.assign(_next_global_seed())
    if keras_generator is not None:
        _drawn_from.add(generator)
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
    return generator


def share_generator(generator: keras.random.SeedGenerator | None, *, is_traced_again: bool) -> None:
    """Puts a generator in the place of Keras' own, if a step has drawn from it.

    Call it after the step was traced. At that point Keras would have made its own generator, by a
    draw from Python's generator. This function makes that draw, too.

    Plain Keras makes a variable for its generator while it traces the step, so `tf.function` traces
    the step once more, which takes time. With `is_traced_again` a variable is made here, too.

    Args:
        generator: what `step_generator` returned.
        is_traced_again: whether a second trace may give other numbers than the first one.
    """
    keras_generator = global_generator()
    if generator is None or generator is keras_generator or generator not in _drawn_from:
        return
    # In eager mode the step has run, so the generator's state has moved on and must stay.
    has_run = tf.executing_eagerly()
    with tf.init_scope():
        if keras_generator is not None:
            state = keras_generator.state
        elif is_traced_again and not has_run:
            state = global_seed_generator().state
        else:
            state = [make_default_seed(), 0]
        if not has_run:
            generator.state.assign(state)
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)


def _next_global_seed() -> Any:
    """Returns the state of Keras' generator, or the state that it would begin with if made now.

    Keras makes its generator at the first draw without a seed, by a draw from Python's generator.
    Python's generator keeps its state here.
    """
    generator = global_generator()
    if generator is not None:
        return generator.state
    python = random.getstate()
    try:
        return [make_default_seed(), 0]
    finally:
        random.setstate(python)


@contextlib.contextmanager
def with_global_generator() -> Iterator[None]:
    """Gives Keras a generator for draws without a seed, if it has none, inside the context.

    Afterwards Keras has its earlier generator, or none. To make the generator takes a draw from
    Python's generator, whose state is put back at once.
    """
    outer_generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    python_state = random.getstate()
    try:
        global_seed_generator()
        random.setstate(python_state)
        yield
    finally:
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, outer_generator)


@contextlib.contextmanager
def generators_restored_on_error() -> Iterator[None]:
    """Gives Python's and Keras' generators their earlier state if the context ends by an error.

    A trace that fails may have drawn from Python's generator. It may also have made Keras'
    generator in its graph, where nothing gives it a value.
    """
    outer_generator, python_state = global_generator(), random.getstate()
    try:
        yield
    except Exception:
        random.setstate(python_state)
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, outer_generator)
        raise


def global_generator() -> keras.random.SeedGenerator | None:
    """Returns Keras' generator for draws without a seed, or None if Keras has made none yet."""
    return global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)


def made_global_generator() -> keras.random.SeedGenerator:
    """Returns Keras' generator for draws without a seed, and makes it if there is none."""
    return global_seed_generator()


def _seed(replica_slice: ReplicaSlice, seed: Any) -> tf.Tensor:
    """Returns the seed of one draw, from the caller's seed or the generator without a seed."""
    if seed is not None:
        return random_module._cast_seed(draw_seed(seed))
    generator = replica_slice.seeds or global_seed_generator()
    _drawn_from.add(generator)
    return random_module._cast_seed(generator.next(ordered=False))


def _draws_by_rows(replica_slice: ReplicaSlice) -> bool:
    """Returns whether Keras alone would not draw the numbers of one device for a slice.

    With several replicas Keras' generator is not that of all replicas, even for all rows. XLA would
    draw other numbers for the whole batch, too.
    """
    return not replica_slice.is_whole or replica_slice.has_all_rows or is_compiling()


def _drawn_by(draw: Callable[..., Any]) -> Callable[[Any], Any]:
    """Returns the `make` of `replace` that calls `draw(original, replica_slice, seed, …)`."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)
        draw_of_slice = functools.partial(draw, original)

        def drawn(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() and draw not in randomness.FOR_XLA:
                refuse_to_compile(
                    f"draws from {original.__name__}, and XLA would draw other numbers"
                )
            replica_slice = current()
            if replica_slice is None or not _draws_by_rows(replica_slice):
                return original(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            arguments = bound.arguments
            if "dtype" in arguments:
                arguments["dtype"] = arguments["dtype"] or keras.config.floatx()
            seed = _seed(replica_slice, arguments.pop("seed"))
            if replica_slice.has_all_rows:
                return original(**arguments, seed=randomness.Drawn(seed))
            return randomness.by_parts(draw_of_slice, replica_slice, seed, arguments)

        return drawn

    return make

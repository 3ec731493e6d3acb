"""Tells where plain Keras on one device would take other data, steps or random numbers.

The chief tells each difference once for a model. It prints a line, or gives a warning if the user
has asked for no output.
"""

from __future__ import annotations

import warnings
from typing import Any

import keras

from tfmulti.config.console import speaker
from tfmulti.data.source import Source
from tfmulti.distribution.strategies import placement_of
from tfmulti.keras_patches.model_structure import is_seed
from tfmulti.training.input.dataset_feed import PyDatasetFeed
from tfmulti.training.input.interface import Feed
from tfmulti.training.input.shuffle import Shuffle
from tfmulti.training.state.trainer_state import state_of


def tell_order(model: keras.Model, verbose: Any, feed: Feed, shuffle: Shuffle | None) -> None:
    """Tells that a PyDataset is not read in the order of plain Keras, if it is shuffled."""
    if shuffle is not None and isinstance(feed, PyDatasetFeed):
        _tell_once(
            model,
            verbose,
            "order",
            f"the PyDataset's batches have an order of tfmulti's own (seed {shuffle.seed}), not "
            "that of plain Keras; fit(shuffle=False) keeps the order of the batches",
        )


def tell_steps(
    model: keras.Model,
    verbose: Any,
    data: Any,
    feed: Feed,
    argument: str,
    steps: int | None,
    epochs: int = 1,
) -> None:
    """Tells that plain Keras would take other steps, if that is so.

    Plain Keras takes a step that finds no data if only reading tells how long the data is. If an
    execution has several steps, it takes whole executions as long as there is data. It ends an
    epoch where arrays end.

    Args:
        model: the prepared and compiled model.
        verbose: the argument of `fit`, `evaluate` or `predict`.
        data: the data, as the user gave it. Plain Keras cannot read a source of tfmulti.
        feed: the feed of the data.
        argument: the name of the argument that tells the number of steps.
        steps: the value of this argument.
        epochs: the number of epochs that take so many steps each.
    """
    if isinstance(data, Source):
        return
    at_once, length = int(model.steps_per_execution), feed.data.steps
    if steps is None:
        if length is None and at_once == 1 and not model.run_eagerly:
            _tell_once(
                model,
                verbose,
                "steps",
                "the length of the data is not known before it is read; plain Keras takes one step "
                "more at its end, without rows, which draws random numbers, and counts for "
                f"learning rates and for the losses of several outputs; {argument}= avoids this",
            )
        return
    taken = -(-steps // at_once) * at_once
    is_of_epochs = argument == "steps_per_epoch" and feed.data.endless
    if is_of_epochs and length is not None and length % steps and length < steps * epochs:
        _tell_once(
            model,
            verbose,
            "steps",
            f"steps_per_epoch={steps} does not divide the {length} batches of the arrays; after "
            "the last batch the epoch goes on with the first, where plain Keras ends it",
        )
    elif taken > steps and (length is None or length > steps):
        _tell_once(
            model,
            verbose,
            argument,
            f"{argument}={steps} is no multiple of steps_per_execution={at_once}; these {steps} "
            f"steps are taken, where plain Keras takes {min(taken, length or taken)}",
        )


def tell_draws(model: keras.Model, verbose: Any) -> None:
    """Tells that plain Keras draws other random numbers, if XLA compiles its step."""
    if model.jit_compile and not model.run_eagerly and any(map(is_seed, model.variables)):
        _tell_once(
            model,
            verbose,
            "random",
            "dropout and other random numbers are those of plain Keras with "
            "compile(jit_compile=False); XLA, its default on GPUs, draws other ones",
        )


def _tell_once(model: keras.Model, verbose: Any, topic: str, text: str) -> None:
    """Tells a difference on the chief, unless one of this topic was told for this model."""
    state, is_chief = state_of(model), placement_of(model.distribute_strategy).is_chief
    if topic in state.told:
        return
    state.told.add(topic)
    if verbose not in (0, "0"):
        speaker(is_chief)(topic, text)
    elif is_chief:
        # The line of the user's program that calls `fit` or another method.
        warnings.warn(f"{topic}: {text}.", stacklevel=5)

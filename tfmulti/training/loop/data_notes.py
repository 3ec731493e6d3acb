"""Tells where plain Keras on one device would read the data in another order, or in other steps.

Each difference is printed once for a model, by the chief.
"""

from __future__ import annotations

from typing import Any

import keras

from tfmulti.config.console import speaker
from tfmulti.data.source import Source
from tfmulti.distribution.strategies import placement_of
from tfmulti.training.input.dataset_feed import PyDatasetFeed
from tfmulti.training.input.interface import Feed
from tfmulti.training.input.shuffle import Shuffle
from tfmulti.training.state.trainer_state import state_of


def print_order(model: keras.Model, feed: Feed, shuffle: Shuffle | None) -> None:
    """Prints that a PyDataset is not read in the order of plain Keras, if it is shuffled."""
    if shuffle is not None and isinstance(feed, PyDatasetFeed):
        _print_once(
            model,
            "order",
            f"the PyDataset's batches have an order of tfmulti's own (seed {shuffle.seed}), not "
            "that of plain Keras; fit(shuffle=False) keeps the order of the batches",
        )


def print_steps(
    model: keras.Model, data: Any, feed: Feed, argument: str, steps: int | None, epochs: int = 1
) -> None:
    """Prints that plain Keras would take other steps, if that is so.

    Plain Keras takes a step that finds no data if only reading tells how long the data is. If an
    execution has several steps, it takes whole executions as long as there is data. It ends an
    epoch where arrays end.

    Args:
        model: the prepared and compiled model.
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
            _print_once(
                model,
                "steps",
                "the length of the data is not known before it is read; plain Keras takes one step "
                "more at its end, without rows, which draws random numbers, and counts for "
                f"learning rates and for the losses of several outputs; {argument}= avoids this",
            )
        return
    taken = -(-steps // at_once) * at_once
    is_of_epochs = argument == "steps_per_epoch" and feed.data.endless
    if is_of_epochs and length is not None and length % steps and length < steps * epochs:
        _print_once(
            model,
            "steps",
            f"steps_per_epoch={steps} does not divide the {length} batches of the arrays; after "
            "the last batch the epoch goes on with the first, where plain Keras ends it",
        )
    elif taken > steps and (length is None or length > steps):
        _print_once(
            model,
            argument,
            f"{argument}={steps} is no multiple of steps_per_execution={at_once}; these {steps} "
            f"steps are taken, where plain Keras takes {min(taken, length or taken)}",
        )


def _print_once(model: keras.Model, topic: str, text: str) -> None:
    """Prints a difference on the chief, unless one of this topic was printed for this model."""
    state = state_of(model)
    if topic not in state.told:
        state.told.add(topic)
        speaker(placement_of(model.distribute_strategy).is_chief)(topic, text)

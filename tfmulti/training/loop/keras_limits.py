"""The limits of steps and epochs that a user sets in Keras for short runs.

See `keras.config.set_max_epochs` and `keras.config.set_max_steps_per_epoch`, and the variables
KERAS_MAX_EPOCHS and KERAS_MAX_STEPS_PER_EPOCH. An older Keras has no such limits.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import cast

import keras

from tfmulti.config.reading import ReadOptions
from tfmulti.distribution.strategies import Placement
from tfmulti.training.input.feed import DataArguments, make_feed
from tfmulti.training.input.interface import Feed, Method


def limited_epochs(epochs: int) -> int:
    """Returns the number of epochs, or the limit if that is smaller, with a warning."""
    limit = _limit("max_epochs")
    if not limit or limit >= epochs:
        return epochs
    warnings.warn(f"epochs={epochs} is limited to {limit} by keras.config.", stacklevel=3)
    return limit


def feed_within_limit(
    arguments: DataArguments,
    placement: Placement,
    reading: ReadOptions,
    method: Method = "predict",
) -> tuple[Feed, int | None]:
    """Returns the feed of data, and the steps of an epoch: the limit, if it is smaller.

    A warning tells that there is a limit. As in Keras, it also decides about the batch size of
    arrays that were given without one.

    Args:
        arguments: the data. Its `steps_per_epoch` is what the user has asked for; None for all
            batches.
        placement: as for `make_feed`.
        reading: as for `make_feed`.
        method: as for `make_feed`.

    Raises:
        DataError: as for `make_feed`.
        ModelError: as for `make_feed`.
    """
    requested, limit = arguments.steps_per_epoch, _limit("max_steps_per_epoch")
    if not limit or (requested and limit >= requested):
        return make_feed(arguments, placement, reading, method), requested
    warnings.warn(f"the steps of an epoch are limited to {limit} by keras.config.", stacklevel=3)
    feed = make_feed(replace(arguments, steps_per_epoch=limit), placement, reading, method)
    has_fewer = not requested and feed.data.steps is not None and feed.data.steps <= limit
    return feed, None if has_fewer else limit


def _limit(name: str) -> int | None:
    """Returns one of the limits, or None."""
    return cast("int | None", getattr(keras.config, name, lambda: None)())

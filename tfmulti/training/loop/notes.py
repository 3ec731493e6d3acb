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


def _is_of_a_library(method: Any) -> bool:
    """Returns whether a method is missing, or is one of Keras or tfmulti."""
    return getattr(method, "__module__", "keras.").startswith(("keras.", "tfmulti."))


class Notes:
    """Tells the differences of one call of a method of a model, each of them once for the model."""

    def __init__(self, model: keras.Model, verbose: Any) -> None:
        """Takes the prepared and compiled model, and the method's argument `verbose`."""
        self._model, self._verbose = model, verbose

    def tell_order(self, feed: Feed, shuffle: Shuffle | None) -> None:
        """Tells that a PyDataset is not read in the order of plain Keras, if it is shuffled."""
        if shuffle is not None and isinstance(feed, PyDatasetFeed):
            self._tell_once(
                "order",
                f"the PyDataset's batches have an order of tfmulti's own (seed {shuffle.seed}), "
                "not that of plain Keras; fit(shuffle=False) keeps the order of the batches",
            )

    def tell_steps(
        self, data: Any, feed: Feed, argument: str, steps: int | None, epochs: int = 1
    ) -> None:
        """Tells that plain Keras would take other steps, if that is so.

        Plain Keras takes a step that finds no data if only reading tells how long the data is. If
        an execution has several steps, it takes whole executions as long as there is data. It ends
        an epoch where arrays end.

        Args:
            data: the data, as the user gave it. Plain Keras cannot read a source of tfmulti.
            feed: the feed of the data.
            argument: the name of the argument that tells the number of steps.
            steps: the value of this argument.
            epochs: the number of epochs that take so many steps each.
        """
        if isinstance(data, Source):
            return
        at_once, length = int(self._model.steps_per_execution), feed.data.steps
        if steps is None:
            if length is None and at_once == 1 and not self._model.run_eagerly:
                self._tell_once(
                    "steps",
                    "the length of the data is not known before it is read; plain Keras takes one "
                    "step more at its end, without rows, which draws random numbers, and counts "
                    "for learning rates and for the losses of several outputs; "
                    f"{argument}= avoids this",
                )
            return
        taken = -(-steps // at_once) * at_once
        is_of_epochs = argument == "steps_per_epoch" and feed.data.endless
        if is_of_epochs and length is not None and length % steps and length < steps * epochs:
            self._tell_once(
                "steps",
                f"steps_per_epoch={steps} does not divide the {length} batches of the arrays; "
                "after the last batch the epoch goes on with the first, where plain Keras ends it",
            )
        elif taken > steps and (length is None or length > steps):
            self._tell_once(
                argument,
                f"{argument}={steps} is no multiple of steps_per_execution={at_once}; these "
                f"{steps} steps are taken, where plain Keras takes {min(taken, length or taken)}",
            )

    def tell_numbers(self, count: int | None, callbacks: Any, kind: str) -> None:
        """Tells that callbacks of the user's own get other numbers of batches, if that is so.

        With several steps in an execution, plain Keras gives the number that the last step of a
        whole execution has. In `predict` it calls the callbacks once for each execution.

        Args:
            count: the steps of an epoch; None if they are not known.
            callbacks: the argument of the method.
            kind: `train`, `test` or `predict`.
        """
        at_once = int(self._model.steps_per_execution)
        is_other = kind == "predict" or count is None or count % at_once
        methods = [f"on_{kind}_batch_{end}" for end in ("begin", "end")]
        own = [
            type(callback).__name__
            for callback in keras.tree.flatten(getattr(callbacks, "callbacks", callbacks))
            if any(not _is_of_a_library(getattr(type(callback), name, None)) for name in methods)
        ]
        if at_once > 1 and is_other and own:
            self._tell_once(
                f"batches of {kind}",
                f"with steps_per_execution={at_once}, {own[0]} gets the number of the last batch "
                "that was taken, where plain Keras counts whole executions",
            )

    def tell_draws(self) -> None:
        """Tells that plain Keras draws other random numbers, if XLA compiles its step."""
        is_compiled = self._model.jit_compile and not self._model.run_eagerly
        if is_compiled and any(map(is_seed, self._model.variables)):
            self._tell_once(
                "random",
                "dropout and other random numbers are those of plain Keras with "
                "compile(jit_compile=False); XLA, its default on GPUs, draws other ones",
            )

    def tell_changed_steps(self) -> None:
        """Tells that plain Keras takes other steps, if an execution was to have fewer or more."""
        function, now = self._model.train_function, int(self._model.steps_per_execution)
        if function is not None and function.compiled_steps != now:
            self._tell_once(
                "steps of an execution",
                f"steps_per_execution was {function.compiled_steps} in an earlier fit and is "
                f"{now}; plain Keras keeps its old function, and takes another number of steps",
            )

    def _tell_once(self, topic: str, text: str) -> None:
        """Tells a difference on the chief, unless one of this topic was told for the model."""
        state = state_of(self._model)
        is_chief = placement_of(self._model.distribute_strategy).is_chief
        if topic in state.told:
            return
        state.told.add(topic)
        if self._verbose not in (0, "0"):
            speaker(is_chief)(topic, text)
        elif is_chief:
            # The line of the user's program that calls `fit` or another method.
            warnings.warn(f"{topic}: {text}.", stacklevel=5)

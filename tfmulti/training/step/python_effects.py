"""What the Python code of a step does while TensorFlow traces the step, which its graph lacks.

A compiled step runs its Python code only while it is traced. tfmulti traces at other times than
plain Keras, and once for each replica. So numbers that the code changes, draws, or reads from
elsewhere may be other ones than in plain Keras. Each of these gives a warning on the chief.
"""

from __future__ import annotations

import functools
import pickle
import random
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from tfmulti.distribution import python_attributes
from tfmulti.distribution.python_attributes import Attributes
from tfmulti.distribution.strategies import placement_of
from tfmulti.training.state import kept_values, relocation
from tfmulti.training.state.trainer_state import state_of

_GENERATORS = (random.Random, np.random.Generator, np.random.RandomState)


class PythonEffects:
    """Watches a step while it is traced, or while it runs in eager mode.

    Attributes:
        attributes: the numbers and texts of the user's objects before the step.
        random_state: the state of Python's generator before the step.
    """

    def __init__(self, model: keras.Model, step: str, found: relocation.State) -> None:
        """Begins to watch.

        Args:
            model: the prepared model.
            step: such as `train_step`.
            found: the objects and functions of the model.
        """
        self._model, self._step, self._found = model, step, found
        self.attributes = python_attributes.read(found.own_objects)
        self.random_state = random.getstate()
        self._values = [] if model.run_eagerly else kept_values.read(found, step)
        own = kept_values.of_types(self._values, _GENERATORS)
        self._read_state: dict[str, Callable[[], Any]] = {
            "NumPy's generator (numpy.random)": functools.partial(np.random.get_state, False),
            **{name: functools.partial(_state_of, generator) for name, generator in own.items()},
        }
        self._states = self._states_now()

    def end(self, traces: list[Attributes]) -> None:
        """Warns of what the trace did in Python, and remembers the values that the step keeps.

        Args:
            traces: the numbers and texts before each trace of the step so far. Those before this
                trace are added.
        """
        if self._model.run_eagerly:
            return
        traces.append(self.attributes)
        traced = state_of(self._model).traced
        traced.collecting += kept_values.changed_collections(self._values)
        traced.values[self._step] = kept_values.read(self._found, self._step)
        if placement_of(self._model.distribute_strategy).is_chief:
            self._warn_of_changes(traces)
            self._warn_of_draws()

    def _warn_of_changes(self, traces: Sequence[Attributes]) -> None:
        """Warns of numbers and texts in Python that a trace changes, or that it keeps."""
        step = self._step
        changed = python_attributes.first_change(self.attributes)
        if changed is not None:
            warnings.warn(
                f"the {step} changes {changed} in Python. A compiled step does so only while it is "
                "traced, and tfmulti traces at other times than plain Keras. Count in a variable "
                "(self.add_weight).",
                stacklevel=2,
            )
            return
        changed = python_attributes.first_change(traces[0])
        if changed is not None:
            warnings.warn(
                f"{changed} has changed since the {step} was first traced. The step is traced "
                "again for this data, and takes the new value. Plain Keras may keep the old one. "
                "Keep the value in a variable (self.add_weight), or compile again after a change.",
                stacklevel=2,
            )

    def _states_now(self) -> dict[str, bytes]:
        """Returns the states of the generators of NumPy, and of the model's own, by their names."""
        return {name: pickle.dumps(read()) for name, read in self._read_state.items()}

    def _warn_of_draws(self) -> None:
        """Warns of a generator in Python from which the trace has drawn."""
        states = self._states_now()
        drawn_from = [name for name in states if states[name] != self._states[name]]
        # Keras draws a seed from Python's generator for a layer that is made meanwhile.
        draws_itself = kept_values.names_generator(self._found, self._step)
        if draws_itself and random.getstate() != self.random_state:
            drawn_from.append("Python's generator (random)")
        if drawn_from:
            warnings.warn(
                f"the {self._step} draws numbers from {drawn_from[0]}. A compiled step does so "
                "only while it is traced, and keeps these numbers. tfmulti traces at other times "
                "than plain Keras. Draw by keras.random.",
                stacklevel=2,
            )


def warn_of_old_values(model: keras.Model, step: str) -> None:
    """Warns on the chief, once, of a value in Python that was changed after a step was traced.

    Args:
        model: the prepared model.
        step: such as `train_step`.
    """
    if not placement_of(model.distribute_strategy).is_chief:
        return
    traced = state_of(model).traced
    changed = kept_values.first_new_value(traced.values.get(step, ()), traced.collecting)
    if changed is not None:
        del traced.values[step]
        warnings.warn(
            f"{changed} has changed since the {step} was traced, which keeps the old value until "
            "it is traced again. Plain Keras traces a step again for a batch of another size, and "
            "then takes the new value. Keep the value in a variable (self.add_weight), or compile "
            "again after a change.",
            # The line of the user's program that calls `fit` or another method.
            stacklevel=4,
        )


def _state_of(generator: Any) -> Any:
    """Returns the state of a generator of one of the types `_GENERATORS`."""
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(False)

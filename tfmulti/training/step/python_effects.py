"""What the Python code of a step does while TensorFlow traces the step, which its graph lacks.

A compiled step runs its Python code only while it is traced. tfmulti traces at other times than
plain Keras, and once for each replica. So numbers that the code changes, draws, or reads from
elsewhere may be other ones than in plain Keras. Each of these gives a warning on the chief.
"""

from __future__ import annotations

import contextlib
import functools
import pickle
import random
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from tfmulti.distribution import python_attributes
from tfmulti.distribution.python_attributes import Attributes
from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import ModelError
from tfmulti.training.state import model_search
from tfmulti.training.state.kept_values import KeptValues
from tfmulti.training.state.step_code import StepCode
from tfmulti.training.state.trainer_state import state_of
from tfmulti.training.state.value_copies import GENERATORS

# So many calls for one batch compare the values. Afterwards each tenth call does, or each hundredth
# if a comparison has taken longer than this.
_ALWAYS_COMPARED, _OFTEN, _SLOWLY, _SLOW_S = 10, 10, 100, 0.02


class PythonEffects:
    """Watches a step while it is traced, or while it runs in eager mode.

    Attributes:
        attributes: the numbers and texts of the user's objects before the step.
        has_any: whether the step has changed values in Python, or may draw numbers there. It is
            known as soon as the step has ended, and is the same on all workers.
    """

    def __init__(self, model: keras.Model, step: str, found: model_search.State) -> None:
        """Begins to watch.

        Args:
            model: the prepared model.
            step: such as `train_step`.
            found: the objects and functions of the model.
        """
        self._model, self._step, self._found = model, step, found
        self.attributes = python_attributes.read(found.own_objects)
        self.has_any = False
        self._random_state = random.getstate()
        self._values = None if model.run_eagerly else KeptValues(found, step)
        self._read_state: dict[str, Callable[[], Any]] = {}
        if self._values is None:
            known = state_of(model).traced.draws
            if step not in known:
                known[step] = _draws_in_python(StepCode(found, step))
            self._draws = known[step]
        else:
            code = self._values.code
            self._draws = _draws_in_python(code)
            own = self._values.of_types(GENERATORS)
            self._read_state |= {n: functools.partial(_state_of, g) for n, g in own.items()}
            # Another thread may draw from the global generators, too, such as a Dataset's.
            if code.uses(np.random, np.random.RandomState):
                read = functools.partial(np.random.get_state, False)
                self._read_state["NumPy's generator (numpy.random)"] = read
            if code.uses(random, random.Random):
                self._read_state["Python's generator (random)"] = random.getstate
        self._states = self._states_now()

    def begin_replica(self) -> None:
        """Lets each replica draw the same numbers from Python's generator.

        Another thread may draw meanwhile, such as a Dataset's. So the generator stays as it is if
        the step has no code that draws.
        """
        is_alone = placement_of(self._model.distribute_strategy).local_replicas == 1
        if self._draws and not is_alone:
            random.setstate(self._random_state)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Raises ModelError if the replicas cannot be traced, since a Boolean was switched.

        Raises:
            ModelError: one replica has switched a Boolean, and the others then ran other code.
        """
        try:
            yield
        except RuntimeError as error:
            switched = python_attributes.first_switch(self.attributes)
            if switched is None or "replica_context().merge_call" not in str(error):
                raise
            raise ModelError(
                f"the {self._step} switches {switched} in Python, so the other replicas run other "
                "code than the first one. Keep it in a variable, or call the model on a batch "
                "first."
            ) from error

    def end(self, traces: list[Attributes]) -> None:
        """Warns of what the trace did in Python, and remembers the values that the step keeps.

        Args:
            traces: the numbers and texts before each trace of the step so far. Those before this
                trace are added.
        """
        if self._values is None:
            return
        traces.append(self.attributes)
        traced = state_of(self._model).traced
        all_changed, other = self._values.changed()
        traced.changed.update(all_changed)
        traced.values[self._step] = KeptValues(self._found, self._step)
        changed = python_attributes.first_change(self.attributes)
        drawn_from = [name for name, s in self._states_now().items() if s != self._states[name]]
        # The states of generators may differ between workers, since threads may draw, too.
        self.has_any = bool(changed or all_changed or self._draws or self._read_state)
        if placement_of(self._model.distribute_strategy).is_chief:
            # A comparison with one device shows whether the others matter.
            changed = changed or (None if traced.is_compared_now else other)
            self._warn_of_changes(changed, traces)
            self._warn_of_draws(drawn_from)
            self._warn_of_reads(self._values.code)

    def _states_now(self) -> dict[str, bytes]:
        """Returns the states of the generators from which the step may draw, by their names."""
        return {name: pickle.dumps(read()) for name, read in self._read_state.items()}

    def _warn_of_changes(self, changed: str | None, traces: Sequence[Attributes]) -> None:
        """Warns of a value in Python that the trace has changed, or that it keeps."""
        step = self._step
        if changed is not None:
            warnings.warn(
                f"the {step} changes {changed} in Python. A compiled step does so only while it is "
                "traced, and tfmulti traces at other times than plain Keras. Keep the value in a "
                "variable (self.add_weight).",
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

    def _warn_of_draws(self, drawn_from: Sequence[str]) -> None:
        """Warns of the generators in Python from which the trace has drawn."""
        if drawn_from:
            warnings.warn(
                f"the {self._step} draws numbers from {drawn_from[0]}. A compiled step does so "
                "only while it is traced, and keeps these numbers. tfmulti traces at other times "
                "than plain Keras. Draw by keras.random.",
                stacklevel=2,
            )

    def _warn_of_reads(self, code: StepCode) -> None:
        """Warns once of what the step reads from outside of the program."""
        told = state_of(self._model).told
        read = code.reads_elsewhere()
        if read is not None and f"{self._step} reads" not in told:
            told.add(f"{self._step} reads")
            warnings.warn(
                f"the {self._step} may read {read[0]} in Python, in {read[1]}. A compiled step "
                "runs its Python code only while TensorFlow traces the step, and the graph keeps "
                "the value that was read then. tfmulti traces steps at other times than plain "
                "Keras. Read the value before fit, or in the data.",
                stacklevel=2,
            )


def _draws_in_python(code: StepCode) -> bool:
    """Returns whether a step may draw from Python's generator.

    Keras draws a seed from it for a layer that the step makes.
    """
    return code.uses(random, random.Random) or code.makes_parts_of_keras()


def warn_of_old_values(model: keras.Model, step: str, *, is_batch: bool = False) -> None:
    """Warns on the chief, once, of a value in Python that was changed after a step was traced.

    Args:
        model: the prepared model.
        step: such as `train_step`.
        is_batch: whether a method for one batch is called. To compare the values of 300 layers
            takes 10 ms, so after the first calls only some do it.
    """
    if not placement_of(model.distribute_strategy).is_chief:
        return
    traced = state_of(model).traced
    if is_batch:
        traced.batches[step] += 1
        is_slow = traced.compared_s > _SLOW_S
        is_first = traced.batches[step] <= _ALWAYS_COMPARED and not is_slow
        if not is_first and traced.batches[step] % (_SLOWLY if is_slow else _OFTEN):
            return
    values = traced.values.get(step)
    began = time.perf_counter()
    changed = None if values is None else values.first_new(traced.changed)
    traced.compared_s = time.perf_counter() - began
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
    """Returns the state of a generator of one of the types `GENERATORS`, if it has one."""
    if isinstance(generator, random.SystemRandom):
        return None
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state(False)

"""Local steps: each worker trains alone for some steps, then all average. For slow networks.

The algorithm is DiLoCo (Douillard et al., DiLoCo: Distributed low-communication training of
language models, 2023, arXiv:2311.08105):

1. Each worker takes H steps with the user's optimizer, on its own rows of each global batch, as if
   it were alone.
2. The workers average how far their weights have moved. Each worker counts by the rows that it has
   trained on, as in federated averaging (McMahan et al., 2017, arXiv:1602.05629). With equal
   numbers of rows that is the mean of DiLoCo.
3. The average is the gradient of an outer optimizer, SGD with Nesterov momentum. It moves the
   weights that all workers had before the H steps:

       gradient = sum over workers of part * (before - after)
       velocity = momentum * velocity + gradient
       weights = before - rate * (gradient + momentum * velocity)

An execution has H steps, or the steps that are left of an epoch, and ends with 2 and 3. So
callbacks, validation, checkpoints, and the end of an epoch or of `fit` see the same weights on all
workers. The weights before the H steps are those at the beginning of the execution, so only the
velocity must be kept. The states of the user's optimizers differ from worker to worker.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import keras
import numpy as np
import tensorflow as tf

from tfmulti.distribution import replica_context
from tfmulti.distribution.strategies import Placement, placement_of
from tfmulti.errors import DataError, ModelError, ResumeError
from tfmulti.keras_patches.optimizers import inner_optimizers
from tfmulti.training.state.model_checks import optimizers_of
from tfmulti.training.state.trainer_state import state_of

Tree = dict[str, Any]


class OuterOptimizer:
    """SGD with Nesterov momentum, whose gradient is the average move of the workers' weights.

    Args:
        model: the prepared model.
        wire: how gradients travel, as keyword arguments of `replica_context.summed`.

    Attributes:
        velocities: the momentum's variable of each weight; empty without momentum.
    """

    def __init__(self, model: keras.Model, wire: dict[str, Any]) -> None:
        rules = state_of(model).options
        self._rate, self._momentum = rules.outer_learning_rate, rules.outer_momentum
        self._strategy, self._wire = model.distribute_strategy, wire
        self._weights = {id(v): v for v in model.trainable_variables}.values()
        self.velocities: list[keras.Variable] = []
        if self._momentum:
            with self._strategy.scope():
                self.velocities = [
                    keras.Variable(np.zeros(v.shape), dtype=_wide(v), trainable=False)
                    for v in self._weights
                ]

    def now(self) -> Any:
        """Returns the current weights on each replica. Before the steps all workers have the same.

        Call it in cross-replica context.
        """
        return self._strategy.run(lambda: [tf.identity(v.value) for v in self._weights])

    def step(self, before: Sequence[tf.Tensor], part: tf.Tensor) -> None:
        """Gives all workers the same weights again. Every worker calls it, in replica context.

        Args:
            before: this replica's weights from `now`, before the steps.
            part: this worker's part of the rows that all workers have trained on since.
        """
        moved = [
            replica_context.weighed(
                tf.cast(old, _wide(v)) - tf.cast(tf.convert_to_tensor(v.value), _wide(v)), part
            )
            for v, old in zip(self._weights, before, strict=True)
        ]
        gradients = replica_context.summed(moved, **self._wire)
        for i, (variable, old) in enumerate(zip(self._weights, before, strict=True)):
            move = gradients[i]
            if self.velocities:
                velocity = self.velocities[i]
                following = self._momentum * tf.convert_to_tensor(velocity.value) + move
                velocity.assign(following)
                # Nesterov's momentum in the form in which PyTorch computes it.
                move = move + self._momentum * following
            variable.assign(tf.cast(tf.cast(old, move.dtype) - self._rate * move, old.dtype))


def _wide(variable: Any) -> str:
    """Returns the dtype in which a variable's moves are added: float64 for float64, or float32."""
    return "float64" if variable.dtype == "float64" else "float32"


def is_on(model: keras.Model) -> bool:
    """Returns whether a model takes local steps: `sync_every` is set for several workers."""
    several = placement_of(model.distribute_strategy).workers > 1
    return several and state_of(model).options.sync_every is not None


def make_outer(model: keras.Model, wire: dict[str, Any]) -> OuterOptimizer | None:
    """Returns a new outer optimizer, or None if the model takes no local steps.

    Args:
        model: the prepared model.
        wire: how gradients travel, as keyword arguments of `replica_context.summed`.

    Raises:
        ModelError: an optimizer of the model has `use_ema=True`, and its averages would differ
            from worker to worker.
    """
    if not is_on(model):
        return None
    every = state_of(model).options.sync_every
    for optimizer in optimizers_of(model):
        for each in (optimizer, *inner_optimizers(optimizer)):
            if getattr(each, "use_ema", False):
                raise ModelError(
                    f"the {type(each).__name__} has use_ema=True, and with --sync_every {every} "
                    "its averages would be each worker's own. Leave one of the two out."
                )
    return OuterOptimizer(model, wire)


def steps_at_once(model: keras.Model) -> int:
    """Returns the steps of an execution: `sync_every`, or the model's `steps_per_execution`."""
    every = state_of(model).options.sync_every
    return every if every is not None and is_on(model) else int(model.steps_per_execution)


def check_length_is_known(model: keras.Model) -> None:
    """Raises an error for data of unknown length, if the model takes local steps.

    Raises:
        DataError: the model takes local steps, so its data could end between two averages.
    """
    if is_on(model):
        raise DataError(
            f"--sync_every {state_of(model).options.sync_every} needs data that tells how many "
            "batches it has, since workers meet by their number: arrays, a Source, a PyDataset, or "
            "a Dataset with repeat() or assert_cardinality(). Leave --sync_every out for others."
        )


def capture(model: keras.Model) -> Tree:
    """Returns the part of a checkpoint for local steps: velocities, and all workers' slots.

    Runs on every worker, because local steps need a collective here. Without local steps the lists
    are empty.

    Returns:
        `sync_every`; `velocities`, one array for each weight; and `slots`, one array of shape
        [workers, …] for each variable of the user's optimizers.
    """
    state = state_of(model)
    tree: Tree = {"sync_every": state.options.sync_every, "velocities": [], "slots": []}
    if state.outer is not None:
        tree["velocities"] = [np.asarray(v) for v in state.outer.velocities]
        tree["slots"] = [value.numpy() for value in _reader(model)()]
    return tree


def restore(model: keras.Model, saved: Tree | None) -> None:
    """Restores what `capture` returned; each worker takes its own slots.

    If the number of workers has changed, each worker gets the mean of the saved slots. Of whole
    numbers and booleans it gets the first worker's.

    Args:
        model: the prepared model, with built optimizers.
        saved: what `capture` returned; None for a run without that part.

    Raises:
        ResumeError: the saved run has another `sync_every`.
    """
    state = state_of(model)
    before, now = saved["sync_every"] if saved else None, state.options.sync_every
    if before != now:
        raise ResumeError(
            f"saved sync_every={before}, this run sync_every={now}. Use the saved one, "
            "or begin a new run in a new folder."
        )
    if saved is None:
        return
    place = placement_of(model.distribute_strategy)
    if state.outer is not None:
        for variable, value in zip(state.outer.velocities, saved["velocities"], strict=False):
            variable.assign(value)
    if saved["slots"]:
        for variable, values in zip(_slots(model), saved["slots"], strict=True):
            variable.assign(_part_of(values, place))


def _part_of(values: np.ndarray, place: Placement) -> np.ndarray:
    """Returns this worker's value of a slot, out of the saved values [workers, …]."""
    if len(values) == place.workers:
        part: np.ndarray = values[place.rank]
    elif np.issubdtype(values.dtype, np.integer) or values.dtype == bool:
        part = values[0]
    else:
        part = values.mean(0, dtype=values.dtype)
    return part


def _slots(model: keras.Model) -> list[Any]:
    """Returns all variables of a model's optimizers."""
    return [v for optimizer in optimizers_of(model) for v in optimizer.variables]


_readers: weakref.WeakKeyDictionary[keras.Model, tuple[list[int], Callable[[], Any]]] = (
    weakref.WeakKeyDictionary()
)


def _reader(model: keras.Model) -> Callable[[], Any]:
    """Returns a function, a collective, that returns each slot's values as [workers, …]."""
    variables = _slots(model)
    known, read = _readers.get(model, ([], None))
    if read is None or known != [id(v) for v in variables]:
        strategy = model.distribute_strategy

        def values() -> Any:
            found = strategy.run(lambda: _gathered([tf.convert_to_tensor(v) for v in variables]))
            return [strategy.experimental_local_results(value)[0] for value in found]

        read = cast("Callable[[], Any]", tf.function(values, autograph=False))
        _readers[model] = ([id(v) for v in variables], read)
    return read


def _gathered(values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns each value of all replicas as [replicas, …], by two collectives for each dtype."""
    found: dict[int, tf.Tensor] = {}
    for dtype in sorted({v.dtype for v in values}, key=lambda d: d.name):
        places = [i for i, v in enumerate(values) if v.dtype == dtype]
        packed = tf.concat([tf.reshape(values[i], [-1]) for i in places], 0)
        # No collective gathers bfloat16.
        bits = tf.bitcast(packed, tf.float16) if dtype == tf.bfloat16 else packed
        rows = replica_context.gather_rows(bits[tf.newaxis])
        rows = tf.bitcast(rows, dtype) if dtype == tf.bfloat16 else rows
        parts = tf.split(rows, [values[i].shape.num_elements() for i in places], 1)
        for i, part in zip(places, parts, strict=True):
            found[i] = tf.reshape(part, [-1, *values[i].shape])
    return [found[i] for i in range(len(values))]

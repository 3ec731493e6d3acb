"""Workers that take steps of their own and meet seldom, for networks that are slow.

DiLoCo (Douillard et al., DiLoCo: Distributed low-communication training of language models, 2023,
arXiv:2311.08105): each worker takes H steps by the user's optimizer, on its own rows of each global
batch and as if it were alone. Then all meet: what the weights have moved, averaged over the
workers, is the gradient of an outer optimizer, SGD with Nesterov momentum, which moves the weights
that all had before. Each worker counts by the rows that it has trained on, as in federated
averaging (McMahan et al., 2017, arXiv:1602.05629); with equal shares that is DiLoCo's mean.

An execution is H steps, or what is left of an epoch, and ends where workers meet. So what is seen
from outside (by callbacks, validation, checkpoints, at the end of an epoch and of `fit`) are the
same weights on all workers, and what they had before is what they had when the execution began.
What workers do not share are the states of their optimizers.
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
    """Moves the weights that all workers had by the mean of what their steps have moved them.

    Args:
        wire: how gradients travel; see `replicas.summed`.
    """

    def __init__(self, model: keras.Model, wire: dict[str, Any]) -> None:
        rules = state_of(model).synchronisation
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
        """Returns the weights: before the steps, those that all workers have."""
        return self._strategy.run(lambda: [tf.identity(v.value) for v in self._weights])

    def step(self, before: Sequence[tf.Tensor], part: tf.Tensor) -> None:
        """Gives all workers the same weights; in replica context.

        Args:
            before: what `now` returned before the steps.
            part: this worker's part of the rows that were trained on since.
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
                move = move + self._momentum * following  # Nesterov's, as PyTorch writes it
            variable.assign(tf.cast(tf.cast(old, move.dtype) - self._rate * move, old.dtype))


def _wide(variable: Any) -> str:
    """Returns the type that a variable's moves are added in: float32 or wider."""
    return "float64" if variable.dtype == "float64" else "float32"


def is_on(model: keras.Model) -> bool:
    """Whether the model's workers take steps of their own: where there are several."""
    several = placement_of(model.distribute_strategy).workers > 1
    return several and state_of(model).synchronisation.every is not None


def make_outer(model: keras.Model, wire: dict[str, Any]) -> OuterOptimizer | None:
    """Returns a new outer optimizer where workers take steps of their own; else None.

    Raises:
        ModelError: the model's optimizer averages weights, which would be each worker's own.
    """
    if not is_on(model):
        return None
    every = state_of(model).synchronisation.every
    for optimizer in optimizers_of(model):
        for each in (optimizer, *inner_optimizers(optimizer)):
            if getattr(each, "use_ema", False):
                raise ModelError(
                    f"the {type(each).__name__} has use_ema=True, and with --sync_every {every} "
                    "its averages would be each worker's own. Leave one of the two out."
                )
    return OuterOptimizer(model, wire)


def steps_at_once(model: keras.Model) -> int:
    """Returns the steps of an execution: up to where workers meet, or what the user compiled."""
    every = state_of(model).synchronisation.every
    return every if every is not None and is_on(model) else int(model.steps_per_execution)


def check_length_is_known(model: keras.Model) -> None:
    """Raises DataError where workers take steps of their own, and data may end within these."""
    if is_on(model):
        raise DataError(
            f"--sync_every {state_of(model).synchronisation.every} needs data that tells how many "
            "batches it has, since workers meet by their number: arrays, a Source, a PyDataset, or "
            "a Dataset with repeat() or assert_cardinality(). Leave --sync_every out for others."
        )


def capture(model: keras.Model) -> Tree:
    """Returns the optimizers' part of a checkpoint: the outer one, and all workers' inner ones.

    Runs on every worker: a collective where workers take steps of their own.
    """
    state = state_of(model)
    tree: Tree = {"sync_every": state.synchronisation.every, "velocities": [], "slots": []}
    if state.outer is not None:
        tree["velocities"] = [np.asarray(v) for v in state.outer.velocities]
        tree["slots"] = [value.numpy() for value in _reader(model)()]
    return tree


def restore(model: keras.Model, saved: Tree | None) -> None:
    """Gives a model what `capture` returned; each worker its own part.

    Where the number of workers has changed, each begins with the mean of the others' slots.

    Raises:
        ResumeError: the saved run met at other steps.
    """
    state = state_of(model)
    before, now = saved["sync_every"] if saved else None, state.synchronisation.every
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
    if len(values) == place.workers:
        part: np.ndarray = values[place.rank]
    elif np.issubdtype(values.dtype, np.integer) or values.dtype == bool:
        part = values[0]
    else:
        part = values.mean(0, dtype=values.dtype)
    return part


def _slots(model: keras.Model) -> list[Any]:
    return [v for optimizer in optimizers_of(model) for v in optimizer.variables]


_readers: weakref.WeakKeyDictionary[keras.Model, tuple[list[int], Callable[[], Any]]] = (
    weakref.WeakKeyDictionary()
)


def _reader(model: keras.Model) -> Callable[[], Any]:
    """Returns a function of each slot's value on all workers, [workers, …]; a collective."""
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
    """Returns what all replicas have, [replicas, …] each; two collectives a dtype."""
    found: dict[int, tf.Tensor] = {}
    for dtype in sorted({v.dtype for v in values}, key=lambda d: d.name):
        places = [i for i, v in enumerate(values) if v.dtype == dtype]
        packed = tf.concat([tf.reshape(values[i], [-1]) for i in places], 0)
        bits = tf.bitcast(packed, tf.float16) if dtype == tf.bfloat16 else packed
        rows = replica_context.gather_rows(bits[tf.newaxis])
        rows = tf.bitcast(rows, dtype) if dtype == tf.bfloat16 else rows
        parts = tf.split(rows, [values[i].shape.num_elements() for i in places], 1)
        for i, part in zip(places, parts, strict=True):
            found[i] = tf.reshape(part, [-1, *values[i].shape])
    return [found[i] for i in range(len(values))]

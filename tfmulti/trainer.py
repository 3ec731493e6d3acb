"""`prepare(model)`: a Keras model whose `fit`, `evaluate` and `predict` are right everywhere.

`DistributedModel` takes the place of Keras' trainer *under* the model's own class: what the
user's class overrides (`train_step`, `compute_loss`, `fit`, …) still comes first, and its
`super()` calls arrive here. The replicas run the user's step as one device would; their
gradients meet in the optimizer and their metrics once an execution (`replicas`, `steps`).
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from tfmulti import keras_compat, steps, stopping
from tfmulti.callbacks.worker_safe import worker_safe
from tfmulti.errors import DataError, ModelError
from tfmulti.feed import Feed, make_feed, split_off_validation, weights_of_classes
from tfmulti.pipeline import from_batch
from tfmulti.replicas import reduce_gradients
from tfmulti.sources.arrays import ArraySource
from tfmulti.stopping import TrainerState
from tfmulti.strategies import Placement, placement_of

Model = TypeVar("Model", bound=keras.Model)


def prepare(model: Model, *, seed: int | None = None) -> Model:
    """Returns the same model with a `fit`, `evaluate` and `predict` for any strategy.

    Call it before or after `compile`, on a Functional, Sequential or subclassed model, with
    or without a `train_step` of its own. What Keras' documentation says of the three methods
    holds, with `batch_size` the global batch; every worker calls them alike, on the same data.

    Args:
        model: a Keras model made inside `strategy.scope()`.
        seed: of the data order; None draws one from NumPy's generator at each `fit` (the
            chief's draw holds for all workers).

    Raises:
        ModelError: no Keras model, or one that was made outside the strategy's scope.
    """
    if not isinstance(model, keras.Model):
        raise ModelError(f"prepare() takes a keras.Model, not a {type(model).__name__}.")
    _check_overrides(model)
    _check_scope(model)
    if not isinstance(model, DistributedModel):
        cls = type(model)
        derived = keras_compat.derived_class(cls, (cls, DistributedModel))
        object.__setattr__(model, "__class__", derived)
        for name in ("train_function", "test_function", "predict_function"):
            setattr(model, name, None)
    vars(model)["_tfmulti"] = TrainerState(seed=seed)
    return model


def state_of(model: keras.Model) -> TrainerState:
    """Returns what a prepared model remembers: counts, and why it stopped."""
    state = vars(model)["_tfmulti"]
    assert isinstance(state, TrainerState)
    return state


class DistributedModel(keras.Model):
    """Keras' trainer, written anew for `tf.distribute`; see `prepare`."""

    def make_train_function(self, force: bool = False) -> None:
        if self.train_function is None or force:
            for optimizer in _optimizers_of(self):
                keras_compat.take_reduced_gradients(optimizer, reduce_gradients)
            self.train_function = steps.make_execution(self, self._placement, training=True)

    def make_test_function(self, force: bool = False) -> None:
        if self.test_function is None or force:
            self.test_function = steps.make_execution(self, self._placement, training=False)

    def make_predict_function(self, force: bool = False) -> None:
        if self.predict_function is None or force:
            self.predict_function = steps.make_prediction(self, self._placement)

    @property
    def _placement(self) -> Placement:
        return placement_of(self.distribute_strategy)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Returns Keras' loss; that of no rows, which Keras leaves empty when run eagerly, is 0."""
        loss = super().compute_loss(x, y, y_pred, sample_weight, training)
        return tf.reduce_sum(loss) if tuple(loss.shape) == (0,) else loss

    def fit(  # Keras' own signature
        self, x: Any = None, y: Any = None, batch_size: int | None = None, epochs: int = 1,
        verbose: Any = "auto", callbacks: Any = None, validation_split: float = 0.0,
        validation_data: Any = None, shuffle: bool = True, class_weight: Any = None,
        sample_weight: Any = None, initial_epoch: int = 0, steps_per_epoch: int | None = None,
        validation_steps: int | None = None, validation_batch_size: int | None = None,
        validation_freq: Any = 1,
    ) -> keras.callbacks.History:
        """Trains for `epochs` epochs; see Keras' `Model.fit`. Every worker calls it alike."""
        _check_compiled(self)
        place = self._placement
        if validation_split and validation_data is None:
            parts, validation_data = split_off_validation((x, y, sample_weight), validation_split)
            x, y, sample_weight = parts
        feed = make_feed(
            x, y, sample_weight, placement=place, batch_size=batch_size,
            class_weight=class_weight, seed=_draw_seed(self) if shuffle else None,
            steps_per_epoch=steps_per_epoch,
        )
        validation = None
        if validation_data is not None:
            xv, yv, wv = keras.utils.unpack_x_y_sample_weight(validation_data)
            validation = make_feed(
                xv, yv, wv, placement=place, batch_size=validation_batch_size or batch_size,
                steps_per_epoch=validation_steps,
            )
        _build(self, feed.specs)
        per_epoch = steps_per_epoch or feed.steps
        tools = _callback_list(self, callbacks, verbose, epochs, per_epoch)
        self.stop_training = False
        state = state_of(self)
        state.steps, state.examples, state.stopped_by = 0, 0, None
        self.make_train_function()
        tools.on_train_begin()
        logs = _train(
            self, feed, tools, keras_compat.initial_epoch_of(self, initial_epoch), epochs,
            per_epoch, continues=feed.endless or steps_per_epoch is not None, validation=validation,
            validation_steps=validation_steps, validation_freq=validation_freq,
        )
        if isinstance(self.optimizer, keras.optimizers.Optimizer) and epochs > 0:
            self.optimizer.finalize_variable_values(self.trainable_weights)
        tools.on_train_end(logs)
        return self.history

    def evaluate(
        self, x: Any = None, y: Any = None, batch_size: int | None = None, verbose: Any = "auto",
        sample_weight: Any = None, steps: int | None = None, callbacks: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Returns loss and metrics over the data, each row counted once; see Keras."""
        _check_compiled(self)
        feed = make_feed(
            x, y, sample_weight, placement=self._placement, batch_size=batch_size,
            steps_per_epoch=steps,
        )
        _build(self, feed.specs)
        count = steps or feed.steps
        tools = _callback_list(self, callbacks, verbose, 1, count)
        self.make_test_function()
        self.stop_evaluating = False
        tools.on_test_begin()
        self.reset_metrics()
        logs: dict[str, Any] = {}
        iterator = feed.iterate(0)
        for first, last in _executions(count, self.steps_per_execution):
            tools.on_test_batch_begin(first)
            wish = bool(self.stop_evaluating)
            outcome = _run(self, self.test_function, iterator, last - first + 1, wish)
            if outcome is None:
                break
            logs = outcome.logs
            tools.on_test_batch_end(last, logs)
            if _stops(self, bool(self.stop_evaluating), outcome.votes):
                break
        feed.end_epoch()
        tools.on_test_end(_as_floats(logs))
        return _results(logs, return_dict)

    def predict(
        self, x: Any, batch_size: int | None = None, verbose: Any = "auto",
        steps: int | None = None, callbacks: Any = None,
    ) -> Any:
        """Returns the outputs of all rows, in order, on every worker; see Keras."""
        feed = make_feed(
            x, placement=self._placement, batch_size=batch_size, steps_per_epoch=steps
        )
        count = steps or feed.steps
        tools = _callback_list(self, callbacks, verbose, 1, count)
        self.make_predict_function()
        self.stop_predicting = False
        tools.on_predict_begin()
        batches = []
        iterator = feed.iterate(0)
        for first, last in _executions(count, 1):
            tools.on_predict_batch_begin(first)
            try:
                outputs = self.predict_function(iterator)
            except tf.errors.OutOfRangeError:
                break
            batches.append(outputs)
            tools.on_predict_batch_end(last, {"outputs": outputs})
            if self.stop_predicting:
                break
        feed.end_epoch()
        tools.on_predict_end()
        if not batches:
            raise DataError("predict was given no rows.")
        return tf.nest.map_structure(_concatenated, *batches)

    def train_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, class_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Takes one step on one global batch of arrays; see Keras. Every worker calls it."""
        _check_compiled(self)
        if class_weight is not None:
            sample_weight = weights_of_classes(y, class_weight)
        batch = _one_batch(x, y, sample_weight)
        _build(self, batch)
        self.make_train_function()
        return _on_batch(self, self.train_function, batch, return_dict)

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """Returns loss and metrics of one global batch of arrays; see Keras."""
        _check_compiled(self)
        batch = _one_batch(x, y, sample_weight)
        _build(self, batch)
        self.make_test_function()
        return _on_batch(self, self.test_function, batch, return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """Returns the outputs of one global batch of arrays, rows in order; see Keras."""
        self.make_predict_function()
        outputs = self.predict_function(from_batch(_one_batch(x, None, None), self._placement))
        return tf.nest.map_structure(_concatenated, outputs)

    def save(self, filepath: Any, overwrite: bool = True, **kwargs: Any) -> None:
        """Saves the model as Keras does: it loads without tfmulti."""
        things = [self, *_optimizers_of(self)]
        things += [t.inner_optimizer for t in things if hasattr(t, "inner_optimizer")]
        with keras_compat.original_classes(*things):
            self.save(filepath, overwrite=overwrite, **kwargs)


def _train(
    model: DistributedModel, feed: Feed, tools: keras.callbacks.CallbackList, initial_epoch: int,
    epochs: int, per_epoch: int | None, *, continues: bool, validation: Feed | None,
    validation_steps: int | None, validation_freq: Any,
) -> dict[str, Any]:
    """Runs the epochs and returns the last one's logs. Every worker runs it alike."""
    vote = steps.make_vote(model.distribute_strategy) if model._placement.workers > 1 else None
    logs: dict[str, Any] = {}
    iterator = None
    for epoch in range(initial_epoch, epochs):
        model.reset_metrics()
        tools.on_epoch_begin(epoch)
        if iterator is None or not continues:
            iterator = feed.iterate(epoch * (per_epoch or 0))
        logs, ended = _epoch(model, iterator, tools, per_epoch)
        if ended:
            iterator = None
        feed.end_epoch()
        interrupted = state_of(model).stopped_by is not None
        if validation is not None and not interrupted and _validates(epoch, validation_freq):
            found = model.evaluate(
                validation, steps=validation_steps, callbacks=tools, return_dict=True
            )
            logs |= {f"val_{name}": value for name, value in found.items()}
        if state_of(model).stopped_by is not None:
            break  # part of an epoch is no epoch: histories hold whole ones
        tools.on_epoch_end(epoch, logs)
        wish = bool(model.stop_training)
        if _stops(model, wish, vote(_votes(model, wish)) if vote else None):
            break
    return logs


def _epoch(
    model: DistributedModel, iterator: Any, tools: keras.callbacks.CallbackList,
    per_epoch: int | None,
) -> tuple[dict[str, Any], bool]:
    """Trains one epoch and returns its last logs, and whether the data came to its end."""
    logs: dict[str, Any] = {}
    state = state_of(model)
    for first, last in _executions(per_epoch, model.steps_per_execution):
        tools.on_train_batch_begin(first)
        wish = bool(model.stop_training)
        outcome = _run(model, model.train_function, iterator, last - first + 1, wish)
        if outcome is None:
            _check_data_was_enough(per_epoch, first)
            return _as_floats(logs), True
        logs = outcome.logs
        state.steps += last - first + 1
        state.examples += int(outcome.rows)
        tools.on_train_batch_end(last, logs)
        if _stops(model, bool(model.stop_training), outcome.votes):
            model.stop_training = True
            break
    return _as_floats(logs), False


def _as_floats(logs: dict[str, Any]) -> dict[str, Any]:
    return {name: float(np.asarray(value)) for name, value in logs.items()}


def _executions(steps: int | None, steps_per_execution: int) -> Iterator[tuple[int, int]]:
    """Yields the first and the last step of each execution of an epoch.

    Where the number of steps is unknown an execution is one step: the data may end anywhere.
    """
    if steps is None:
        yield from ((step, step) for step in itertools.count())
    else:
        for first in range(0, steps, steps_per_execution):
            yield first, min(first + steps_per_execution, steps) - 1


def _run(
    model: DistributedModel, execute: steps.Execution, iterator: Any, count: int, wish: bool
) -> steps.Outcome | None:
    """Returns what an execution gave, or None where the data has come to its end."""
    try:
        outcome = execute(iterator, count, _votes(model, wish))
    except tf.errors.OutOfRangeError:
        return None
    if model._placement.workers > 1 and float(outcome.digest_spread) > 0.1:
        raise DataError(
            "the workers read different batches: the data is shuffled without a seed, or is not "
            "the same on all workers. Give shuffle(seed=...), or pass arrays, which tfmulti "
            "shuffles alike everywhere."
        )
    return outcome


def _votes(model: DistributedModel, wish: bool) -> list[float]:
    return stopping.votes(wish, state_of(model).interrupted)


def _stops(model: DistributedModel, wish: bool, counted: Any) -> bool:
    """Returns whether to stop here: the same answer on all workers at the same step.

    With one worker a wish counts at once; with several, when the others know of it.
    """
    alone = model._placement.workers == 1
    reason = stopping.verdict(_votes(model, wish) if alone else np.asarray(counted).tolist())
    if reason in ("SIGINT", "SIGTERM"):
        state_of(model).stopped_by = reason
        model.stop_training = True
    return reason is not None


def interrupt(model: keras.Model, reason: str) -> None:
    """Makes a running `fit` or `evaluate` end after the next execution, on all workers.

    Safe to call from a signal handler or another thread. `reason` is SIGINT or SIGTERM.
    """
    state_of(model).interrupted = reason


def _check_data_was_enough(steps: int | None, seen: int) -> None:
    if seen == 0:
        raise DataError("the data has no batches. Give a Dataset that yields at least one.")
    if steps is not None:
        warnings.warn(
            f"the data ended after {seen} of {steps} steps of the epoch. "
            "Use Dataset.repeat(), or fewer steps_per_epoch.", stacklevel=4,
        )


def _validates(epoch: int, frequency: Any) -> bool:
    return epoch + 1 in frequency if isinstance(frequency, list) else (epoch + 1) % frequency == 0


def _concatenated(*parts: Any) -> Any:
    joined = tf.concat(parts, axis=0) if len(parts) > 1 else parts[0]
    return joined.numpy() if isinstance(joined, tf.Tensor) else joined


def _callback_list(
    model: DistributedModel, callbacks: Any, verbose: Any, epochs: int, steps: int | None
) -> keras.callbacks.CallbackList:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    chief = model._placement.is_chief
    shown = (1 if chief else 0) if verbose == "auto" else int(verbose)
    return keras.callbacks.CallbackList(
        worker_safe(callbacks, model._placement), add_history=True, add_progbar=shown != 0,
        verbose=shown, epochs=epochs, steps=steps, model=model,
    )


def _draw_seed(model: DistributedModel) -> int:
    """Returns the seed of the data order, the same on all workers."""
    seed = state_of(model).seed
    if seed is not None:
        return seed
    drawn = int(np.random.randint(2**20))  # float32 carries it exactly, times 16 replicas
    place = model._placement
    if place.workers == 1:
        return drawn
    vote = steps.make_vote(model.distribute_strategy)
    return round(vote([drawn if place.is_chief else 0])[0] / place.local_replicas)


def _one_batch(x: Any, y: Any, sample_weight: Any) -> Any:
    source = ArraySource(keras.utils.pack_x_y_sample_weight(x, y, sample_weight))
    return tf.nest.map_structure(tf.convert_to_tensor, source.data)


def _on_batch(
    model: DistributedModel, execute: steps.Execution, batch: Any, return_dict: bool
) -> Any:
    model.reset_metrics()
    shards = from_batch(batch, model._placement)
    outcome = _run(model, execute, shards, 1, False)
    assert outcome is not None
    return _results(outcome.logs, return_dict)


def _results(logs: dict[str, Any], return_dict: bool) -> Any:
    logs = _as_floats(logs)
    values = list(logs.values())
    return logs if return_dict else values[0] if len(values) == 1 else values


def _optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """Returns the compiled optimizer, and those that the model holds for its own train_step."""
    found = [getattr(model, "optimizer", None), *vars(model).values()]
    optimizers = [o for o in found if isinstance(o, keras.optimizers.Optimizer)]
    return list({id(o): o for o in optimizers}.values())


def _build(model: DistributedModel, specs: Any) -> None:
    """Builds what a batch of this form needs, in the scope. Every worker calls it."""
    try:
        with model.distribute_strategy.scope():
            keras_compat.build_from_specs(model, specs)
    except RuntimeError as error:
        if "Mixing different tf.distribute.Strategy" in str(error):
            raise ModelError(
                "the optimizer was made outside the strategy's scope. Make it and compile the "
                "model inside 'with strategy.scope():'."
            ) from None
        if type(model).train_step is keras.Model.train_step:
            raise
        # A train_step of its own may need no call(), as a GAN's: its parts are built.
    _check_scope(model)


def _check_compiled(model: DistributedModel) -> None:
    if not model.compiled:
        raise ModelError("the model is not compiled. Call model.compile(...) first.")


def _check_overrides(model: keras.Model) -> None:
    for name in ("make_train_function", "make_test_function", "make_predict_function"):
        if name in vars(type(model)) and not isinstance(model, DistributedModel):
            raise ModelError(
                f"{type(model).__name__} overrides {name}, which is what prepare() replaces. "
                f"Override {name.split('_')[1]}_step instead."
            )


def _check_scope(model: keras.Model) -> None:
    strategy = model.distribute_strategy
    optimizers = _optimizers_of(model)
    parts = {
        "model": model.variables,
        "optimizer": [v for o in optimizers for v in o.variables],
        "metrics": [v for metric in model.metrics for v in metric.variables],
    }
    for name, variables in parts.items():
        for variable in variables:
            if not strategy.extended.variable_created_in_scope(variable.value):
                raise ModelError(
                    f"the {name}'s variable {variable.path!r} was not made inside the "
                    "strategy's scope, so its replicas would drift apart. Build and compile the "
                    "model inside 'with strategy.scope():'."
                )

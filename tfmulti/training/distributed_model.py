"""`prepare(model)`: a Keras model whose `fit`, `evaluate` and `predict` are right everywhere.

`DistributedModel` takes the place of Keras' trainer *under* the model's own class: what the
user's class overrides (`train_step`, `compute_loss`, `fit`, …) still comes first, and its
`super()` calls arrive here. The replicas run the user's step as one device would; their
gradients meet in the optimizer and their metrics once an execution (`replicas`, `steps`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import keras
import tensorflow as tf

from tfmulti.config import run_directory
from tfmulti.config.fit_config import COMPRESSIONS
from tfmulti.config.local_sync import PACK_BYTES, SyncOptions
from tfmulti.config.reading import ReadOptions
from tfmulti.distribution import connections, losses
from tfmulti.distribution.replica_context import own_gradients, reduce_gradients
from tfmulti.distribution.strategies import Placement, placement_of
from tfmulti.errors import ConfigError, ModelError
from tfmulti.keras_patches.classes import derived_class
from tfmulti.keras_patches.losses import watch_losses
from tfmulti.keras_patches.optimizers import take_reduced_gradients
from tfmulti.training.checkpoint import resume
from tfmulti.training.checkpoint.callback import Checkpoint
from tfmulti.training.input.feed import (
    Feed,
    array_source,
    make_feed,
    split_off_validation,
    weights_of_classes,
)
from tfmulti.training.input.pipeline import from_batch
from tfmulti.training.loop import loops as epochs_loop
from tfmulti.training.safe_callbacks import saving_elsewhere, worker_safe
from tfmulti.training.state import model_checks, relocation
from tfmulti.training.state.trainer_state import TrainerState, remember, state_of
from tfmulti.training.step import local_steps
from tfmulti.training.step.execution import Execution
from tfmulti.training.step.microbatches import take
from tfmulti.training.step.prediction import make_prediction
from tfmulti.training.step.steps_per_execution import StepsPerExecution
from tfmulti.training.verification import verification

Model = TypeVar("Model", bound=keras.Model)


def prepare(
    model: Model,
    *,
    seed: int | None = None,
    microbatches: int = 1,
    sync_batch_norm: bool = True,
    gradient_compression: str = "none",
    reader_threads: int | None = None,
    skip_bad_records: int = 0,
    sync_every: int | None = None,
    outer_learning_rate: float = 0.7,
    outer_momentum: float = 0.9,
    steps_per_execution: str | None = None,
    jit_compile: bool | None = None,
    verify: bool | None = None,
    verify_steps: int = 1,
) -> Model:
    """Returns the same model with a `fit`, `evaluate` and `predict` for any strategy.

    Call it before or after `compile`, on a Functional, Sequential or subclassed model, with
    or without a `train_step` of its own. What Keras' documentation says of the three methods
    holds, with `batch_size` the global batch; every worker calls them alike, on the same data.

    Args:
        model: a Keras model made inside `strategy.scope()`.
        seed: of the data order; None takes one that follows from the state of NumPy's generator,
            which stays as it is, and from how often `fit` was called (the chief's holds for all
            workers).
        microbatches: passes of one step: each replica's rows are computed in that many
            parts, and the weights are updated once, by the gradient of the whole batch.
        sync_batch_norm: BatchNormalization layers take mean and variance over the rows of
            all replicas, as one device would: two collectives a layer and step. False leaves
            it to the layers' own `synchronized`; moving statistics are then averaged over
            the replicas, weighted by their rows.
        gradient_compression: the type that gradients have between workers: none (their own),
            float16 or bfloat16, which halve the traffic and round each gradient, and then their
            sum, to 11 or 8 binary digits. They are added in float32, but by TensorFlow's
            collectives (GPUs, workers that cannot connect) in their own type. float16 loses what is
            below 6e-8 and overflows above 65,504, before gradients are clipped; bfloat16 does not.
            Weights stay alike everywhere; they are not one device's to the last digits any more.
            Nothing within one process.
        reader_threads: how many examples of a `Source` each worker reads at a time; 0: in the
            thread that feeds the steps; None: as many as it has cores, where reading is slow.
        skip_bad_records: how many examples of a `Source` that cannot be read are left out in
            a pass over the data, counted over all workers; one more is an error.
        sync_every: how many steps each worker takes by itself, on its own rows, before all meet
            (`local_steps`): less talk over a slow network, and not one device's numbers. They meet
            at the end of an epoch, too; an execution is as many steps, whatever
            `steps_per_execution` says. None: every step is taken together, exactly. With one
            worker it does nothing.
        outer_learning_rate: what the mean of the workers' moves is multiplied by where they meet.
        outer_momentum: Nesterov momentum of these moves.
        steps_per_execution: `auto` takes as many steps at a time in `fit` as last a tenth of a
            second, where that saves more than it costs to compile; callbacks are called once for
            them, as with `compile(steps_per_execution=N)`. None: as `compile` says.
        jit_compile: whether XLA compiles the forward and backward pass of each replica. None: as
            `compile(jit_compile=True)` asks for it, and on GPUs, as Keras alone does with one:
            there False here turns it off, since Keras does not tell its own False from the user's.
            A step in which replicas need each other before their gradients meet, or that draws
            random numbers, is not compiled: these would be XLA's own.
        verify: whether the first `fit` takes its first step also on one device, by plain Keras,
            and raises VerificationError where the numbers differ by more than rounding; nothing is
            trained or changed then. None: with several replicas, where a train_step, loss,
            metric, layer or optimizer is not Keras' own. It takes one more trace and two steps of
            the whole batch on one device.
        verify_steps: how many first steps are compared.

    Raises:
        ModelError: no Keras model, or one that was made outside the strategy's scope, or
            `microbatches` below 1.
        ConfigError: a number out of its range, an unknown compression or pace, or `sync_every`
            where workers have several replicas each.
    """
    if not isinstance(model, keras.Model):
        raise ModelError(f"prepare() takes a keras.Model, not a {type(model).__name__}.")
    if not isinstance(model, DistributedModel):
        model_checks.check_overrides(model)
    relocation.enter(model)
    model_checks.check_scope(model)
    if microbatches < 1:
        raise ModelError(f"microbatches is {microbatches}, but it must be at least 1.")
    if gradient_compression not in COMPRESSIONS:
        raise ConfigError(
            f"gradient_compression is {gradient_compression!r}, "
            f"but it must be one of {', '.join(COMPRESSIONS)}."
        )
    if steps_per_execution not in (None, "auto"):
        raise ConfigError(
            f"steps_per_execution is {steps_per_execution!r}, but it must be 'auto' or None. "
            "Give a number to compile()."
        )
    if verify_steps < 1:
        raise ConfigError(f"verify_steps is {verify_steps}, but it must be at least 1.")
    place = placement_of(model.distribute_strategy)
    synchronisation = SyncOptions(sync_every, outer_learning_rate, outer_momentum)
    synchronisation.check_place(place.workers, place.local_replicas)
    reading = ReadOptions(reader_threads, skip_bad_records)
    state = TrainerState(
        seed, microbatches, sync_batch_norm, gradient_compression, reading, synchronisation
    )
    state.chooses_pace = steps_per_execution == "auto"
    state.jit_compile = jit_compile
    state.verify, state.verify_steps = verify, verify_steps
    if not isinstance(model, DistributedModel):
        cls = type(model)
        derived = derived_class(cls, (cls, DistributedModel))
        object.__setattr__(model, "__class__", derived)
    for name in ("train_function", "test_function", "predict_function"):
        setattr(model, name, None)
    remember(model, state)
    return model


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _on_all_workers(
    method: Callable[Concatenate[Any, Arguments], Result],
) -> Callable[Concatenate[Any, Arguments], Result]:
    """Returns a method that says, where another worker is not there, that all must call it."""

    @functools.wraps(method)
    def called(self: Any, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with connections.call_of_all(self._placement, method.__name__):
            return method(self, *args, **kwargs)

    return called


class DistributedModel(keras.Model):
    """Keras' trainer, written anew for `tf.distribute`; see `prepare`."""

    train_function: Any
    test_function: Any
    predict_function: Any

    def make_train_function(self, force: bool = False) -> None:
        if self.train_function is None or force:
            outer = state_of(self).outer = local_steps.make_outer(self, self._wire)
            all_meet = functools.partial(reduce_gradients, **self._wire)
            reduce = all_meet if outer is None else own_gradients
            for optimizer in model_checks.optimizers_of(self):
                take_reduced_gradients(optimizer, reduce, take)
            watch_losses(self)
            self.train_function = Execution(self, self._placement, training=True)

    def make_test_function(self, force: bool = False) -> None:
        if self.test_function is None or force:
            watch_losses(self)
            self.test_function = Execution(self, self._placement, training=False)

    def make_predict_function(self, force: bool = False) -> None:
        if self.predict_function is None or force:
            self.predict_function = make_prediction(self, self._placement)

    @property
    def _wire(self) -> dict[str, Any]:
        """How gradients travel between workers; see `reduce_gradients`."""
        if self._placement.workers == 1:
            return {}
        compression = state_of(self).gradient_compression
        wire = None if compression == "none" else tf.as_dtype(compression)
        return {"wire": wire, "by_bytes": PACK_BYTES}

    def _pace(self, checkpoint: Checkpoint | None) -> StepsPerExecution:
        """Returns how many steps executions have: as compiled, or chosen if that was asked for.

        On GPUs a step by itself takes its data there while the one before runs.
        """
        given = local_steps.steps_at_once(self)
        chosen = state_of(self).chooses_pace and given == 1 and not local_steps.is_on(self)
        if not chosen or self.run_eagerly or self._placement.gpus:
            return StepsPerExecution(given)
        return StepsPerExecution(None, most=checkpoint.every_steps if checkpoint else None)

    @property
    def _placement(self) -> Placement:
        return placement_of(self.distribute_strategy)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Returns the loss of this replica's rows as a part of the global one; see Keras."""
        with losses.compiled_loss():
            return super().compute_loss(x, y, y_pred, sample_weight, training)

    @_on_all_workers
    def fit(  # Keras' own signature
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
    ) -> keras.callbacks.History:
        """Trains for `epochs` epochs; see Keras' `Model.fit`. Every worker calls it alike."""
        model_checks.check_compiled(self)
        relocation.enter(self)
        place = self._placement
        if validation_split and validation_data is None:
            parts, validation_data = split_off_validation((x, y, sample_weight), validation_split)
            x, y, sample_weight = parts
        with resume.checkpoint_in(callbacks) as checkpoint:
            record = resume.find_record(self, checkpoint)
            drawn = epochs_loop.draw_seed(self) if shuffle else None
            seed = resume.seed_of(record, drawn, state_of(self).seed is not None)
            feed = make_feed(
                x,
                y,
                sample_weight,
                placement=place,
                batch_size=batch_size,
                class_weight=class_weight,
                seed=seed,
                steps_per_epoch=steps_per_epoch,
                reading=state_of(self).reading,
                is_training=True,
            )
            validation = None
            if validation_data is not None:
                xv, yv, wv = keras.utils.unpack_x_y_sample_weight(validation_data)
                validation = make_feed(
                    xv,
                    yv,
                    wv,
                    placement=place,
                    batch_size=validation_batch_size or batch_size,
                    steps_per_epoch=validation_steps,
                    reading=state_of(self).reading,
                )
            epochs_loop.check_same_data(self, feed, validation)
            feed.begin_call()
            # A comparison with one device begins with all slots, as a checkpoint does.
            needs_slots = checkpoint is not None or bool(state_of(self).verify)
            model_checks.build(self, feed.specs, optimizers=needs_slots)
            count = steps_per_epoch or feed.steps
            self.stop_training = False
            state = state_of(self)
            state.specs = feed.specs
            state.steps = state.steps_before = state.examples = state.examples_before = 0
            state.lost = 0
            state.stopped_by, state.saved_variables = None, {}
            self.make_train_function()
            if record is None and epochs > initial_epoch:
                keeps = checkpoint is not None
                feed = verification.before_training(
                    self, feed, count, keeps_position=keeps, tells=verbose not in (0, "0")
                )
            all_callbacks = _callback_list(self, callbacks, verbose, epochs, count, history=True)
            all_callbacks.on_train_begin()
            keeper = None
            if checkpoint is not None:
                feeds = {"training": feed} | ({"validation": validation} if validation else {})
                keeper = resume.CheckpointManager(
                    self, checkpoint, record, all_callbacks, feeds, seed
                )
            training = epochs_loop.Training(
                feed,
                all_callbacks,
                initial_epoch,
                epochs,
                steps_per_epoch,
                validation,
                validation_steps,
                validation_freq,
                keeper,
                self._pace(checkpoint),
            )
            with (
                saving_elsewhere(all_callbacks.callbacks, place),
                resume.saving_at_signals(self, checkpoint),
                closing(feed, validation),
            ):
                logs = epochs_loop.train(self, training)
                if isinstance(self.optimizer, keras.optimizers.Optimizer) and epochs > 0:
                    self.optimizer.finalize_variable_values(self.trainable_weights)
                training.callbacks.on_train_end(logs)
        return self.history

    @_on_all_workers
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Returns loss and metrics over the data, each row counted once; see Keras."""
        model_checks.check_compiled(self)
        if self.test_function is None:
            relocation.enter(self)
        feed = make_feed(
            x,
            y,
            sample_weight,
            placement=self._placement,
            batch_size=batch_size,
            steps_per_epoch=steps,
            reading=state_of(self).reading,
        )
        feed.begin_call()
        model_checks.build(self, feed.specs)
        count = _steps_of(feed, steps)
        tools = _callback_list(self, callbacks, verbose, 1, count)
        self.make_test_function()
        with closing(None if feed is x else feed):
            found = epochs_loop.evaluate(self, feed, count, tools)
        return _results(found, return_dict)

    @_on_all_workers
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Returns the outputs of all rows, in order, on every worker; see Keras."""
        relocation.enter(self)
        feed = make_feed(
            x,
            placement=self._placement,
            batch_size=batch_size,
            steps_per_epoch=steps,
            reading=ReadOptions(state_of(self).reading.threads, keeps_each=True),
        )
        count = _steps_of(feed, steps)
        tools = _callback_list(self, callbacks, verbose, 1, count)
        self.make_predict_function()
        with closing(feed):
            return epochs_loop.predict(self, feed, count, tools)

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Takes one step on one global batch of arrays; see Keras. Every worker calls it."""
        model_checks.check_compiled(self)
        if self.train_function is None:
            relocation.enter(self)
        if class_weight is not None:
            sample_weight = weights_of_classes(y, class_weight, sample_weight)
        batch = _one_batch(x, y, sample_weight)
        model_checks.build(self, batch)
        self.make_train_function()
        return _on_batch(self, self.train_function, batch, return_dict)

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """Returns loss and metrics of one global batch of arrays; see Keras."""
        model_checks.check_compiled(self)
        if self.test_function is None:
            relocation.enter(self)
        batch = _one_batch(x, y, sample_weight)
        model_checks.build(self, batch)
        self.make_test_function()
        return _on_batch(self, self.test_function, batch, return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """Returns the outputs of one global batch of arrays, rows in order; see Keras."""
        if self.predict_function is None:
            relocation.enter(self)
        self.make_predict_function()
        batch = from_batch(_one_batch(x, None, None), self._placement)
        outputs = self.predict_function(batch).outputs
        return tf.nest.map_structure(epochs_loop.concatenated, outputs)

    def save(self, filepath: Any, overwrite: bool = True, **kwargs: Any) -> None:
        """Saves the model as Keras does: it loads without tfmulti.

        Several workers may save to one file: it is always that of one of them, and whole.
        """
        with self._whole(filepath, overwrite) as path, model_checks.as_made(self):
            keras.Model.save(self, path, overwrite=overwrite, **kwargs)

    def save_weights(self, filepath: Any, overwrite: bool = True, **kwargs: Any) -> None:
        """Saves the weights as Keras does; to one file as `save` does."""
        with self._whole(filepath, overwrite) as path:
            keras.Model.save_weights(self, path, overwrite=overwrite, **kwargs)

    def _whole(self, filepath: Any, overwrite: bool) -> contextlib.AbstractContextManager[Any]:
        """Gives where to write a file that others may write, too, and puts it in its place."""
        if self._placement.workers > 1 and overwrite and isinstance(filepath, (str, os.PathLike)):
            path = Path(filepath)
            if path.suffix in (".keras", ".h5") and path.parent.is_dir() and not path.is_dir():
                return run_directory.replacing(path)
        return contextlib.nullcontext(filepath)

    def __reduce__(self) -> Any:
        """Pickles and copies the model as Keras does: the copy is to be prepared again."""
        with model_checks.as_made(self):
            return self.__reduce__()


def _steps_of(feed: Feed, asked: int | None) -> int | None:
    """Returns how many batches are evaluated: those that were asked for, but each once."""
    if asked and feed.endless and feed.steps is not None and asked > feed.steps:
        warnings.warn(
            f"the data ended after {feed.steps} of {asked} steps. Ask for fewer steps.",
            stacklevel=4,
        )
        return feed.steps
    return asked or feed.steps


@contextlib.contextmanager
def closing(*feeds: Feed | None) -> Iterator[None]:
    """Closes feeds at its end, so that none of their threads is left."""
    try:
        yield
    finally:
        for feed in feeds:
            if feed is not None:
                feed.close()


def _callback_list(
    model: DistributedModel,
    callbacks: Any,
    verbose: Any,
    epochs: int,
    steps: int | None,
    *,
    history: bool = False,
) -> keras.callbacks.CallbackList:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    chief = model._placement.is_chief
    shown = (1 if chief else 0) if verbose == "auto" else int(verbose)
    return keras.callbacks.CallbackList(
        worker_safe(callbacks, model._placement),
        add_history=history,
        add_progbar=shown != 0,
        verbose=shown,
        epochs=epochs,
        steps=steps,
        model=model,
    )


def _one_batch(x: Any, y: Any, sample_weight: Any) -> Any:
    source = array_source(x, y, sample_weight)
    return tf.nest.map_structure(tf.convert_to_tensor, source.data)


def _on_batch(model: DistributedModel, execute: Execution, batch: Any, return_dict: bool) -> Any:
    model.reset_metrics()
    shards = from_batch(batch, model._placement)
    outcome = epochs_loop.run(model, execute, shards, 1, False)
    return _results(epochs_loop.as_floats(outcome.logs), return_dict)


def _results(logs: dict[str, Any], return_dict: bool) -> Any:
    values = list(logs.values())
    return logs if return_dict else values[0] if len(values) == 1 else values

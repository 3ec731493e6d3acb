"""Prepares a Keras model: its `fit`, `evaluate` and `predict` give one device's numbers anywhere.

`prepare` puts `DistributedModel` between the model's own class and `keras.Model`. So a method that
the user's class overrides, such as `train_step`, `compute_loss` or `fit`, still comes first. Its
`super()` calls arrive in `DistributedModel`.

Each replica runs the user's step as one device would. The gradients are summed over all replicas
when the step calls the optimizer (`replica_context`). The metrics are summed once in each execution
(`step_result`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import numbers
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import keras
import tensorflow as tf

from tfmulti.config import run_directory
from tfmulti.config.reading import ReadOptions
from tfmulti.config.training_options import TrainingOptions, changed
from tfmulti.config.troubleshooting import documented
from tfmulti.distribution import connections, losses
from tfmulti.distribution.bucket_sizes import BUCKET_BYTES
from tfmulti.distribution.replica_context import reduce_gradients
from tfmulti.distribution.strategies import Placement, placement_of
from tfmulti.errors import ConfigError, ModelError
from tfmulti.keras_patches import installation
from tfmulti.keras_patches.classes import derived_class
from tfmulti.keras_patches.losses import watch_losses
from tfmulti.keras_patches.model_structure import (
    IN_FIT,
    has_own_step,
    layers_of,
    values_of_metrics,
)
from tfmulti.keras_patches.optimizers import take_reduced_gradients
from tfmulti.training.checkpoint import resume
from tfmulti.training.checkpoint.callback import Checkpoint
from tfmulti.training.input.feed import (
    DataArguments,
    array_source,
    split_off_validation,
    weights_of_classes,
)
from tfmulti.training.input.interface import Feed
from tfmulti.training.input.pipeline import from_batch
from tfmulti.training.input.worker_batch import WorkerBatch
from tfmulti.training.loop import loops, same_data
from tfmulti.training.loop.keras_limits import feed_within_limit, limited_epochs
from tfmulti.training.loop.notes import Notes
from tfmulti.training.loop.same_weights import check_between_batches, check_same_weights
from tfmulti.training.memory import (
    GB,
    MemoryEstimate,
    form_of,
    memory_of_step,
    out_of_memory_explained,
    with_rows,
)
from tfmulti.training.safe_callbacks import saving_elsewhere, worker_safe
from tfmulti.training.state import model_checks, relocation, run_state
from tfmulti.training.state.trainer_state import (
    RunCounts,
    TrainerState,
    is_prepared,
    remember,
    state_of,
)
from tfmulti.training.step import whole_batch
from tfmulti.training.step.execution import Execution
from tfmulti.training.step.microbatches import take
from tfmulti.training.step.prediction import make_prediction
from tfmulti.training.step.python_effects import warn_of_old_values
from tfmulti.training.step.step_logs import flattened
from tfmulti.training.step.steps_per_execution import StepsPerExecution
from tfmulti.training.step.xla import compile_errors_explained
from tfmulti.training.verification import verification
from tfmulti.training.verification.ownership import own_layers, own_parts
from tfmulti.training.watchdog import respect_owner, watching

Model = TypeVar("Model", bound=keras.Model)


def prepare(model: Model, options: TrainingOptions | None = None, **changes: Any) -> Model:
    """Returns the same model with `fit`, `evaluate` and `predict` for any strategy.

    Call it before or after `compile`. The model may be Functional, Sequential or subclassed, with
    or without a `train_step` of its own. The three methods do what Keras' documentation says, and
    their `batch_size` is the global batch. Every worker calls them alike, with the same data.

    Args:
        model: a Keras model. Variables that were made outside every strategy's scope move into the
            strategy of this process.
        options: how the model trains. None means the defaults.
        **changes: fields of `TrainingOptions`, which replace those of `options`, as in
            `prepare(model, microbatches=4)`.

    Returns:
        The model itself, whose class derives from its own class and from `DistributedModel`.

    Raises:
        ModelError: `model` is not a Keras model, its class overrides `make_train_function` or one
            of its siblings, or a variable belongs to another strategy.
        ClusterError: the environment names several workers, but this process made no strategy.
        ConfigError: there is no such option, or a value is out of its range.
    """
    if not isinstance(model, keras.Model):
        raise ModelError(f"prepare() takes a keras.Model, not a {type(model).__name__}.")
    if not isinstance(model, DistributedModel):
        model_checks.check_overrides(model)
    options = changed(TrainingOptions() if options is None else options, changes)
    installation.install()
    relocation.enter(model)
    model_checks.check_scope(model)
    reading = ReadOptions(options.reader_threads, options.skip_bad_records)
    made = state_of(model).evaluation_metrics if is_prepared(model) else []
    state = TrainerState(options, reading, evaluation_metrics=made)
    if not isinstance(model, DistributedModel):
        cls = type(model)
        derived = derived_class(cls, (cls, DistributedModel))
        object.__setattr__(model, "__class__", derived)
    # Functions that were made before this call have other options.
    for name in ("train_function", "test_function", "predict_function"):
        setattr(model, name, None)
    remember(model, state)
    return model


def estimate(
    model: keras.Model,
    options: TrainingOptions | None = None,
    *,
    rows: int = 32,
    specs: Any = None,
    device_memory_gb: float | None = None,
) -> MemoryEstimate:
    """Returns how much memory one training step needs on each device, before it runs.

    The step is traced and not run, so nothing is computed on a device. The variables of the model
    and of its optimizer are made where its strategy says. Every worker calls it. The figures agree
    with TensorFlow's allocator to about 15 % (docs/memory.md). XLA needs less memory, because it
    joins operations.

    Args:
        model: a compiled model. It becomes a prepared one, as by `prepare`.
        options: how the model trains. None leaves those of a prepared model as they are.
        rows: the rows of one replica in one step.
        specs: the form of one batch: `(x, y)` or `(x, y, sample_weight)`, whose leaves have a
            `shape` and a `dtype`, such as arrays. None takes the inputs and outputs of the model.
        device_memory_gb: the memory of one device in GB of 10^9 bytes. None asks the GPUs of the
            strategy. On CPUs it is then not known.

    Returns:
        The parts of the need, its sum, and what fits.

    Raises:
        ModelError: it is no model of Keras, it is not compiled, or its inputs are not known and
            `specs` is None.
        ConfigError: a value has another type, or is out of its range.
    """
    if not isinstance(model, keras.Model):
        raise ModelError(f"estimate() takes a keras.Model, not a {type(model).__name__}.")
    if not isinstance(rows, numbers.Integral) or isinstance(rows, bool) or rows < 1:
        raise ConfigError(f"rows is {rows!r}, but it must be a whole number from 1.")
    given = 1.0 if device_memory_gb is None else device_memory_gb
    if not isinstance(given, numbers.Real) or not 0 < given < math.inf:
        raise ConfigError(
            f"device_memory_gb is {device_memory_gb!r}, but it must be a finite number above 0."
        )
    model_checks.check_compiled(model)
    if options is not None or not isinstance(model, DistributedModel):
        prepare(model, options)
    relocation.enter(model)
    form = with_rows(form_of(model) if specs is None else specs, rows)
    memory = None if device_memory_gb is None else int(device_memory_gb * GB)
    try:
        model_checks.build(model, form, optimizers=True)
        return memory_of_step(model, form, rows, memory)
    except ModelError as error:
        if specs is not None:
            raise
        raise ModelError(
            f"{error} The form of the targets was not given, and taken from the outputs. If it is "
            "another one, give estimate(specs=(x, y)), with arrays or tf.TensorSpec of one batch."
        ) from error


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def _on_all_workers(
    method: Callable[Concatenate[Any, Arguments], Result],
) -> Callable[Concatenate[Any, Arguments], Result]:
    """Returns a method with a watchdog, whose errors say that every worker must call it."""
    signature = inspect.signature(method)

    @functools.wraps(method)
    def called(self: Any, /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        callbacks = signature.bind(self, *args, **kwargs).arguments.get("callbacks")
        self._follow_eager_mode()
        with (
            out_of_memory_explained(self),
            compile_errors_explained(),
            connections.call_of_all(self._placement, method.__name__),
            watching(callbacks, self._placement),
        ):
            return method(self, *args, **kwargs)

    return called


class DistributedModel(keras.Model):
    """Replaces Keras' trainer methods by methods for `tf.distribute`; see `prepare`."""

    train_function: Any
    test_function: Any
    predict_function: Any

    @property
    def run_eagerly(self) -> bool:
        """Whether steps run as Python code, because of `compile` or for all of TensorFlow."""
        return bool(keras.Model.run_eagerly.fget(self) or tf.config.functions_run_eagerly())

    @run_eagerly.setter
    def run_eagerly(self, value: bool) -> None:
        keras.Model.run_eagerly.fset(self, value)

    def _follow_eager_mode(self) -> None:
        """Makes new functions if `tf.config.run_functions_eagerly` was called since the last ones.

        All workers must have called it.
        """
        state = state_of(self)
        if state.is_eager != self.run_eagerly:
            state.is_eager = self.run_eagerly
            self.train_function = self.test_function = self.predict_function = None

    def make_train_function(self, force: bool = False) -> None:
        """Makes the function of a training execution, as Keras does before `fit`."""
        if force:
            # A callback may have compiled the model with another optimizer.
            relocation.enter(self)
        if self.train_function is None or force:
            reduction = self._reduction

            def reduce(gradients: Sequence[Any], names: Sequence[str]) -> list[Any]:
                if self.run_eagerly and names:
                    self._warn_of_unused_slots(len(names))
                return reduce_gradients(gradients, names=names, **reduction)

            for optimizer in model_checks.optimizers_of(self):
                take_reduced_gradients(optimizer, reduce, take)
            watch_losses(self)
            self._warn_of_eager_code("train_step")
            self._warn_of_microbatches()
            state_of(self).traced.compared.clear()
            self.train_function = Execution(self, training=True)

    def make_test_function(self, force: bool = False) -> None:
        """Makes the function of an evaluation execution; see `make_train_function`."""
        if self.test_function is None or force:
            watch_losses(self)
            self._warn_of_eager_code("test_step")
            self.test_function = Execution(self, training=False)
            self._use_whole_batch("test_step")

    def make_predict_function(self, force: bool = False) -> None:
        """Makes the function that predicts one batch; see `make_train_function`."""
        if self.predict_function is None or force:
            self._warn_of_eager_code("predict_step")
            self.predict_function = make_prediction(self)
            self._use_whole_batch("predict_step")

    def _use_whole_batch(self, step: str) -> None:
        """Makes each replica compute the whole batch in an evaluation without a graph.

        That is done where the model has code of the user's own, of which only a graph shows how its
        values depend on the rows.
        """
        if not (self.run_eagerly and whole_batch.may_be_used(self)):
            return
        reason = "run_eagerly has no graph that shows how your own code treats its rows"
        whole_batch.use_if_any(self, step, reason if self._has_own_code(step) else None)

    def _has_own_code(self, step: str) -> bool:
        """Returns whether a step runs parts that are not known to be exact; see `own_parts`."""
        parts = own_layers(self) if step == "predict_step" else own_parts(self)
        return bool(parts) or has_own_step(self, step)

    def _warn_of_eager_code(self, step: str) -> None:
        """Warns on the chief if several replicas run Python code of the user's own eagerly."""
        placement = self._placement
        is_eager = self.run_eagerly and placement.replicas > 1 and placement.is_chief
        if is_eager and self._has_own_code(step):
            warnings.warn(
                f"run_eagerly=True: each of {placement.replicas} replicas runs the Python code of "
                f"the {step} with its own rows. What your code computes from several rows together "
                "may differ from one device, such as float(loss) or a mean that it assigns to a "
                "variable, and so may Booleans, lists, iterators and global variables that it "
                "changes. Leave run_eagerly out, and keep such values in variables "
                "(self.add_weight). A number may be an attribute, such as self.steps += 1.",
                # The line of the user's program that calls `fit` or another method.
                stacklevel=5,
            )

    def _warn_of_unused_slots(self, updated: int) -> None:
        """Warns once on the chief if the optimizer has slots for weights that a step never updates.

        Args:
            updated: how many weights the step updates.
        """
        told = state_of(self).told
        # Plain Keras makes the slots at the first update. Each later step would ask again.
        if "unused slots" in told:
            return
        told.add("unused slots")
        optimizer, *others = model_checks.optimizers_of(self)
        weights = len(self.trainable_variables)
        # `iterations` and the rate are no slots.
        has_more = updated < weights and not others and len(optimizer.variables) > 2
        if has_more and self._placement.is_chief:
            warnings.warn(
                f"run_eagerly=True: the optimizer has slots for all {weights} weights, and the "
                f"train_step updates {updated} of them. Plain Keras makes slots only for these. No "
                "weight and no log differs.",
                stacklevel=2,
            )

    def _warn_of_microbatches(self) -> None:
        """Warns on the chief if a BatchNormalization sees the rows of one microbatch at a time."""
        count = state_of(self).options.microbatches
        if count == 1 or not self._placement.is_chief:
            return
        layers = (layer for layer in layers_of(self) if layer.trainable)
        if any(isinstance(layer, keras.layers.BatchNormalization) for layer in layers):
            warnings.warn(
                f"microbatches={count}: BatchNormalization takes its statistics from one "
                "microbatch at a time, so the numbers differ from those of one device. Normalize "
                "each row (LayerNormalization), or leave microbatches out.",
                # The line of the user's program that calls `fit` or another method.
                stacklevel=4,
            )

    @property
    def _reduction(self) -> dict[str, Any]:
        """The keyword arguments of `reduce_gradients` for gradients between workers."""
        if self._placement.workers == 1:
            return {}
        compression = state_of(self).options.gradient_compression
        send_dtype = None if compression == "none" else tf.as_dtype(compression)
        return {"send_dtype": send_dtype, "by_bytes": BUCKET_BYTES}

    def _steps_per_execution(self, checkpoint: Checkpoint | None) -> StepsPerExecution:
        """Returns the number of steps of each execution, as compiled or to be chosen.

        On GPUs nothing is chosen. There an execution of one step already copies the batch of the
        next step to the GPU while it runs.
        """
        compiled = int(self.steps_per_execution)
        is_auto = state_of(self).options.steps_per_execution == "auto" and compiled == 1
        if not is_auto or self.run_eagerly or self._placement.gpus:
            return StepsPerExecution(compiled)
        return StepsPerExecution(None, maximum=checkpoint.every_steps if checkpoint else None)

    @property
    def _placement(self) -> Placement:
        """This process' place among the workers."""
        return placement_of(self.distribute_strategy)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: bool = True,
    ) -> Any:
        """Returns the loss of this replica's rows, scaled as a part of the global loss.

        See Keras' `Model.compute_loss`, whose arguments these are, for the rows of this replica.
        """
        with losses.compiled_loss():
            return super().compute_loss(x, y, y_pred, sample_weight, training)

    @_on_all_workers
    def fit(  # Keras' signature
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: Any = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool | str = True,
        class_weight: Any = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: Any = 1,
    ) -> keras.callbacks.History:
        """Trains the model until epoch `epochs` has ended, and returns the history.

        Every worker calls it alike, with the same data. See Keras' `Model.fit`, whose arguments
        these are. `batch_size` and `validation_batch_size` are global batches.

        Raises:
            ModelError: the model is not compiled, or cannot be trained by replicas.
            DataError: the workers have different data, the data has no batches, or it cannot be
                read.
            ConfigError: two Checkpoint callbacks were given.
            ResumeError: the Checkpoint callback cannot resume the run.
            VerificationError: the first steps differ from those of one device.
        """
        model_checks.check_compiled(self)
        relocation.enter(self)
        placement, epochs = self._placement, limited_epochs(epochs)
        if validation_split and validation_data is None:
            parts, validation_data = split_off_validation((x, y, sample_weight), validation_split)
            x, y, sample_weight = parts
        with resume.checkpoint_in(callbacks) as checkpoint:
            record = resume.find_record(self, checkpoint)
            if record is None:
                model_checks.warn_of_kept_slots(self)
            drawn = same_data.draw_shuffle(self, shuffle) if shuffle else None
            seeds = resume.shuffle_of(record, drawn, state_of(self).options.seed is not None)
            data = DataArguments(
                x, y, sample_weight, batch_size, class_weight, seeds, steps_per_epoch
            )
            reading = state_of(self).reading
            feed, steps_per_epoch = feed_within_limit(data, placement, reading, "fit")
            validation, validation_arguments = None, {}
            if validation_data is not None:
                xv, yv, wv = keras.utils.unpack_x_y_sample_weight(validation_data)
                size = validation_batch_size or batch_size
                data = DataArguments(xv, yv, wv, size, steps_per_epoch=validation_steps)
                validation, validation_steps = feed_within_limit(
                    data, placement, reading, "evaluate"
                )
                validation_arguments = {
                    "x": xv,
                    "y": yv,
                    "sample_weight": wv,
                    "batch_size": size,
                    "steps": validation_steps,
                }
            same_data.check_same_data(self, feed, validation)
            # A checkpoint needs all slots before the first step. So does a comparison with one
            # device that is not traced before.
            needs_slots = checkpoint is not None or model_checks.is_traced_late(self)
            build = functools.partial(
                model_checks.build, self, feed.data.specs, optimizers=needs_slots
            )
            try:
                build()
                is_built = True
            except AttributeError:
                # A callback may set the attribute in `on_train_begin`.
                is_built = False
            count = steps_per_epoch or feed.data.steps
            self.stop_training = False
            notes = Notes(self, verbose)
            notes.tell_order(feed, seeds)
            notes.tell_steps(x, feed, "steps_per_epoch", steps_per_epoch, epochs - initial_epoch)
            if validation is not None:
                notes.tell_steps(xv, validation, "validation_steps", validation_steps)
                notes.tell_numbers(validation_steps or validation.data.steps, callbacks, "test")
            notes.tell_numbers(count, callbacks, "train")
            notes.tell_draws()
            notes.tell_changed_steps()
            state = state_of(self)
            state.specs = feed.data.specs
            state.run, state.saved_variables = RunCounts(), {}
            self.make_train_function()
            state.built_function = self.train_function
            warn_of_old_values(self, "train_step")
            all_callbacks = _callback_list(self, callbacks, verbose, epochs, count, history=True)
            first_steps = None
            if record is None and epochs > initial_epoch:
                first_steps = verification.FirstSteps(
                    self, feed, count, reports_time=verbose not in (0, "0")
                )
                first_steps.compare_before(all_callbacks.callbacks)
            all_callbacks.on_train_begin()
            if not is_built:
                relocation.enter(self)
                build()
            manager = None
            # The manager notes the callbacks' attributes as they are after `on_train_begin`. It
            # saves those that change later.
            if checkpoint is not None:
                feeds = {"training": feed} | ({"validation": validation} if validation else {})
                manager = resume.CheckpointManager(
                    self, checkpoint, record, all_callbacks, feeds, seeds
                )
                respect_owner(all_callbacks, checkpoint.folder)
            training = loops.Training(
                feed,
                all_callbacks,
                initial_epoch,
                epochs,
                steps_per_epoch,
                validation,
                validation_arguments,
                validation_freq,
                manager,
                self._steps_per_execution(checkpoint),
                first_steps,
            )
            with (
                saving_elsewhere(all_callbacks.callbacks, placement),
                resume.saving_at_signals(self, checkpoint),
                closing(feed, validation, first_steps),
            ):
                logs = loops.train(self, training)
                if isinstance(self.optimizer, keras.optimizers.Optimizer) and epochs > 0:
                    self.optimizer.finalize_variable_values(self.trainable_weights)
                training.callbacks.on_train_end(logs)
        return self.history

    @_on_all_workers
    def evaluate(
        self,
        /,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: Any = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Returns loss and metrics over the data, and counts each row once.

        Every worker calls it alike, with the same data. See Keras' `Model.evaluate`, whose
        arguments these are. `batch_size` is the global batch.

        Raises:
            ModelError: the model is not compiled.
            DataError: the data has no batches, or it cannot be read.
            TypeError: Keras knows no such argument.
        """
        in_fit = kwargs.pop(IN_FIT, False)
        if kwargs:
            raise TypeError(f"evaluate() got an unexpected argument {next(iter(kwargs))!r}")
        model_checks.check_compiled(self)
        if self.test_function is None:
            relocation.enter(self)
        data = DataArguments(x, y, sample_weight, batch_size, steps_per_epoch=steps)
        feed = state_of(self).validation if in_fit else None
        if feed is None:
            in_fit = False
            reading = state_of(self).reading
            feed, steps = feed_within_limit(data, self._placement, reading, "evaluate")
        with run_state.evaluating(self):
            model_checks.build(self, feed.data.specs, step="test_step")
            count = _steps_of(feed, steps)
            if not in_fit:
                check_same_weights(self)
                notes = Notes(self, verbose)
                notes.tell_steps(x, feed, "steps", steps)
                notes.tell_numbers(count, callbacks, "test")
            callback_list = _callback_list(self, callbacks, verbose, 1, count)
            self.make_test_function()
            warn_of_old_values(self, "test_step")
            # `fit` uses its feed again in the next validation.
            with closing(None if in_fit else feed):
                logs = loops.evaluate(self, feed, count, callback_list)
        return _results(self, logs, return_dict)

    @_on_all_workers
    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: Any = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Returns the outputs of all rows, in order, on every worker.

        Every worker calls it alike, with the same data. See Keras' `Model.predict`, whose arguments
        these are. `batch_size` is the global batch.

        Raises:
            DataError: the data has no batches, an example of it cannot be read, or the workers have
                different data.
        """
        relocation.enter(self)
        # Each row has an output, so no example may be left out.
        reading = ReadOptions(state_of(self).reading.threads, keeps_each=True)
        data = DataArguments(x, batch_size=batch_size, steps_per_epoch=steps)
        feed, steps = feed_within_limit(data, self._placement, reading)
        if self._placement.workers > 1:
            same_data.check_same_data(self, feed)
        check_same_weights(self)
        count = _steps_of(feed, steps)
        notes = Notes(self, verbose)
        if steps is not None:
            notes.tell_steps(x, feed, "steps", steps)
        notes.tell_numbers(count, callbacks, "predict")
        callback_list = _callback_list(self, callbacks, verbose, 1, count)
        self.make_predict_function()
        warn_of_old_values(self, "predict_step")
        with closing(feed):
            return loops.predict(self, feed, count, callback_list)

    @_on_all_workers
    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: Any = None,
        return_dict: bool = False,
    ) -> Any:
        """Trains one step on one global batch of arrays, and returns its loss and metrics.

        Every worker calls it with the whole global batch. See Keras' `Model.train_on_batch`, whose
        arguments these are.

        Raises:
            ModelError: the model is not compiled.
            DataError: the arrays differ in length, or `class_weight` does not go with them.
            VerificationError: the first step differs from that of one device.
        """
        model_checks.check_compiled(self)
        if self.train_function is None:
            relocation.enter(self)
            model_checks.warn_of_kept_slots(self)
        if class_weight is not None:
            sample_weight = weights_of_classes(y, class_weight, sample_weight)
        batch = _one_batch(x, y, sample_weight)
        model_checks.build(self, batch, optimizers=model_checks.is_traced_late(self))
        check_between_batches(self)
        self.make_train_function()
        warn_of_old_values(self, "train_step", is_batch=True)
        given = from_batch(batch, self._placement)
        verification.before_batch(self, batch, given)
        return _on_batch(self, self.train_function, given, return_dict)

    @_on_all_workers
    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """Returns loss and metrics of one global batch of arrays.

        Every worker calls it with the whole global batch. See Keras' `Model.test_on_batch`, whose
        arguments these are.

        Raises:
            ModelError: the model is not compiled.
            DataError: the arrays differ in length.
        """
        model_checks.check_compiled(self)
        if self.test_function is None:
            relocation.enter(self)
        batch = _one_batch(x, y, sample_weight)
        with run_state.evaluating(self):
            model_checks.build(self, batch, step="test_step")
            check_between_batches(self)
            self.make_test_function()
            warn_of_old_values(self, "test_step", is_batch=True)
            given = from_batch(batch, self._placement)
            return _on_batch(self, self.test_function, given, return_dict)

    def reset_metrics(self) -> None:
        """Resets the state of all metrics, as Keras does."""
        keras.Model.reset_metrics(self)
        # The results are those of all replicas, since all have the same state now.
        state_of(self).metric_results = self.get_metrics_result

    @_on_all_workers
    def predict_on_batch(self, x: Any) -> Any:
        """Returns the outputs of one global batch of arrays, rows in order; see Keras.

        Every worker calls it with the whole global batch.

        Raises:
            DataError: the workers have different batches.
        """
        if self.predict_function is None:
            relocation.enter(self)
        check_between_batches(self)
        self.make_predict_function()
        warn_of_old_values(self, "predict_step", is_batch=True)
        batch = from_batch(_one_batch(x, None, None), self._placement)
        predicted = self.predict_function(batch)
        same_data.check_same_batches(predicted.digests)
        return tf.nest.map_structure(loops.concatenated, predicted.outputs)

    def save(self, filepath: Any, overwrite: bool = True, **kwargs: Any) -> None:
        """Saves the model as Keras does, so that it loads without tfmulti.

        See Keras' `Model.save`, whose arguments these are. Several workers may save to one `.keras`
        or `.h5` file. The file is then always whole, and comes from one of the workers.
        """
        with self._replacing(filepath, overwrite) as path, model_checks.as_made(self):
            keras.Model.save(self, path, overwrite=overwrite, **kwargs)

    def save_weights(self, filepath: Any, overwrite: bool = True, **kwargs: Any) -> None:
        """Saves the weights as Keras does. Several workers may save to one file, as in `save`."""
        with self._replacing(filepath, overwrite) as path:
            keras.Model.save_weights(self, path, overwrite=overwrite, **kwargs)

    def _replacing(self, filepath: Any, overwrite: bool) -> contextlib.AbstractContextManager[Any]:
        """Returns a context that yields a path to write to, and moves the file to its place."""
        if self._placement.workers > 1 and overwrite and isinstance(filepath, (str, os.PathLike)):
            path = Path(filepath)
            if path.suffix in (".keras", ".h5") and path.parent.is_dir() and not path.is_dir():
                return run_directory.replacing(path)
        return contextlib.nullcontext(filepath)

    def __reduce__(self) -> Any:
        """Pickles and copies the model as Keras does. The copy must be prepared again."""
        with model_checks.as_made(self):
            return self.__reduce__()


def _steps_of(feed: Feed, requested: int | None) -> int | None:
    """Returns how many batches to read: the requested number, but each batch once at most."""
    steps = feed.data.steps
    if requested and feed.data.endless and steps is not None and requested > steps:
        warnings.warn(
            documented(f"the data ended after {steps} of {requested} steps. Ask for fewer steps."),
            stacklevel=4,
        )
        return steps
    return requested or steps


@contextlib.contextmanager
def closing(*readers: Feed | verification.FirstSteps | None) -> Iterator[None]:
    """Closes readers of data at the end of the context, so that none of their threads is left."""
    try:
        yield
    finally:
        for reader in readers:
            if reader is not None:
                reader.close()


def _callback_list(
    model: DistributedModel,
    callbacks: Any,
    verbose: Any,
    epochs: int,
    steps: int | None,
    *,
    history: bool = False,
) -> keras.callbacks.CallbackList:
    """Returns the callbacks that this worker runs; by default only the chief shows progress."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    shown = int(model._placement.is_chief if verbose == "auto" else verbose)
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
    """Returns one global batch of arrays as tensors."""
    source = array_source(x, y, sample_weight)
    return tf.nest.map_structure(tf.convert_to_tensor, source.data)


def _on_batch(
    model: DistributedModel, execute: Execution, batch: WorkerBatch, return_dict: bool
) -> Any:
    """Runs one execution on one batch, and returns its results."""
    model.reset_metrics()
    votes = loops.votes_of(model, stop=False)
    result = loops.run(model, execute, batch, 1, votes)
    state_of(model).metric_results = lambda: result.epoch_logs
    return _results(model, loops.as_floats(result.logs), return_dict)


def _results(model: DistributedModel, logs: dict[str, Any], return_dict: bool) -> Any:
    """Returns logs as Keras does: a dict without nested ones, a list of values, or the only value.

    Keras lists the values of the model's metrics first, in the order of the metrics.
    """
    flat = flattened(logs)
    return flat if return_dict else values_of_metrics(model, flat)

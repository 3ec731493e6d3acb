"""Builds the parts of a run from a checked job: devices, data, batch sizes and model.

Every worker runs this code in the same way.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import keras
import tensorflow as tf

from tfmulti.cluster.gpus import visible_gpus
from tfmulti.cluster.selection import BatchSizes, Selection, batch_sizes
from tfmulti.config import registry
from tfmulti.config.console import left_out, quiet_stderr, speaker
from tfmulti.config.fit_config import FitConfig
from tfmulti.config.reading import ReadOptions
from tfmulti.data.batch_plan import BatchPlan
from tfmulti.data.data_set import CLASSIFICATION, DataSet, size_of
from tfmulti.data.loader import Loader
from tfmulti.data.sharding import steps_per_epoch
from tfmulti.data.sources import user as user_data
from tfmulti.distribution.agreement import from_chief
from tfmulti.distribution.strategies import (
    Placement,
    build_strategy,
    made,
    own_gpus,
    placement_of,
)
from tfmulti.errors import ConfigError, ModelError
from tfmulti.launch.stacks import show_at_sigusr1
from tfmulti.run import validation
from tfmulti.run.data_stages import prepared
from tfmulti.run.models import user as user_model
from tfmulti.run.optimizers import make_optimizer
from tfmulti.training.distributed_model import prepare
from tfmulti.training.state.trainer_state import state_of


@dataclass(frozen=True)
class Setup:
    """The parts of a run once its devices are set up.

    Attributes:
        config: the configuration, with every default filled in.
        selection: the chosen strategy and the reason.
        strategy: the strategy.
        placement: the rank of this worker and its replicas.
        data: the data.
        batch: the batch sizes.
        steps_per_epoch: the steps of an epoch. None: only reading the data tells.
    """

    config: FitConfig
    selection: Selection
    strategy: tf.distribute.Strategy
    placement: Placement
    data: DataSet
    batch: BatchSizes
    steps_per_epoch: int | None

    @property
    def epochs(self) -> int:
        """The number of epochs to train."""
        assert self.config.epochs is not None
        return self.config.epochs


def set_up(job: validation.Job) -> Setup:
    """Sets up the devices, the data and the batch sizes of a job.

    Every worker must call this function, which waits for the other workers.

    Raises:
        UserError: the devices, the data or the batch sizes do not fit the configuration.
    """
    config = job.config
    # Standard error is redirected below.
    show_at_sigusr1()
    with quiet_stderr():
        gpus = own_gpus(job.cluster)
    devices, batch = job.devices, job.batch
    if gpus != devices.gpus:
        # TensorFlow may see fewer GPUs than the machine has, such as a build without CUDA.
        devices = validation.decide_devices(config, job.cluster, gpus)
        batch = batch_sizes(
            config.global_batch_size, config.per_replica_batch_size, devices.replicas
        )
    selection = devices.selection
    chief = job.cluster is None or job.cluster.is_chief
    say = speaker(chief)
    # The workers wait for each other once, when the first strategy of the process is made.
    waits = selection.strategy == "multi_worker_mirrored" and made() is None
    if waits and job.cluster is not None and job.cluster.size > 1:
        say("waiting", f"for the {job.cluster.size} workers {', '.join(job.cluster.addresses)}")
    if not gpus and visible_gpus(os.environ):
        say(
            "warning",
            "this machine has GPUs, but TensorFlow does not see them. "
            "Install with: pip install '.[gpu]'",
        )
    with quiet_stderr():
        strategy = build_strategy(
            selection, job.cluster, None if config.dry_run else config.run_dir
        )
    placement = placement_of(strategy)
    keras.utils.set_random_seed(config.seed)
    if config.op_determinism:
        tf.config.experimental.enable_op_determinism()
    data = job.data or load_user_data(config, batch)
    if data.finish is not None:
        data = data.finish(batch.global_batch_size)
    if data.warning is not None:
        say("warning", data.warning)
    # All workers have loaded the same data, so one of them names what is lost.
    for lost in data.lost if chief else ():
        left_out(lost)
    data = shared(data, strategy)
    rows = user_data.rows_of_batches(data.train)
    if rows is not None:
        batch = batch_sizes(rows, None, placement.replicas)
    validation.check_batch(config, data, batch, placement.replicas)
    return Setup(
        config, selection, strategy, placement, data, batch, count_steps(config, data, batch)
    )


def shared(data: DataSet, strategy: tf.distribute.Strategy) -> DataSet:
    """Returns the data with what the chief computes for all workers, such as a vocabulary.

    Every worker must call this function.
    """
    if data.broadcast is None:
        return data
    data = data.broadcast(data, functools.partial(from_chief, strategy))
    return replace(data, broadcast=None)


def load_user_data(config: FitConfig, batch: BatchSizes) -> DataSet:
    """Returns the data of the user's own function, with the transforms that were asked for.

    Raises:
        UserError: the function cannot be loaded, or its data does not fit the configuration.
    """
    function = registry.load_reference("dataset", config.dataset)
    data = user_data.load(config.dataset, function, batch.global_batch_size)
    validation.check_model_takes(config, data)
    # A built-in model has a loss that needs labels of a certain form.
    if registry.model_entry(str(config.model)).takes:
        user_data.check_labels(config.dataset, data)
    return prepared(data, config)


def count_steps(config: FitConfig, data: DataSet, batch: BatchSizes) -> int | None:
    """Returns the steps of an epoch, or None if only reading the data tells.

    The number of steps in the configuration wins.
    """
    if config.steps_per_epoch is not None:
        return config.steps_per_epoch
    rows = size_of(data.train)
    if rows is not None:
        return steps_per_epoch(rows, batch.global_batch_size)
    if isinstance(data.train, keras.utils.PyDataset):
        return data.train.num_batches  # type: ignore[no-any-return]
    if isinstance(data.train, tf.data.Dataset):
        count = int(data.train.cardinality())
        return count if count > 0 else None
    return None


def make_model(setup: Setup) -> keras.Model:
    """Returns the prepared model.

    Every worker must call this function, inside the scope of the strategy.

    Raises:
        ConfigError: the user's function for the model cannot be loaded.
        ModelError: the model cannot be built for this data.
    """
    config, data = setup.config, setup.data
    assert config.model is not None
    build = registry.load_reference("model", registry.model_entry(config.model).reference)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(config.precision)
    try:
        if config.model in registry.MODELS:
            model = _build_for(config.model, build, data)
        else:
            model = user_model.build(config.model, build, data.spec)
            user_model.check_input(config.model, model, data.spec, config.dataset)
    finally:
        # A script that calls `train` keeps its own policy.
        keras.config.set_dtype_policy(before)
    prepare(model, config.training_options)
    state_of(model).reading = reading_of(setup)
    return model


def _build_for(name: str, build: Callable[..., keras.Model], data: DataSet) -> keras.Model:
    """Returns a built-in model for the form of the data, or raises ModelError."""
    assert data.spec is not None
    try:
        return build(data.spec)
    except (ValueError, TypeError) as error:
        reason = str(error).strip().split(". ")[0]
        raise ModelError(
            f"--model {name} cannot be built for examples of {data.spec.describe()}: {reason}. "
            "Use another --model or larger examples."
        ) from None


def compile_model(setup: Setup, model: keras.Model) -> bool:
    """Compiles a model unless it is compiled already, and returns whether it did.

    Every worker must call this function.

    Raises:
        ModelError: the loss cannot be known, because the last layer of the user's model does not
            show whether its outputs are logits.
        ConfigError: the schedule of the learning rate needs the number of steps, but it is unknown.
    """
    if model.compiled:
        return False
    config, spec = setup.config, setup.data.spec
    classifies = spec is None or spec.task == CLASSIFICATION
    loss: Any = "mse"
    if classifies:
        is_users_model = str(config.model) not in registry.MODELS
        from_logits = is_users_model and user_model.ends_in_logits(str(config.model), model)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=from_logits)
    with setup.strategy.scope():
        model.compile(
            make_optimizer(config, setup.batch.global_batch_size, total_steps(setup)),
            loss=loss,
            metrics=["accuracy" if classifies else "mae"],
            steps_per_execution=config.steps_per_execution or 1,
        )
    return True


def total_steps(setup: Setup) -> int:
    """Returns the optimizer steps of the whole run, for the schedule of the learning rate.

    If the number is unknown, the result is one step more than the warm-up. That is enough for a
    learning rate that is constant after the warm-up.

    Raises:
        ConfigError: the number is unknown, and the schedule needs it.
    """
    if setup.steps_per_epoch is not None:
        return setup.steps_per_epoch * setup.epochs
    if setup.config.learning_rate_decay != "constant":
        raise ConfigError(
            f"--learning_rate_decay {setup.config.learning_rate_decay} needs the number of steps, "
            f"but --dataset {setup.config.dataset} does not tell its length. "
            "Give --steps_per_epoch."
        )
    return setup.config.warmup_steps + 1


def plan_of(setup: Setup) -> BatchPlan:
    """Returns the batch plan, which says which examples each training step has."""
    return BatchPlan(len(setup.data.train), setup.batch.global_batch_size, setup.config.seed)


def reading_of(setup: Setup) -> ReadOptions:
    """Returns how the examples of the run are read."""
    config = setup.config
    return ReadOptions(config.reader_threads, config.skip_bad_records, len(setup.data.lost))


def first_batch(setup: Setup) -> Any:
    """Returns the first training batch of one device, without examples that cannot be read."""
    reader = Loader(setup.data.train, plan_of(setup), Placement(0, 1, 1), reading_of(setup))
    with contextlib.closing(reader.batches()) as batches:
        return next(batches).data[0]

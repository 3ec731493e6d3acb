"""A whole run: `fit(config) -> FitReport`, from the devices to the files.

Every worker runs all of it; what one of them must not do alone (building, training,
evaluating, voting) stands outside every `if chief`, and what only the chief does (printing,
writing files) is no collective.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfmulti import artifacts, preflight, registry
from tfmulti.callbacks.history_file import HistoryFile
from tfmulti.callbacks.throughput import Throughput
from tfmulti.cluster import Cluster
from tfmulti.config import FitConfig
from tfmulti.console import number, quiet_stderr, speaker
from tfmulti.errors import ConfigError
from tfmulti.models import user as user_model
from tfmulti.optimizers import make_optimizer, peak_learning_rate
from tfmulti.report import FitReport
from tfmulti.rundir import RunDir, default_run_dir, write_text
from tfmulti.selection import BatchSizes, Selection, batch_sizes, select
from tfmulti.sharding import steps_per_epoch
from tfmulti.signals import SignalWatch, default_signals
from tfmulti.sources import user as user_data
from tfmulti.sources.data import CLASSIFICATION, Data, size_of, with_validation
from tfmulti.strategies import Placement, build_strategy, device_names, placement_of
from tfmulti.trainer import interrupt, prepare, state_of


@dataclass(frozen=True)
class Setup:
    """What a run has once its devices are there."""

    config: FitConfig
    selection: Selection
    strategy: tf.distribute.Strategy
    place: Placement
    data: Data
    batch: BatchSizes
    steps_per_epoch: int | None

    @property
    def epochs(self) -> int:
        assert self.config.epochs is not None
        return self.config.epochs


def fit(
    config: FitConfig, *, cluster: Cluster | None = None, env: Mapping[str, str] | None = None
) -> FitReport:
    """Returns the report of the run that a configuration describes, when it is done.

    The same as `python -m tfmulti.fit`. Every worker calls it; the chief writes the run
    directory and prints. `cluster` None reads the environment `env` (`os.environ`).

    Raises:
        UserError: a mistake in the configuration, the cluster, the data or the model.
        KeyboardInterrupt: Ctrl-C ended it; what was reached is saved.
    """
    report = run(preflight.check(config, cluster, env))
    if report.stopped_by == "SIGINT":
        raise KeyboardInterrupt
    return report


def run(job: preflight.Job) -> FitReport:
    """Returns the report of a checked job. A signal ends it early: see `stopped_by`."""
    setup = set_up(job)
    with SignalWatch() as watch:
        with setup.strategy.scope():
            model = make_model(setup)
        describe(setup, model)
        watch.stop = lambda reason: interrupt(model, reason)
        if setup.config.dry_run:
            return dry_run(setup, model)
        run_dir = make_run_dir(setup)
        throughput = Throughput(setup.place.replicas, run_dir.tensorboard / "train"
                                if run_dir else None)
        started = time.perf_counter()
        history = train(setup, model, [throughput, *file_callbacks(run_dir)])
        seconds = time.perf_counter() - started
        metrics = {name: values[-1] for name, values in history.items()}
        metrics |= test(setup, model)
        watch.finished()
        report = make_report(setup, model, run_dir, history, metrics, seconds, throughput)
        if run_dir is not None:
            write_artifacts(setup, model, run_dir, report)
        summarize(setup, report)
        return report


def set_up(job: preflight.Job) -> Setup:
    """Returns the devices, the data and the batch of a job. Waits for the other workers."""
    config = job.config
    with quiet_stderr():
        gpus = len(tf.config.list_physical_devices("GPU"))
    selection = select(
        config.strategy, replicas=config.replicas, cluster=job.cluster, gpus=gpus
    )
    chief = job.cluster is None or job.cluster.is_chief
    say = speaker(chief)
    several = selection.strategy == "multi_worker_mirrored"
    if chief and several and job.cluster is not None:
        say("waiting", f"for the {job.cluster.size} workers {', '.join(job.cluster.addresses)}")
    if not gpus and preflight.visible_gpus(os.environ):
        say("warning", "this machine has GPUs, but TensorFlow does not see them. "
            "Install with: pip install '.[gpu]'")
    with quiet_stderr(), default_signals() if several else contextlib.nullcontext():
        strategy = build_strategy(selection, job.cluster)
    place = placement_of(strategy)
    batch = batch_sizes(
        config.global_batch_size, config.per_replica_batch_size, place.replicas
    )
    keras.utils.set_random_seed(config.seed)
    keras.config.set_dtype_policy(config.precision)
    data = job.data or load_user_data(config, batch)
    preflight.check_batch(config, data, place.replicas)
    return Setup(config, selection, strategy, place, data, batch, count_steps(config, data, batch))


def load_user_data(config: FitConfig, batch: BatchSizes) -> Data:
    function = registry.load_place("dataset", config.dataset)
    data = user_data.load(config.dataset, function, batch.global_batch_size)
    preflight.check_model_takes(config, data)
    return with_validation(data, config.validation_fraction, config.seed)


def count_steps(config: FitConfig, data: Data, batch: BatchSizes) -> int | None:
    """Returns the steps of an epoch, or None where only reading the data tells."""
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
    """Returns the compiled, prepared model. Runs on every worker, inside the scope."""
    config, data = setup.config, setup.data
    assert config.model is not None
    build = registry.load_place("model", registry.model_entry(config.model).place)
    if config.model in registry.MODELS:
        model = build(data.spec)
    else:
        model = user_model.build(config.model, build, data.spec)
    prepare(model, seed=config.seed)
    if not model.compiled:
        classifies = data.spec is None or data.spec.task == CLASSIFICATION
        model.compile(
            make_optimizer(config, setup.batch.global_batch_size, total_steps(setup)),
            loss="sparse_categorical_crossentropy" if classifies else "mse",
            metrics=["accuracy" if classifies else "mae"],
            steps_per_execution=config.steps_per_execution,
        )
    return model


def total_steps(setup: Setup) -> int:
    """Returns the optimizer steps of the whole run, which a schedule must know.

    Raises:
        ConfigError: they are not known and the schedule needs them.
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


def describe(setup: Setup, model: keras.Model) -> None:
    """Prints what will run, where, and why."""
    say, config, batch, place = _say(setup), setup.config, setup.batch, setup.place
    say("strategy", f"{setup.selection.strategy} ({setup.selection.why})")
    workers = f"{place.workers} workers × " if place.workers > 1 else ""
    say("devices", f"{workers}{', '.join(device_names(setup.strategy))}: "
        f"{place.replicas} replica{'s' if place.replicas > 1 else ''}")
    sizes = {name: size_of(getattr(setup.data, name)) for name in ("train", "validation", "test")}
    words = [f"{rows:,} {name}" for name, rows in sizes.items() if rows is not None]
    form = f" ({setup.data.spec.describe()})" if setup.data.spec else ""
    say("data", f"{config.dataset}: {', '.join(words) or 'batches of its own'}{form}")
    built = f"{model.count_params():,} parameters, " if model.built else ""
    say("model", f"{config.model}: {built}{config.precision}, {optimizer_words(setup, model)}")
    uneven = "" if batch.divides else " at most"
    steps = f"{setup.steps_per_epoch} steps" if setup.steps_per_epoch else "all batches"
    say("batch", f"{batch.global_batch_size} global ={uneven} {batch.per_replica_batch_size} per "
        f"replica × {place.replicas}; {setup.epochs} epoch{'s' if setup.epochs > 1 else ''} of "
        f"{steps}")


def optimizer_words(setup: Setup, model: keras.Model) -> str:
    """Returns the optimizer in words, such as `adam at 0.003`."""
    config = setup.config
    made_here = str(config.optimizer)
    if type(getattr(model.optimizer, "inner_optimizer", model.optimizer)).__name__.lower() != (
        made_here
    ):
        return f"{type(model.optimizer).__name__} of the model's own"
    rate = peak_learning_rate(config, setup.batch.global_batch_size)
    scaled = f" (scaled from {config.learning_rate:g})" if config.scale_learning_rate else ""
    return f"{made_here} at {rate:g}{scaled}"


def make_run_dir(setup: Setup) -> RunDir | None:
    """Makes the run directory and writes config.json, on the chief; None elsewhere."""
    if not setup.place.is_chief:
        return None
    config = setup.config
    if config.run_dir is None:
        run_dir = default_run_dir(config.dataset, str(config.model), datetime.now())
    else:
        run_dir = RunDir(config.run_dir)
    run_dir.create()
    write_text(run_dir.config, config.to_json())
    return run_dir


def file_callbacks(run_dir: RunDir | None) -> list[keras.callbacks.Callback]:
    if run_dir is None:
        return []
    return [
        HistoryFile(run_dir.history),
        keras.callbacks.TensorBoard(str(run_dir.tensorboard), write_graph=False),
    ]


def train(
    setup: Setup, model: keras.Model, callbacks: list[keras.callbacks.Callback]
) -> dict[str, list[float]]:
    """Trains all epochs, or until a signal, and returns the history."""
    verbose = setup.config.verbose
    history = model.fit(
        setup.data.train,
        batch_size=_batch_for(setup, setup.data.train),
        epochs=setup.epochs,
        steps_per_epoch=setup.config.steps_per_epoch,
        validation_data=setup.data.validation,
        validation_batch_size=_batch_for(setup, setup.data.validation),
        callbacks=callbacks,
        verbose="auto" if verbose == "auto" else int(verbose) if setup.place.is_chief else 0,
    )
    return dict(history.history)


def test(setup: Setup, model: keras.Model) -> dict[str, float]:
    """Returns the metrics of the test part by name, if there is one and no signal came."""
    if setup.data.test is None or state_of(model).stopped_by:
        return {}
    found = model.evaluate(
        setup.data.test, batch_size=_batch_for(setup, setup.data.test), verbose=0,
        return_dict=True,
    )
    return {f"test_{name}": value for name, value in found.items()}


def dry_run(setup: Setup, model: keras.Model) -> FitReport:
    """Runs two steps and one of validation, writes nothing, and says what a full run takes."""
    throughput = Throughput(setup.place.replicas)
    started = time.perf_counter()
    history = model.fit(
        setup.data.train, batch_size=_batch_for(setup, setup.data.train), epochs=1,
        steps_per_epoch=2, validation_data=setup.data.validation,
        validation_batch_size=_batch_for(setup, setup.data.validation),
        validation_steps=1, callbacks=[throughput], verbose=0,
    ).history
    seconds = time.perf_counter() - started
    say = _say(setup)
    if setup.steps_per_epoch is None:
        say("dry run", f"a step takes {number(throughput.step_s)} s; the data does not tell how "
            "many an epoch has")
    else:
        steps = setup.steps_per_epoch * setup.epochs
        say("dry run", f"all is built; {steps:,} steps of {number(throughput.step_s * 1000)} ms "
            f"would take about {number(throughput.first_s + steps * throughput.step_s)} s, "
            "validation not counted. Nothing was written.")
    metrics = {name: values[-1] for name, values in history.items()}
    return make_report(setup, model, None, history, metrics, seconds, throughput)


def make_report(
    setup: Setup, model: keras.Model, run_dir: RunDir | None, history: dict[str, list[float]],
    metrics: dict[str, float], seconds: float, throughput: Throughput,
) -> FitReport:
    state = state_of(model)
    return FitReport(
        strategy=setup.selection.strategy,
        why=setup.selection.why,
        devices=device_names(setup.strategy),
        workers=setup.place.workers,
        replicas=setup.place.replicas,
        global_batch_size=setup.batch.global_batch_size,
        per_replica_batch_size=setup.batch.per_replica_batch_size,
        epochs=len(history.get("loss", next(iter(history.values()), []))),
        steps=state.steps,
        examples=state.examples,
        parameters=model.count_params(),
        metrics={name: float(value) for name, value in metrics.items()},
        history={name: [float(v) for v in values] for name, values in history.items()},
        seconds=seconds,
        examples_per_second=throughput.examples_per_second,
        weights_sha256=artifacts.weights_sha256(model),
        stopped_by=state.stopped_by,
        run_dir=str(run_dir.path) if run_dir else None,
        versions={"tensorflow": tf.__version__, "keras": keras.__version__},
    )


def write_artifacts(
    setup: Setup, model: keras.Model, run_dir: RunDir, report: FitReport
) -> None:
    """Writes model, report and curves. Runs on the chief, so nothing here is a collective."""
    artifacts.save_model(model, run_dir.model)
    artifacts.write_report(run_dir, report)
    title = f"{setup.config.dataset}, {setup.config.model}, {report.replicas} replicas"
    if report.epochs:
        artifacts.draw_curves(run_dir.curves, report.history, title)
    if setup.config.export_dir is not None:
        artifacts.export_model(run_dir.model, Path(setup.config.export_dir))


def summarize(setup: Setup, report: FitReport) -> None:
    """Prints the final metrics, the throughput and where everything is."""
    say = _say(setup)
    if report.stopped_by:
        say("stopped", f"by {report.stopped_by} after step {report.steps}; saved what was reached")
    words = [f"{name} {number(value)}" for name, value in report.metrics.items()]
    say("metrics", ", ".join(words) or "none: no epoch was finished")
    say("speed", f"{report.steps} steps, {report.examples:,} examples in "
        f"{number(report.seconds)} s; {number(report.examples_per_second)} examples/s")
    if report.run_dir is not None:
        files = ", ".join(sorted(p.name for p in Path(report.run_dir).iterdir()))
        say("written", f"{report.run_dir}: {files}")
    if setup.config.export_dir is not None and report.run_dir is not None:
        say("exported", setup.config.export_dir)


def _say(setup: Setup) -> Any:
    return speaker(setup.place.is_chief)


def _batch_for(setup: Setup, part: Any) -> int | None:
    return setup.batch.global_batch_size if size_of(part) is not None else None

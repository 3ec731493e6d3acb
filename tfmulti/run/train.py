"""Does a whole run, from the devices to the files: `train(config) -> FitReport`.

Every worker runs this code. Steps that have collectives (building, training, evaluating, voting)
never depend on whether the worker is the chief. What only the chief does (printing, writing files)
has no collectives.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from tfmulti.cluster.cluster import Cluster
from tfmulti.config.console import number
from tfmulti.config.fit_config import FitConfig
from tfmulti.config.notebook_output import in_notebook
from tfmulti.config.run_directory import (
    RunDir,
    default_run_dir,
    default_run_dir_named,
    guarded,
    remove,
    remove_partial,
    write_text,
)
from tfmulti.config.trackers import TENSORBOARD, names_in
from tfmulti.data.data_set import size_of
from tfmulti.data.source import Source
from tfmulti.distribution.agreement import broadcast, gather
from tfmulti.errors import RunDirError, VerificationError
from tfmulti.launch.signals import SignalWatch
from tfmulti.run import artifacts, report_page, validation
from tfmulti.run.callbacks.history_file import HistoryFile, listed
from tfmulti.run.callbacks.model_file import ModelFile, save_model
from tfmulti.run.callbacks.stragglers import Stragglers
from tfmulti.run.callbacks.tensorboard import TensorBoard
from tfmulti.run.callbacks.throughput import LOGS, Throughput
from tfmulti.run.callbacks.tracker import Tracker
from tfmulti.run.callbacks.waiting import Waiting
from tfmulti.run.curves import draw_curves
from tfmulti.run.report import FitReport
from tfmulti.run.setup import Setup, compile_model, make_model, set_up
from tfmulti.run.summary import Trained, describe, make_report, say_for, summarize
from tfmulti.training.checkpoint import owner
from tfmulti.training.checkpoint.callback import Checkpoint
from tfmulti.training.checkpoint.owner import NotOwnerError, ownership_of
from tfmulti.training.distributed_model import estimate
from tfmulti.training.input.prefetcher import specs_of
from tfmulti.training.memory import MemoryEstimate
from tfmulti.training.state.trainer_state import interrupt, state_of
from tfmulti.training.watchdog import Watchdog


def train(
    config: FitConfig, *, cluster: Cluster | None = None, env: Mapping[str, str] | None = None
) -> FitReport:
    """Returns the report of the run that a configuration describes, when it is done.

    It does the same as `python -m tfmulti.fit`. Every worker must call this function. The chief
    prints, and writes the run directory.

    Args:
        config: the configuration.
        cluster: the cluster that this process belongs to. None reads it from the environment.
        env: the environment. None: `os.environ`.

    Raises:
        UserError: a mistake in the configuration, the cluster, the data or the model.
        VerificationError: replicas compute other numbers than one device.
        KeyboardInterrupt: Ctrl-C has stopped the run, and the progress is saved.
    """
    job = validation.check(config, cluster, env)
    report = job.done or run(job)
    if report.stopped_by == "SIGINT":
        raise KeyboardInterrupt
    return report


def run(job: validation.Job, kind: type[Checkpoint] = Checkpoint) -> FitReport:
    """Does the run of a checked job, and returns its report.

    A signal stops the run early. `FitReport.stopped_by` then names the signal.

    Args:
        job: the checked job.
        kind: the class of the callback that makes the checkpoints.
    """
    setup = set_up(job)
    with SignalWatch() as watch, contextlib.ExitStack() as at_end:
        with setup.strategy.scope():
            model = make_model(setup)
        compiled_here = compile_model(setup, model)
        describe(setup, model, compiled_here)
        watch.stop = lambda reason: interrupt(model, reason)
        if setup.config.dry_run:
            return dry_run(setup, model)
        folder = setup.config.run_dir
        is_new = folder is None or not RunDir(folder).holds_run()
        run_dir = make_run_dir(setup, at_end)
        logged_to = names_in(setup.config.tracker)
        scalars_dir = (
            run_dir.tensorboard / "train" if run_dir and TENSORBOARD in logged_to else None
        )
        throughput = Throughput(
            scalars_dir,
            in_logs=setup.config.log_throughput,
            peak_tflops=setup.config.peak_tflops,
        )
        waiting = Waiting(scalars_dir, say_for(setup), cached=setup.config.cache != "none")
        started = time.perf_counter()
        files = file_callbacks(run_dir, setup.config)
        trackers = tracker_callbacks(run_dir, setup.config)
        # The throughput comes last, so history.csv and TensorBoard's metrics hold only numbers that
        # do not depend on time. The progress bar comes after it and shows its figures.
        try:
            saving = checkpoint(setup, run_dir, kind)
            watchdog = Watchdog(folder_of_all(setup, run_dir))
            stragglers = Stragglers(scalars_dir, say_for(setup))
            writers = [*files, *trackers, saving]
            history = train_model(
                setup, model, [waiting, *writers, watchdog, stragglers, throughput]
            )
        except (VerificationError, RunDirError):
            if run_dir is not None and is_new:
                # Nothing was trained, so the folder is left as it was before the run.
                remove_start(run_dir)
            raise
        seconds = time.perf_counter() - started
        metrics = {name: values[-1] for name, values in history.items()}
        metrics |= test(setup, model, watchdog)
        watch.finished()
        trained = Trained(history, metrics, seconds, throughput, waiting, stragglers)
        report = make_report(setup, model, run_dir, trained)
        if run_dir is not None:
            write_artifacts(setup, model, run_dir, report)
            for tracker in trackers:
                # The tracker has the metrics of the epochs already.
                test_metrics = {k: v for k, v in report.metrics.items() if k.startswith("test_")}
                tracker.log(test_metrics, max(0, report.epochs - 1))
                tracker.finish([run_dir.report_page, run_dir.curves])
        summarize(setup, report)
        return report


def make_run_dir(setup: Setup, at_end: contextlib.ExitStack) -> RunDir | None:
    """Makes the run directory and writes its first files, on the chief.

    Args:
        setup: the parts of the run.
        at_end: this process owns the folder until this stack is closed.

    Returns:
        The run directory, or None on workers other than the chief.

    Raises:
        ResumeError: another process that is still running owns the folder.
        RunDirError: the folder cannot be made.
    """
    if not setup.placement.is_chief:
        return None
    config = setup.config
    if config.run_dir is None:
        run_dir = default_run_dir(config.dataset, str(config.model), datetime.now())
    else:
        run_dir = RunDir(config.run_dir)
    run_dir.create()
    ownership = ownership_of(run_dir.checkpoints)
    ownership.take()
    at_end.callback(ownership.release)
    at_end.enter_context(guarded(run_dir.path, ownership.check))
    remove_partial(run_dir.path)
    data = setup.data
    for path, words in ((run_dir.features, data.features), (run_dir.vocabulary, data.vocabulary)):
        if words is not None:
            write_text(path, "".join(f"{word}\n" for word in words))
    write_text(run_dir.config, config.to_json())
    return run_dir


def folder_of_all(setup: Setup, run_dir: RunDir | None) -> Path | None:
    """Returns the run directory on every worker, also if only the chief has chosen its name.

    All workers call it. The name comes from the network, so only one that `default_run_dir` may
    have made is used.
    """
    if setup.config.run_dir is not None:
        return Path(setup.config.run_dir)
    name = broadcast(setup.strategy, run_dir.path.name.encode() if run_dir else None)
    return (
        run_dir.path if run_dir else default_run_dir_named((name or b"").decode(errors="replace"))
    )


def remove_start(run_dir: RunDir) -> None:
    """Removes the files that `make_run_dir` has written, and the folder if it is then empty.

    This process must still own the folder. If it has lost it, the files of the new owner stay.
    """
    with contextlib.suppress(NotOwnerError):
        for path in (run_dir.features, run_dir.vocabulary, run_dir.config):
            remove(path)
        remove(run_dir.checkpoints / owner.FILE)
        # A folder that holds the user's files stays.
        with contextlib.suppress(OSError):
            run_dir.checkpoints.rmdir()
            run_dir.path.rmdir()


def file_callbacks(run_dir: RunDir | None, config: FitConfig) -> list[keras.callbacks.Callback]:
    """Returns the callbacks that write files, which only the chief has."""
    if run_dir is None:
        return []
    files = [HistoryFile(run_dir.history), ModelFile(run_dir.model)]
    if TENSORBOARD in names_in(config.tracker):
        files.append(TensorBoard(run_dir.tensorboard, config.values_given()))
    return files


def tracker_callbacks(run_dir: RunDir | None, config: FitConfig) -> list[Tracker]:
    """Returns the callbacks that log to other trackers than TensorBoard, for the chief."""
    if run_dir is None:
        return []
    names = [name for name in names_in(config.tracker) if name != TENSORBOARD]
    return [Tracker(name, config.values_given(), at_end=False) for name in names]


def checkpoint(setup: Setup, run_dir: RunDir | None, kind: type[Checkpoint]) -> Checkpoint:
    """Returns the callback that writes checkpoints. Every worker must have it.

    `run_dir` is None on workers other than the chief, and `kind` is the class of the callback.
    """
    config = setup.config
    if run_dir is None and config.run_dir is not None and config.shared_run_dir:
        run_dir = RunDir(config.run_dir)
    return kind(
        run_dir.checkpoints if run_dir else None,
        every_steps=config.checkpoint_every_steps,
        every_s=config.checkpoint_every_s or None,
        keep=config.keep_checkpoints,
        resume="must" if config.resume == "must" else "auto",
    )


def train_model(
    setup: Setup, model: keras.Model, callbacks: list[keras.callbacks.Callback]
) -> dict[str, list[float]]:
    """Trains all epochs, or until a signal, and returns the metrics of each epoch by name.

    Every worker must call this function.
    """
    verbose = setup.config.verbose
    history = model.fit(
        setup.data.train,
        batch_size=_batch_for(setup, setup.data.train),
        epochs=setup.epochs,
        steps_per_epoch=setup.config.steps_per_epoch,
        validation_data=setup.data.validation,
        validation_batch_size=_batch_for(setup, setup.data.validation),
        callbacks=callbacks,
        verbose=_verbosity(verbose) if setup.placement.is_chief else 0,
    )
    return {
        name: [listed(value) for value in values]
        for name, values in history.history.items()
        if name not in LOGS
    }


def test(setup: Setup, model: keras.Model, watchdog: Watchdog) -> dict[str, float]:
    """Returns the metrics of the test part by name, or none if a signal has stopped the run.

    Every worker must call this function. Without a test part the result is empty too.

    `watchdog` names the worker that the others wait for.
    """
    if setup.data.test is None or state_of(model).run.stopped_by:
        return {}
    metrics = model.evaluate(
        setup.data.test,
        batch_size=_batch_for(setup, setup.data.test),
        callbacks=[watchdog],
        verbose=0,
        return_dict=True,
    )
    if state_of(model).run.stopped_by:
        # The metrics of only some of the rows are no result.
        return {}
    return {f"test_{name}": listed(value) for name, value in metrics.items()}


def dry_run(setup: Setup, model: keras.Model) -> FitReport:
    """Prints how much memory a step needs, and how long a full run would take.

    Two executions and a step of validation run, unless a step does not fit the memory of a device.
    Every worker must call this function. It writes no files.
    """
    throughput, waiting = Throughput(in_logs=False), Waiting()
    say = say_for(setup)
    started = time.perf_counter()
    memory = memory_of(setup, model)
    unknown = ["it is not known, because the data does not tell the form of its batches"]
    for line in memory.describe() if memory else unknown:
        say("memory", line)
    if not may_run(setup, memory):
        say("dry run", "no step was run, because it does not fit. Nothing was written.")
        seconds = time.perf_counter() - started
        return make_report(setup, model, None, Trained({}, {}, seconds, throughput, waiting))
    # The first execution is traced, so only the second one shows how long a step takes.
    steps = 2 * int(model.steps_per_execution)
    is_short = setup.steps_per_epoch is not None and setup.steps_per_epoch < steps
    started = time.perf_counter()
    history = model.fit(
        setup.data.train,
        batch_size=_batch_for(setup, setup.data.train),
        epochs=2 if is_short else 1,
        steps_per_epoch=setup.steps_per_epoch if is_short else steps,
        validation_data=setup.data.validation,
        validation_batch_size=_batch_for(setup, setup.data.validation),
        validation_steps=1,
        callbacks=[throughput, waiting],
        verbose=0,
    ).history
    seconds = time.perf_counter() - started
    if setup.steps_per_epoch is None:
        say(
            "dry run",
            f"a step takes {number(throughput.step_s)} s; the data does not tell how many steps "
            "an epoch has",
        )
    else:
        steps = setup.steps_per_epoch * setup.epochs
        say(
            "dry run",
            f"all is built; {steps:,} steps of {number(throughput.step_s * 1000)} ms "
            f"would take about {number(throughput.first_s + steps * throughput.step_s)} s with the "
            "tracing, validation not counted. Nothing was written.",
        )
    metrics = {name: values[-1] for name, values in history.items()}
    trained = Trained(history, metrics, seconds, throughput, waiting)
    return make_report(setup, model, None, trained)


def memory_of(setup: Setup, model: keras.Model) -> MemoryEstimate | None:
    """Returns how much memory a step needs on each device, or None if that is not known.

    Every worker must call this function.
    """
    data = setup.data.train
    if isinstance(data, Source):
        specs = specs_of(data.specs, None)
    elif isinstance(data, tf.data.Dataset):
        specs = data.element_spec
    else:
        return None
    return estimate(
        model,
        rows=setup.batch.per_replica_batch_size,
        specs=specs,
        device_memory_gb=setup.config.device_memory_gb,
    )


def may_run(setup: Setup, memory: MemoryEstimate | None) -> bool:
    """Returns whether a step may fit the devices of all workers, which may have other memory.

    Every worker must call this function.

    `memory` is the estimate of this worker, or None.
    """
    may_fit = memory is None or memory.fits is not False
    return all(fits for (fits,) in gather(setup.strategy, [may_fit]))


def write_artifacts(setup: Setup, model: keras.Model, run_dir: RunDir, report: FitReport) -> None:
    """Writes the model, the report, the curves and the report as a page.

    Only the chief calls this function, so it must have no collectives.
    """
    save_model(model, run_dir.model)
    if setup.config.export_dir is not None and report.stopped_by is None:
        artifacts.export_model(model, run_dir.model, Path(setup.config.export_dir))
    # The report marks the run as finished, so it is written after the export.
    write_text(run_dir.report, report.to_json())
    replicas = f"{report.replicas} replica{'s' if report.replicas > 1 else ''}"
    title = f"{setup.config.dataset}, {setup.config.model}, {replicas}"
    if report.epochs:
        draw_curves(run_dir.curves, report.history, title)
    write_text(run_dir.report_page, report_page.page(report, title))


def _verbosity(verbose: str) -> int:
    """Returns Keras' number for `--verbose`. `auto`: a progress bar on a terminal or in a cell."""
    if verbose == "auto":
        return 1 if sys.stdout.isatty() or in_notebook() else 2
    return int(verbose)


def _batch_for(setup: Setup, part: Any) -> int | None:
    """Returns the batch size for a part, or None if the part gives whole batches itself."""
    return setup.batch.global_batch_size if size_of(part) is not None else None

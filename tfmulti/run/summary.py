"""Describes a run in words before and after it, and makes its report."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

import keras
import tensorflow as tf

from tfmulti.config.console import Say, number, speaker
from tfmulti.config.fit_config import FitConfig
from tfmulti.config.run_directory import RunDir
from tfmulti.data.data_set import size_of
from tfmulti.distribution.agreement import gather_bytes
from tfmulti.distribution.strategies import Placement, device_names
from tfmulti.run import artifacts
from tfmulti.run.callbacks.stragglers import Stragglers
from tfmulti.run.callbacks.throughput import Throughput
from tfmulti.run.callbacks.waiting import Waiting
from tfmulti.run.optimizers import peak_learning_rate
from tfmulti.run.report import FitReport
from tfmulti.run.setup import Setup
from tfmulti.training.state.trainer_state import state_of


def describe(setup: Setup, model: keras.Model, compiled_here: bool) -> None:
    """Prints what will run, where, and why.

    `compiled_here` is whether the run has compiled the model. Otherwise the user's function has.
    """
    say, config, batch, placement = say_for(setup), setup.config, setup.batch, setup.placement
    say("strategy", f"{setup.selection.strategy} ({setup.selection.why})")
    workers = f"{placement.workers} workers × " if placement.workers > 1 else ""
    say(
        "devices",
        f"{workers}{', '.join(device_names(setup.strategy))}: "
        f"{placement.replicas} replica{'s' if placement.replicas > 1 else ''}",
    )
    data = setup.data
    parts = {"training": data.train, "validation": data.validation, "test": data.test}
    sizes = {name: size_of(part) for name, part in parts.items()}
    words = [f"{rows:,} {name}" for name, rows in sizes.items() if rows is not None]
    form = f" ({data.spec.describe()})" if data.spec else ""
    say("data", f"{config.dataset}: {', '.join(words) or 'batches of its own'}{form}")
    trained_by = optimizer_words(setup, model, compiled_here)
    built = f"{model.count_params():,} parameters, " if model.built else ""
    say("model", f"{config.model}: {built}{model.dtype_policy.name}, {trained_by}")
    uneven = "" if batch.divides else " at most"
    steps = f"{setup.steps_per_epoch} steps" if setup.steps_per_epoch else "all batches"
    say(
        "batch",
        f"{batch.global_batch_size} global ={uneven} {batch.per_replica_batch_size} per "
        f"replica × {placement.replicas}; {setup.epochs} epoch{'s' if setup.epochs > 1 else ''} of "
        f"{steps}",
    )
    inexact = inexact_flags(config, placement)
    if inexact:
        say("inexact", f"{', '.join(inexact)}: not the numbers of one device")
    if config.gradient_compression != "none" and placement.workers == 1:
        flag = f"--gradient_compression {config.gradient_compression}"
        say("exact", f"{flag} has no effect with one worker")


def inexact_flags(config: FitConfig, placement: Placement) -> tuple[str, ...]:
    """Returns the flags by which the numbers of this run differ from those of one device."""
    flags = []
    if placement.workers > 1 and config.gradient_compression != "none":
        flags.append(f"--gradient_compression {config.gradient_compression}")
    if placement.replicas > 1 and not config.sync_batch_norm:
        flags.append("--nosync_batch_norm")
    return tuple(flags)


def optimizer_words(setup: Setup, model: keras.Model, compiled_here: bool) -> str:
    """Returns the optimizer in words, such as `adam at 0.003`.

    `compiled_here` is as in `describe`.
    """
    config = setup.config
    if not compiled_here:
        return (
            f"compiled with {type(model.optimizer).__name__} by its own function, so flags of the "
            "optimizer have no effect"
        )
    rate = peak_learning_rate(config, setup.batch.global_batch_size)
    scaled = f" (scaled from {config.learning_rate:g})" if config.scale_learning_rate else ""
    return f"{config.optimizer} at {rate:g}{scaled}"


@dataclass(frozen=True)
class Trained:
    """The results of the training of a run.

    Args:
        history: one list for each metric, with an entry for each epoch.
        metrics: the final metrics, with those of the test part.
        seconds: the time of the training loop.
        throughput: the callback that measured the steps.
        waiting: the callback that measured how long the steps waited for data.
        stragglers: the callback that compared the workers, or None.
    """

    history: dict[str, list[float]]
    metrics: dict[str, float]
    seconds: float
    throughput: Throughput
    waiting: Waiting
    stragglers: Stragglers | None = None


def make_report(
    setup: Setup, model: keras.Model, run_dir: RunDir | None, trained: Trained
) -> FitReport:
    """Returns the report of a run. Every worker must call this function.

    `run_dir` is None on workers other than the chief, and in a dry run.
    """
    state = state_of(model)
    history, throughput = trained.history, trained.throughput
    # If there was only one execution, its time with tracing is all that was measured.
    speed = (
        throughput.examples_per_second
        or (state.run.examples - state.run.examples_before) / trained.seconds
    )
    return FitReport(
        strategy=setup.selection.strategy,
        why=setup.selection.why,
        devices=device_names(setup.strategy),
        workers=setup.placement.workers,
        addresses=setup.placement.addresses,
        places=places_of(setup),
        replicas=setup.placement.replicas,
        global_batch_size=setup.batch.global_batch_size,
        per_replica_batch_size=setup.batch.per_replica_batch_size,
        epochs=len(history.get("loss", next(iter(history.values()), []))),
        steps=state.run.steps,
        examples=state.run.examples,
        steps_before=state.run.steps_before,
        examples_before=state.run.examples_before,
        parameters=model.count_params(),
        metrics={name: v for name, v in trained.metrics.items() if isinstance(v, float)},
        history=history,
        seconds=trained.seconds,
        examples_per_second=speed,
        waiting_share=trained.waiting.share,
        examples_lost=state.run.lost + len(setup.data.lost),
        weights_sha256=artifacts.weights_sha256(model),
        inexact=inexact_flags(setup.config, setup.placement),
        epochs_asked=setup.epochs,
        stopped_by=state.run.stopped_by,
        throughput=throughput.figures() if setup.config.log_throughput else None,
        verification=state.verification,
        straggler=trained.stragglers.as_dict() if trained.stragglers else None,
        others_share=trained.stragglers.others_share if trained.stragglers else None,
        run_dir=str(run_dir.path) if run_dir else None,
        versions={"tensorflow": tf.__version__, "keras": keras.__version__},
    )


def places_of(setup: Setup) -> tuple[str, ...]:
    """Returns the host name and the devices of each worker in words, by rank.

    Every worker must call this function.
    """
    kinds = {
        f"GPU:{number}": tf.config.experimental.get_device_details(gpu).get("device_name", "GPU")
        for number, gpu in enumerate(tf.config.get_visible_devices("GPU"))
    }
    devices = device_names(setup.strategy)
    named = (f"{device} ({kinds[device]})" if device in kinds else device for device in devices)
    place = f"{platform.node()}: {', '.join(named)}"
    places = gather_bytes(setup.strategy, place.encode())
    return tuple((place or b"").decode(errors="replace") for place in places)


def summarize(setup: Setup, report: FitReport) -> None:
    """Prints the final metrics, the throughput and the written files."""
    say = say_for(setup)
    if report.stopped_by:
        say("stopped", f"by {report.stopped_by} after step {report.steps}; its state is saved")
        if setup.config.run_dir:
            say("go on", "with the same command")
        elif report.run_dir:
            say("go on", f"with the same command and --run_dir {report.run_dir}")
    words = [f"{name} {number(value)}" for name, value in report.metrics.items()]
    say("metrics", ", ".join(words) or "none: no epoch was finished")
    say("speed", speed_words(report))
    if report.throughput and "examples_per_sec" in report.throughput:
        say("throughput", throughput_words(report.throughput, report.devices))
    if report.run_dir is not None:
        files = ", ".join(sorted(p.name for p in Path(report.run_dir).iterdir()))
        say("written", f"{report.run_dir}: {files}")
    if setup.config.export_dir is not None and report.stopped_by is None:
        say("exported", setup.config.export_dir)


def speed_words(report: FitReport) -> str:
    """Returns what this process has trained, and the time that it took, in words."""
    steps, examples = report.steps - report.steps_before, report.examples - report.examples_before
    if not steps:
        return f"nothing was left to train after step {report.steps:,}"
    before = f" after step {report.steps_before:,}" if report.steps_before else ""
    plural = "" if steps == 1 else "s"
    return (
        f"{steps:,} step{plural}{before}, {examples:,} examples in {number(report.seconds)} s; "
        f"{number(report.examples_per_second)} examples/s in the steps alone, without tracing"
    )


def throughput_words(figures: dict[str, float], devices: tuple[str, ...]) -> str:
    """Returns the figures of `--log_throughput` in words."""
    p50, p90, p99 = (number(figures[f"step_ms_p{percent}"]) for percent in (50, 90, 99))
    words = (
        f"{number(figures['device_examples_per_sec'])} examples/s on each device; a step takes "
        f"{p50} ms (p50), {p90} (p90), {p99} (p99); "
    )
    if "device_tflops_per_sec" not in figures:
        return words + "the model's operations cannot be counted"
    words += f"{number(figures['device_tflops_per_sec'])} TFLOP/s of the model on each device"
    if "mfu" in figures:
        return words + f", {number(100 * figures['mfu'])} % of its peak"
    return words + f"; no peak is known of {devices[0]} (--peak_tflops gives one)"


def say_for(setup: Setup) -> Say:
    """Returns a function that prints a labelled line, on the chief only."""
    return speaker(setup.placement.is_chief)

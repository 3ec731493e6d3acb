"""Measures the steps of a run at one point: with peers, without peers, and the all-reduce alone.

The code runs in every process of the point. All processes train with peers and run all-reduces
together, in the same order. In between each process trains without peers, by itself and at the same
time as the others.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti.bench.all_reduces import all_reduce_times, message_seconds
from tfmulti.bench.parts import Phase
from tfmulti.bench.request import MeasureRequest, MeasureResult
from tfmulti.cluster.cluster import Cluster
from tfmulti.cluster.selection import BatchSizes
from tfmulti.data.source import Source
from tfmulti.distribution.agreement import gather
from tfmulti.distribution.bucket_sizes import BUCKET_BYTES
from tfmulti.distribution.connections import channel_of
from tfmulti.distribution.strategies import Placement, device_names
from tfmulti.errors import DataError
from tfmulti.keras_patches.model_structure import layers_of
from tfmulti.run import validation
from tfmulti.run.callbacks.flops import peak_of_devices, training_flops
from tfmulti.run.callbacks.step_times import StepTimes
from tfmulti.run.callbacks.throughput import Throughput
from tfmulti.run.callbacks.waiting import Waiting
from tfmulti.run.setup import Setup, compile_model, make_model, set_up
from tfmulti.training.state.trainer_state import state_of

MEASURED_S = 5.0
# The least and the most executions that are measured.
_LEAST, _MOST = 5, 2000
# The executions of the warm-up. The first one is traced.
_WARM_UP = 3
_PROFILED = 5
_TURNS = 5


def measure_process(request: MeasureRequest, cluster: Cluster | None) -> MeasureResult:
    """Measures what a request asks for, and returns the result of this process.

    Every process of the point must call this function.

    Raises:
        DataError: the data has batches of a fixed size, but the measurement needs several sizes.
    """
    gpus = {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ}
    setup = set_up(validation.check(request.run, cluster, env=gpus))
    if not isinstance(setup.data.train, Source):
        raise DataError(
            f"--dataset {request.run.dataset} gives batches of its own, but a measurement takes "
            "batches of several sizes. Give arrays, files or a Source."
        )
    model = compiled(setup)
    warm, _ = trained(setup, model, _WARM_UP)
    executions = agreed(setup, model, warm, request.steps)
    alone = without_peers(setup, request.rows_alone) if request.rows_alone else None
    together, times, by_itself = in_turns(setup, model, alone, executions)
    several = setup.placement.replicas > 1
    if request.profile is not None:
        profile(setup, model, Path(request.profile))
    synchronized = synchronized_layers(setup, model) if several else 0
    has_workers = setup.placement.workers > 1
    value_bytes = 2 if request.run.gradient_compression != "none" and has_workers else 4
    sizes = [value_bytes * math.prod(v.shape) for v in model.trainable_variables]
    messages = gradient_messages(sizes) if has_workers else 1
    collectives = messages + 1 + 2 * synchronized if several else 0
    sent, rows = sent_bytes(setup, model) or (sum(sizes), 0.0)
    inputs, _, _ = keras.utils.unpack_x_y_sample_weight(state_of(model).specs)
    return MeasureResult(
        devices=device_names(setup.strategy),
        parameters=model.count_params(),
        gradient_bytes=sent,
        row_bytes=rows,
        collectives=collectives,
        synchronized=synchronized,
        step_ms=times.percentiles_ms(),
        together=together,
        alone=by_itself,
        all_reduces=all_reduce_times(setup.strategy) if several else (),
        flops_per_example=training_flops(model, inputs),
        peak_tflops=request.run.peak_tflops or peak_of_devices(model, setup.placement.gpus),
        reader_threads=state_of(model).epoch.reader_threads,
        s_per_message=message_seconds(setup.strategy) if has_workers else None,
    )


def compiled(setup: Setup) -> keras.Model:
    """Returns the compiled model of a run, with its variables under the run's strategy."""
    with setup.strategy.scope():
        model = make_model(setup)
    compile_model(setup, model)
    return model


def without_peers(setup: Setup, rows: int) -> tuple[Setup, keras.Model]:
    """Returns the same run on the first device of this process, and its model after a warm-up.

    A step has `rows` rows.
    """
    kind = "GPU" if setup.placement.gpus else "CPU"
    alone = dataclasses.replace(
        setup,
        strategy=tf.distribute.OneDeviceStrategy(f"{kind}:0"),
        placement=Placement(0, 1, 1, setup.placement.gpus[:1]),
        batch=BatchSizes(rows, rows, True),
    )
    model = compiled(alone)
    trained(alone, model, _WARM_UP)
    return alone, model


def in_turns(
    setup: Setup, model: keras.Model, alone: tuple[Setup, keras.Model] | None, executions: int
) -> tuple[Phase, StepTimes, Phase | None]:
    """Measures steps with and without peers in turns.

    Other work on the machine then affects both measurements. `alone` has the run without peers and
    its model.

    Returns:
        The phase with peers, the times of its steps, and the phase without peers or None.
    """
    turns = min(_TURNS, executions)
    together, without, times = [], [], StepTimes()
    for turn in range(turns):
        count = executions // turns + (turn < executions % turns)
        phase, throughput = trained(setup, model, count)
        together.append(phase)
        times.merge(throughput.times)
        if alone is not None:
            without.append(trained(*alone, count)[0])
    by_itself = functools.reduce(operator.add, without) if without else None
    return functools.reduce(operator.add, together), times, by_itself


def trained(setup: Setup, model: keras.Model, executions: int) -> tuple[Phase, Throughput]:
    """Trains one execution that is not measured, and then `executions` that are.

    Returns:
        The measured phase, and the callback that has measured it.
    """
    throughput, waiting = Throughput(in_logs=False, keep_times=True), Waiting()
    model.fit(
        setup.data.train,
        batch_size=setup.batch.global_batch_size,
        steps_per_epoch=(executions + 1) * int(model.steps_per_execution),
        callbacks=[waiting, throughput],
        verbose=0,
    )
    phase = Phase(
        steps=throughput.steps,
        examples=throughput.examples,
        seconds=throughput.seconds,
        executing_s=throughput.executing_s,
        waited_s=waiting.waited_s,
    )
    return phase, throughput


def synchronized_layers(setup: Setup, model: keras.Model) -> int:
    """Returns how many layers take batch statistics over all replicas.

    Each of them needs two collectives in a step.
    """
    return sum(
        layer.trainable and (setup.config.sync_batch_norm or layer.synchronized)
        for layer in layers_of(model)
        if isinstance(layer, keras.layers.BatchNormalization)
    )


def gradient_messages(sizes: Sequence[int]) -> int:
    """Returns about how many messages the gradients of a step travel in.

    A gradient of at least `BUCKET_BYTES` travels alone. Smaller ones share a message. `sizes` has
    the bytes of each gradient.
    """
    small = [size for size in sizes if size < BUCKET_BYTES]
    return len(sizes) - len(small) + -(-sum(small) // BUCKET_BYTES)


def sent_bytes(setup: Setup, model: keras.Model) -> tuple[int, float] | None:
    """Returns the size of an all-reduce that sends as many bytes as a step, and its row bytes.

    The bytes are counted, because the size of an embedding does not tell them: its gradient has
    only the rows of the batch. Every process must call this function.

    Returns:
        The size in bytes, and the bytes of embedding rows that each other worker gets in a step.
        None with one worker, or if TensorFlow's collectives connect the workers.
    """
    workers, channel = setup.placement.workers, channel_of(setup.placement)
    if channel is None:
        return None
    sent = []
    # Both calls of `fit` send the same other messages, which the difference leaves out.
    for executions in (1, 3):
        before = np.array([channel.sent_bytes, channel.sent_row_bytes])
        trained(setup, model, executions)
        sent.append(np.array([channel.sent_bytes, channel.sent_row_bytes]) - before)
    steps = 2 * int(model.steps_per_execution)
    message_bytes, row_bytes = (sent[1] - sent[0]) / steps / (workers - 1)
    return round(message_bytes * workers / 2), float(row_bytes)


def agreed(
    setup: Setup, model: keras.Model, warm: Phase, steps: int | None, seconds: float = MEASURED_S
) -> int:
    """Returns the number of executions to measure, which is the same in all processes.

    Every process must call this function. If the user has asked for a number of steps, these are
    measured. Otherwise the chief's time of the warm-up decides how many take about `seconds`.
    """
    steps_each = int(model.steps_per_execution)
    if steps is not None:
        return -(-steps // steps_each)
    execution_s = steps_each * warm.seconds / warm.steps
    executions = int(np.clip(seconds / execution_s, _LEAST, _MOST))
    return gather(setup.strategy, [executions])[0][0]


def profile(setup: Setup, model: Any, folder: Path) -> None:
    """Writes a trace of some steps for TensorBoard on the chief. Every process must call it."""
    if setup.placement.is_chief:
        tf.profiler.experimental.start(str(folder))
    trained(setup, model, _PROFILED)
    if setup.placement.is_chief:
        tf.profiler.experimental.stop()

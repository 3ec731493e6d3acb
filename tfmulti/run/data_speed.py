"""Measures the speed of the data alone, of the steps alone, and of both together."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from tfmulti.config.console import Say, number
from tfmulti.data.advice import HIGH_SHARE, advice
from tfmulti.data.arrays import ArraySource
from tfmulti.data.buffers import bytes_of
from tfmulti.data.loader import cores
from tfmulti.data.source import Source, leaves_of, map_nest
from tfmulti.run.callbacks.throughput import Throughput
from tfmulti.run.callbacks.waiting import Waiting
from tfmulti.run.setup import Setup, compile_model, first_batch, make_model, plan_of, reading_of
from tfmulti.training.input.prefetcher import prefetcher_of
from tfmulti.training.state.trainer_state import state_of

_MEASURED_STEPS, MEASURED_S = 200, 3.0


def show_speed(setup: Setup, say: Say) -> None:
    """Measures and prints the speed of the data alone, of the steps alone, and of both together.

    The first two are measured only for data with random access.
    """
    with setup.strategy.scope():
        model = make_model(setup)
    compile_model(setup, model)
    batch = setup.batch.global_batch_size
    say("measuring", f"batches, and steps of {setup.config.model}, for {MEASURED_S:.0f} s each")
    if isinstance(setup.data.train, Source):
        alone_s, threads, size = _data_alone(setup)
        how = f"{threads} threads" if threads else "no threads of their own"
        say(
            "data alone",
            f"{number(batch / alone_s)} examples/s: {number(alone_s * 1000)} ms a batch of "
            f"{number(size / 1e6)} MB, with {how}",
        )
        step_s = _step_alone(setup, model)
        say("step alone", f"{number(batch / step_s)} examples/s: {number(step_s * 1000)} ms")
    throughput, waiting = Throughput(in_logs=False), Waiting()
    model.fit(
        setup.data.train,
        batch_size=batch if isinstance(setup.data.train, Source) else None,
        steps_per_epoch=_MEASURED_STEPS + 1,
        callbacks=[throughput, waiting, StopsAfter(MEASURED_S)],
        verbose=0,
    )
    say(
        "together",
        f"{number(throughput.examples_per_second)} examples/s: "
        f"{number(throughput.step_s * 1000)} ms a step",
    )
    state = state_of(model)
    cached = setup.config.cache != "none"
    if waiting.share > HIGH_SHARE:
        say("", advice(waiting.share, state.epoch.reader_threads, cached=cached, cores=cores()))
    else:
        share = f"{waiting.share:.0%}".replace("%", " %")
        say("", f"the data keeps up: {share} of the step is waiting for it")


def _data_alone(setup: Setup) -> tuple[float, int, int]:
    """Returns the seconds of a batch, the number of reader threads, and the bytes of a batch."""
    with contextlib.closing(
        prefetcher_of(setup.data.train, plan_of(setup), setup.placement, 0, reading_of(setup))
    ) as stream:
        size = sum(bytes_of_tensors(data) for data in stream.take().data)
        # These batches were read ahead before the measurement.
        for _ in range(3):
            stream.take()
        began, count = time.perf_counter(), 0
        while count < 10 or time.perf_counter() - began < MEASURED_S:
            stream.take()
            count += 1
        return (time.perf_counter() - began) / count, stream.threads or 0, size


class StopsAfter(keras.callbacks.Callback):
    """Ends training some seconds after the first execution, which is traced.

    Args:
        seconds: the seconds.
        clock: returns the time in seconds.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.perf_counter) -> None:
        super().__init__()
        self._seconds, self._clock = seconds, clock
        self._began: float | None = None

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Starts the time after the first execution, and ends training when it is over."""
        if self._began is None:
            self._began = self._clock()
        elif self._clock() - self._began > self._seconds:
            self.model.stop_training = True


def bytes_of_tensors(data: Any) -> int:
    """Returns the bytes of a nest of tensors, in which texts count with their characters."""
    return bytes_of(map_nest(lambda tensor: tensor.numpy(), data))


def _step_alone(setup: Setup, model: Any) -> float:
    """Returns the seconds of a step with data that is in memory."""
    batch, data = setup.batch.global_batch_size, first_batch(setup)
    # Examples that could not be read are missing in the first batch, so some rows are repeated.
    whole = np.arange(batch) % len(leaves_of(data)[0])
    rows = map_nest(lambda leaf: np.asarray(leaf)[whole], data)
    throughput = Throughput(in_logs=False)
    model.fit(
        ArraySource(rows),
        batch_size=batch,
        steps_per_epoch=_MEASURED_STEPS + 1,
        callbacks=[throughput, StopsAfter(MEASURED_S)],
        verbose=0,
    )
    return throughput.step_s

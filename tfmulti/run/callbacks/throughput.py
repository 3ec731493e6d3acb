"""Measures how fast training is, without validation and without executions that are traced.

    throughput = tfmulti.Throughput("runs/a/tensorboard/train")
    model.fit(x, y, callbacks=[throughput])
    print(throughput.figures())

An execution takes the time from the end of the one before it to its own end. Executions in which a
step is traced do not count. Examples per second are the examples of the counted executions, divided
by their time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras

from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import ConfigError, ModelError
from tfmulti.run.callbacks.flops import peak_of_devices, training_flops
from tfmulti.run.callbacks.scalars import WritesScalars
from tfmulti.run.callbacks.step_times import PERCENTILES, StepTimes
from tfmulti.training.state.trainer_state import is_prepared, state_of

_MS = tuple(f"step_ms_p{percent}" for percent in PERCENTILES)
# The names of the figures that are added to the logs.
LOGS = ("examples_per_sec", "device_examples_per_sec", *_MS, "device_tflops_per_sec", "mfu")


class Throughput(WritesScalars):
    """Measures examples per second, the time of steps, and the used part of the devices' peak.

    The callback works with prepared models. Every worker gives it to `fit`. The time of an
    execution is the time since the end of the one before it, or since the start of the epoch. It
    includes callbacks and waiting for data, and is divided evenly among the steps of the
    execution. The first execution, and each execution in which a step is traced, are not counted.

    With `in_logs` the figures of the epoch are added to its logs from the second execution on, by
    the names of `LOGS`. The progress bar, the history and later callbacks then have them.
    `device_tflops_per_sec` is present if the operations of the model are known
    (`flops.training_flops`, which traces the forward pass). `mfu`, the model FLOPs utilisation, is
    present if the peak of the devices is known as well.

    Source for `mfu`: Chowdhery et al. 2022, "PaLM", appendix B.

    Args:
        folder: the folder in which the chief writes the figures of each epoch for TensorBoard, or
            None.
        in_logs: whether the figures are added to the logs. This counts the operations of the model
            and keeps the times of the steps.
        keep_times: whether the times of the steps are kept without `in_logs`.
        peak_tflops: the peak TFLOP/s of one device in the precision of the model. None looks it up
            in `peaks`, by the name of the GPU.
        clock: returns seconds.

    Raises:
        ConfigError: `peak_tflops` is not above 0.
        ModelError: in `fit`, if the model is not prepared.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        *,
        in_logs: bool = True,
        keep_times: bool = False,
        peak_tflops: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(folder)
        if peak_tflops is not None and not peak_tflops > 0:
            raise ConfigError(f"Throughput(peak_tflops={peak_tflops}) must be above 0.")
        self.first_s = 0.0
        self.seconds = 0.0
        self.executing_s = 0.0
        self.examples = 0
        self.steps = 0
        self.times = StepTimes()
        self.flops_per_example: int | None = None
        self.peak_tflops = peak_tflops
        self._in_logs, self._clock = in_logs, clock
        self._keeps_times = in_logs or keep_times
        self._devices = 1
        self._since = self._started = 0.0
        self._before = (0, 0, 0)
        self._epoch = (0.0, 0, 0)
        self._epoch_times = StepTimes()

    def on_train_begin(self, logs: Any = None) -> None:
        """Counts the operations of the model.

        Raises:
            ModelError: the model is not prepared.
        """
        if not is_prepared(self.model):
            raise ModelError(
                "Throughput counts the examples of models that went through tfmulti.prepare. Give "
                f"prepare(model) this {type(self.model).__name__} before fit."
            )
        placement = placement_of(self.model.distribute_strategy)
        self._devices = placement.replicas
        if self._in_logs:
            inputs, _, _ = keras.utils.unpack_x_y_sample_weight(state_of(self.model).specs)
            self.flops_per_example = training_flops(self.model, inputs)
            self.peak_tflops = self.peak_tflops or peak_of_devices(self.model, placement.gpus)
        if not placement.is_chief:
            self._folder = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Starts the figures of an epoch."""
        self._epoch = (self.seconds, self.examples, self.steps)
        self._epoch_times = StepTimes()
        self._since = self._clock()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Notes the time and the counts before an execution."""
        self._started = self._clock()
        state = state_of(self.model)
        self._before = (state.run.examples, state.run.steps, state.traced.count)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Adds an execution to the figures, unless it was traced."""
        now, state = self._clock(), state_of(self.model)
        since, self._since = self._since, now
        if not self.first_s or state.traced.count != self._before[2]:
            self.first_s = self.first_s or now - self._started
            return
        steps = state.run.steps - self._before[1]
        self.seconds += now - since
        self.executing_s += now - self._started
        self.examples += state.run.examples - self._before[0]
        self.steps += steps
        if self._keeps_times:
            self._epoch_times.add(now - since, steps)
        self._add_to(logs)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Adds the figures of the epoch to the logs, and writes them for TensorBoard."""
        self.times.merge(self._epoch_times)
        self._add_to(logs)
        seconds, examples, steps = self._of_epoch()
        if seconds:
            figures = self._figures(seconds, examples, self._epoch_times)
            figures["steps_per_sec"] = steps / seconds
            # TensorBoard shows the figures of a device apart.
            tags = (f"throughput/{name.replace('device_', 'device/')}" for name in figures)
            self.write_scalars(epoch, dict(zip(tags, figures.values(), strict=True)))

    def figures(self) -> dict[str, float]:
        """Returns the figures of all epochs by the names of `LOGS`, and their sums.

        The sums are `examples`, `steps` and `seconds`. If they are known, there are also the
        `flops_per_example` of the model and the `peak_tflops` of a device.
        """
        sums = {"examples": self.examples, "steps": self.steps, "seconds": self.seconds}
        for name in ("flops_per_example", "peak_tflops"):
            if getattr(self, name) is not None:
                sums[name] = getattr(self, name)
        return sums | self._figures(self.seconds, self.examples, self.times)

    @property
    def examples_per_second(self) -> float:
        """The training examples per second in the counted executions, or 0 if there is none."""
        return self.examples / self.seconds if self.seconds else 0.0

    @property
    def step_s(self) -> float:
        """The seconds of a step in the counted executions, or of the first execution otherwise."""
        return self.seconds / self.steps if self.steps else self.first_s

    def _of_epoch(self) -> tuple[float, int, int]:
        """Returns the seconds, the examples and the steps of the current epoch."""
        seconds, examples, steps = self._epoch
        return self.seconds - seconds, self.examples - examples, self.steps - steps

    def _add_to(self, logs: Any) -> None:
        """Adds the figures of the current epoch to the logs, with `in_logs`."""
        seconds, examples, _ = self._of_epoch()
        if self._in_logs and logs is not None and seconds:
            logs.update(self._figures(seconds, examples, self._epoch_times))

    def _figures(self, seconds: float, examples: int, times: StepTimes) -> dict[str, float]:
        """Returns the figures of some examples by the names of `LOGS`."""
        if not seconds:
            return {}
        per_device = examples / seconds / self._devices
        figures = {"examples_per_sec": examples / seconds, "device_examples_per_sec": per_device}
        if times:
            figures |= dict(zip(_MS, times.percentiles_ms().values(), strict=True))
        if self.flops_per_example is not None:
            tflops = per_device * self.flops_per_example / 1e12
            figures["device_tflops_per_sec"] = tflops
            if self.peak_tflops is not None:
                figures["mfu"] = tflops / self.peak_tflops
        return figures

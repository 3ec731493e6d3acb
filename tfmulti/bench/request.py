"""The JSON files between the command and the processes that it measures: requests and results."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfmulti.bench.parts import Phase, TimeParts
from tfmulti.config import json_values
from tfmulti.config.fit_config import FitConfig


@dataclass(frozen=True)
class MeasureRequest:
    """One measurement, described in the same way to all processes of a point.

    Attributes:
        run: the run to measure.
        cores: the cores of each process, by rank.
        steps: how many steps are measured. None: as many as the time holds.
        rows_alone: the rows of a step on one device without peers, which is the same work on the
            same cores or device. None: the process has no peers.
        profile: the folder for a trace, or None.
        results_dir: the folder for the files of the results, one for each rank.
    """

    run: FitConfig
    cores: tuple[tuple[int, ...], ...]
    steps: int | None
    rows_alone: int | None
    profile: str | None
    results_dir: str

    def to_json(self) -> str:
        """Returns the request as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> MeasureRequest:
        """Returns the request that `to_json` has written."""
        return json_values.build(cls, json.loads(text))

    def result_file(self, rank: int) -> Path:
        """Returns the file for the result of a process."""
        return Path(self.results_dir) / f"{rank}.json"


@dataclass(frozen=True)
class MeasureResult:
    """What one process has measured.

    Attributes:
        devices: the names of the devices of the process.
        parameters: the number of the model's parameters.
        gradient_bytes: the size of an all-reduce that moves as many bytes as a step does. Between
            workers on CPUs the bytes of a step are counted; elsewhere it is the size of the
            trainable weights.
        collectives: about how many collectives a step has; two for each of the `synchronized`
            layers are among them.
        synchronized: how many layers take batch statistics over all replicas.
        step_ms: percentiles of the time of a step.
        together: the measured steps with peers.
        alone: the measured steps without peers, or None.
        all_reduces: the bytes and seconds of all-reduces of several sizes.
        flops_per_example: the floating-point operations of training on one example, as in
            `Throughput`.
        peak_tflops: the most TFLOP/s of a device, as in `Throughput`.
        reader_threads: the number of threads that read the data.
        s_per_message: the seconds that one more message takes, if workers send to all others at
            once; otherwise None.
        row_bytes: the bytes of a step that are rows of an embedding's gradient, which go to each
            other worker. They are part of `gradient_bytes`.
    """

    devices: tuple[str, ...]
    parameters: int
    gradient_bytes: int
    collectives: int
    synchronized: int
    step_ms: dict[str, float]
    together: Phase
    alone: Phase | None
    all_reduces: tuple[tuple[int, float], ...]
    flops_per_example: int | None
    peak_tflops: float | None
    reader_threads: int | None
    s_per_message: float | None = None
    row_bytes: float = 0.0

    @property
    def parts(self) -> TimeParts:
        """The parts of the time of a step."""
        return TimeParts.of(self.together, self.alone)

    def to_json(self) -> str:
        """Returns the result as JSON."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> MeasureResult:
        """Returns the result that `to_json` has written."""
        values: dict[str, Any] = json.loads(text)
        values["devices"] = tuple(values["devices"])
        values["all_reduces"] = tuple((int(size), s) for size, s in values["all_reduces"])
        for name in ("together", "alone"):
            if values[name] is not None:
                values[name] = Phase(**values[name])
        return cls(**values)

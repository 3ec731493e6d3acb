"""What a measured process is told, and what it answers: JSON between it and the command."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfmulti.bench.parts import Phase, TimeParts
from tfmulti.config.fit_config import FitConfig


@dataclass(frozen=True)
class MeasureRequest:
    """One measurement, alike for all processes of a place.

    Args:
        run: what is trained.
        cores: of each process, by rank.
        steps: that are measured; None: as many as the time holds.
        rows_alone: of a step of one device without peers, the same work on the same cores or
            device; None: there are no peers.
        profile: the folder for a trace, or None.
        answers: the folder for `MeasureResult`s, one file a rank.
    """

    run: FitConfig
    cores: tuple[tuple[int, ...], ...]
    steps: int | None
    rows_alone: int | None
    profile: str | None
    answers: str

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> MeasureRequest:
        values = json.loads(text)
        values["run"] = FitConfig(**values["run"])
        values["cores"] = tuple(map(tuple, values["cores"]))
        return cls(**values)

    def answer_file(self, rank: int) -> Path:
        return Path(self.answers) / f"{rank}.json"


@dataclass(frozen=True)
class MeasureResult:
    """What one process measured.

    `step_ms` are percentiles; `alone` is without peers; `all_reduces` are bytes and seconds, and
    `message_s` what one message more takes at the same time, where workers send to all at once.
    `gradient_bytes` is the size of an all-reduce that takes as many bytes as a step does: counted
    between workers on CPUs, else those of the weights. They travel in about so many `collectives`
    a step, two for each of the `synchronized` layers. `row_bytes` of it are rows (of an embedding)
    that go to each other worker. `flops_per_example` and `peak_tflops` are as in `Throughput`.
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
    message_s: float | None = None
    row_bytes: float = 0.0

    @property
    def parts(self) -> TimeParts:
        return TimeParts.of(self.together, self.alone)

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> MeasureResult:
        values: dict[str, Any] = json.loads(text)
        values["devices"] = tuple(values["devices"])
        values["all_reduces"] = tuple((int(size), s) for size, s in values["all_reduces"])
        for name in ("together", "alone"):
            if values[name] is not None:
                values[name] = Phase(**values[name])
        return cls(**values)

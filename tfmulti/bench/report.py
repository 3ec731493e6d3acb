"""Makes the table and bench.json of a measurement."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Sequence
from typing import Any

from tfmulti.bench.config import BenchConfig
from tfmulti.bench.cost import CostModel, NetworkModel
from tfmulti.bench.limits import Situation, limits
from tfmulti.bench.matrix import Matrix
from tfmulti.bench.parts import PARTS
from tfmulti.bench.results import (
    Result,
    all_reduces_of,
    cost_model,
    network_of,
    prediction,
    results_of,
)
from tfmulti.config.console import number


@dataclasses.dataclass(frozen=True)
class Report:
    """The results of all measurements of a matrix.

    Attributes:
        config: what was measured.
        results: the figures of each point.
        model: the cost model, or None without workers that were measured together.
        predicted: the figures that the cost model predicts. Empty without a cost model.
        all_reduces: the replicas, bytes and seconds of all-reduces, for each kind of point.
        limits: lines that say what limits the points.
        cores: the number of cores that were used.
        gpus: the number of GPUs. 0: CPUs were measured.
        load: the load average of this machine before the measurement.
    """

    config: BenchConfig
    results: list[Result]
    model: CostModel | None
    predicted: list[dict[str, float]]
    all_reduces: dict[str, list[tuple[int, int, float]]]
    limits: list[str]
    cores: int
    gpus: int
    load: float

    @classmethod
    def of(cls, matrix: Matrix, load: float) -> Report:
        """Returns the report of a matrix; `load` is the load average before the measurement."""
        config, cores = matrix.config, len(matrix.cores)
        results = results_of(config, matrix.measurements)
        model = cost_model(config, results, matrix.measurements, len(matrix.gpus) or cores)
        return cls(
            config,
            results,
            model,
            prediction(config, model, results) if model else [],
            {kind: all_reduces_of(matrix.measurements, kind) for kind in ("replicas", "workers")},
            [*_limits(matrix, results), *busy_warnings(load, cores)],
            cores,
            len(matrix.gpus),
            load,
        )

    def table(self) -> list[str]:
        """Returns the lines of the table, which has one row for each point."""
        names = ["point", "batch", "ms/step", "p90", "examples/s", "efficiency", *PARTS]
        rows = [names, *(self._row(result) for result in self.results)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(names))]
        lines = [
            "  ".join(
                cell.ljust(width) if i == 0 else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        ]
        return [lines[0], "-" * len(lines[0]), *lines[1:]]

    def _row(self, result: Result) -> list[str]:
        """Returns the cells of a point's row."""
        return [
            result.point.name,
            str(result.global_batch),
            number(result.step_ms),
            number(result.percentiles_ms["p90"]),
            number(result.examples_per_sec),
            f"{100 * result.efficiency:.0f} %",
            *(number(round(getattr(result.parts, name), 3)) for name in PARTS),
        ]

    def model_lines(self) -> list[str]:
        """Returns lines that describe the cost model and its prediction."""
        if self.model is None:
            return ["no prediction: it takes --workers 2 or more to measure an all-reduce"]
        model, last = self.model, self.predicted[-1]
        s_per_byte = model.network.s_per_byte
        speed = f"{1e-6 / s_per_byte:,.0f} MB/s" if s_per_byte else "no limit seen"
        return [
            f"all-reduce: {_latency_text(model.network)}, {speed}; a step "
            f"has {model.collectives} all-reduces with {model.gradient_bytes / 1e6:.3g} MB in total"
            f"{_row_text(model.example_bytes)}, and "
            f"{model.exposed:.0%} of their time is not hidden by computing; waiting: "
            f"{model.waiting_ms:.3g} ms",
            f"predicted (not measured): {last['workers']:.0f} workers like these, each with cores "
            f"or a device of its own: {number(last['examples_per_sec'])} examples/s, efficiency "
            f"{last['efficiency']:.0%}",
        ]

    def as_dict(self) -> dict[str, Any]:
        """Returns the content of bench.json."""
        config, model = self.config, self.model
        return {
            "machine": {
                "cpus": os.cpu_count(),
                "cores_used": self.cores,
                "gpus": self.gpus,
                "load_before": self.load,
                "devices": list(self.results[0].processes[0].devices),
                "system": platform.platform(),
            },
            "versions": {
                name: importlib.metadata.version(name) for name in ("tensorflow", "keras")
            },
            "run": dataclasses.asdict(config.run),
            "scaling": "weak" if config.weak else "strong",
            "rounds": config.rounds,
            "parameters": self.results[0].processes[0].parameters,
            "gradient_bytes": self.results[-1].processes[0].gradient_bytes,
            "flops_per_example": self.results[0].processes[0].flops_per_example,
            "places": [result.as_dict() for result in self.results],
            "all_reduces": {
                kind: [
                    {"replicas": n, "bytes": size, "ms": 1000 * seconds}
                    for n, size, seconds in points
                ]
                for kind, points in self.all_reduces.items()
            },
            "cost_model": model and model.as_dict(),
            "predicted_not_measured": self.predicted,
            "limits": self.limits,
        }


def _row_text(example_bytes: float) -> str:
    """Returns the text about the rows of embeddings that workers send, or an empty text."""
    return f" and {example_bytes:,.0f} bytes of rows an example" if example_bytes else ""


def _latency_text(network: NetworkModel) -> str:
    """Returns the text about the latency, of a ring or of rounds of messages."""
    if network.s_per_message is None:
        return f"latency {1e6 * network.latency_s:,.0f} µs a message"
    latency_us, message_us = 1e6 * network.latency_s, 1e6 * network.s_per_message
    return f"latency {latency_us:,.0f} µs a round, {message_us:,.0f} µs a message"


def busy_warnings(load: float, cores: int) -> list[str]:
    """Returns a warning if other programs use this machine, else nothing.

    `load` is the load average before the measurement.
    """
    if load <= cores / 4:
        return []
    return [
        f"other programs use this machine (load {load:.1f} on {cores} core{'s' * (cores > 1)}) and "
        "slow what is measured: measure again when it is idle"
    ]


def _limits(matrix: Matrix, results: Sequence[Result]) -> list[str]:
    """Returns what limits the largest point of each kind.

    One replica is included only if no other point was measured.
    """
    config, cores, on_cpus = matrix.config, len(matrix.cores), not matrix.gpus
    largest = {result.point.kind: result for result in results}
    if len(largest) > 1:
        largest.pop("one", None)
    one_replica = next((result for result in results if result.point.kind == "one"), None)
    lines = []
    for kind, result in largest.items():
        point, alone, process = result.point, None, result.processes[0]
        has_own_devices = kind == "workers" or not on_cpus
        if one_replica and kind != "one" and has_own_devices and point.devices <= cores:
            part = 1.0 if config.weak else config.slice_rows(point) / config.batch
            alone = one_replica.parts.compute * part
        situation = Situation(
            name=point.name,
            kind=kind,
            devices=point.devices,
            parts=result.parts,
            run=config.run,
            weak=config.weak,
            gradient_bytes=process.gradient_bytes,
            collectives=process.collectives,
            synchronized=process.synchronized,
            network=network_of(matrix.measurements, kind),
            computing_alone=alone,
            reader_threads=process.reader_threads,
            cores=cores,
            shares_cores=on_cpus and point.devices > cores,
            gpus=not on_cpus,
        )
        lines += limits(situation)
    return lines

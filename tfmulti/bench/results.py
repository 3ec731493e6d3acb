"""Computes the figures of each point from the measurements, the cost model and the prediction."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tfmulti.bench.config import BenchConfig, MatrixPoint
from tfmulti.bench.cost import CostModel, NetworkModel, fit_computing, fit_exposed, fit_network
from tfmulti.bench.parts import TimeParts
from tfmulti.bench.request import MeasureResult

Measurements = Mapping[MatrixPoint, Sequence[Sequence[MeasureResult]]]

PREDICTED = (1, 2, 4, 8, 16, 32, 64)  # workers


@dataclass(frozen=True)
class Result:
    """The figures of a point, from the round whose step time is the median of all rounds.

    Attributes:
        point: the measured point.
        global_batch: the rows of the global batch.
        parts: the parts of the time of a step, as means over the processes. They add up to
            `step_ms`.
        percentiles_ms: percentiles of the time of a step on the chief.
        rounds_ms: the mean time of a step in each round.
        examples_per_sec: the examples of all replicas in a second.
        efficiency: the examples per second and replica, divided by those of the smallest point.
        processes: the results of the processes, by rank.
    """

    point: MatrixPoint
    global_batch: int
    parts: TimeParts
    percentiles_ms: Mapping[str, float]
    rounds_ms: tuple[float, ...]
    examples_per_sec: float
    efficiency: float
    processes: tuple[MeasureResult, ...]

    @property
    def step_ms(self) -> float:
        """The milliseconds of a step."""
        return self.parts.step_ms

    @property
    def device_tflops(self) -> float | None:
        """The TFLOP/s of the model on each device, or None if its operations are not known."""
        flops = self.processes[0].flops_per_example
        if flops is None:
            return None
        return self.examples_per_sec / self.point.devices * flops / 1e12

    def as_dict(self) -> dict[str, Any]:
        """Returns the figures as they stand in bench.json."""
        first, point = self.processes[0], self.point
        figures: dict[str, Any] = {
            "place": point.name,
            "workers": point.workers,
            "replicas": point.replicas,
            "global_batch_size": self.global_batch,
            "examples_per_sec": self.examples_per_sec,
            "efficiency": self.efficiency,
            "step_ms": self.step_ms,
            "parts_ms": self.parts.as_dict(),
            "percentiles_ms": dict(self.percentiles_ms),
            "rounds_step_ms": list(self.rounds_ms),
            "measured_steps": first.together.steps,
            "all_reduce_ms": {str(size): 1000 * seconds for size, seconds in first.all_reduces},
        }
        if self.device_tflops is not None:
            figures["device_tflops_per_sec"] = self.device_tflops
            if first.peak_tflops is not None:
                figures["mfu"] = self.device_tflops / first.peak_tflops
        return figures


def results_of(config: BenchConfig, measurements: Measurements) -> list[Result]:
    """Returns the figures of each point, in the order of the points."""
    middle, rounds_ms = {}, {}
    for point, rounds in measurements.items():
        steps = [_parts_of(processes).step_ms for processes in rounds]
        middle[point] = rounds[steps.index(statistics.median_low(steps))]
        rounds_ms[point] = tuple(steps)
    speeds = {point: examples_per_sec(processes) for point, processes in middle.items()}
    base = min(measurements, key=lambda point: point.devices)
    return [
        Result(
            point,
            config.global_batch_of(point),
            _parts_of(middle[point]),
            middle[point][0].step_ms,
            rounds_ms[point],
            speeds[point],
            speeds[point] / point.devices / (speeds[base] / base.devices),
            tuple(middle[point]),
        )
        for point in config.points
    ]


def _parts_of(processes: Sequence[MeasureResult]) -> TimeParts:
    """Returns the mean parts of the time of a step over the processes of a point."""
    return TimeParts.mean([process.parts for process in processes])


def examples_per_sec(processes: Sequence[MeasureResult]) -> float:
    """Returns the examples of all replicas per second, by the mean step of the processes."""
    step = processes[0].together
    return 1000 * step.examples / step.steps / _parts_of(processes).step_ms


def all_reduces_of(measurements: Measurements, kind: str) -> list[tuple[int, int, float]]:
    """Returns the replicas, bytes and seconds of the all-reduces at the points of a kind.

    The seconds are the median over all rounds and processes of a point.
    """
    times: dict[tuple[int, int], list[float]] = {}
    for point, rounds in measurements.items():
        if point.kind == kind:
            for process in itertools.chain(*rounds):
                for size, seconds in process.all_reduces:
                    times.setdefault((point.devices, size), []).append(seconds)
    return [(n, size, statistics.median(seconds)) for (n, size), seconds in sorted(times.items())]


def network_of(measurements: Measurements, kind: str) -> NetworkModel | None:
    """Returns the network model of a kind of points, or None if no all-reduce was measured."""
    messages = [
        process.s_per_message
        for point, rounds in measurements.items()
        if point.kind == kind
        for process in itertools.chain(*rounds)
        if process.s_per_message is not None
    ]
    s_per_message = statistics.median(messages) if messages else None
    return fit_network(all_reduces_of(measurements, kind), s_per_message)


def cost_model(
    config: BenchConfig, results: Sequence[Result], measurements: Measurements, most: int
) -> CostModel | None:
    """Returns the cost model of workers that each have cores or a device of their own.

    Args:
        config: what was measured.
        results: the figures of each point.
        measurements: the measurements of each point.
        most: how many workers can have cores or a device of their own. Points with more workers are
            used only if no point with 2 to `most` workers was measured.

    Returns:
        The model, or None if no point with several workers was measured.
    """
    workers = [result for result in results if result.point.kind != "replicas"]
    used = [result for result in workers if result.point.devices <= most]
    if all(result.point.devices == 1 for result in used):
        used = workers
    measured = {result.point: measurements[result.point] for result in used}
    network = network_of(measured, "workers")
    if network is None:
        return None
    largest, process = used[-1].point, used[-1].processes[0]
    model = CostModel(
        network,
        fit_computing([(config.slice_rows(r.point), r.parts.compute) for r in used]),
        exposed=1.0,
        gradient_bytes=round(process.gradient_bytes - process.row_bytes * largest.devices / 2),
        collectives=process.collectives,
        other_ms=statistics.mean(r.parts.input + r.parts.host for r in used),
        example_bytes=process.row_bytes / config.slice_rows(largest),
    )
    several = [r for r in used if r.point.devices > 1]
    exposed, waiting_ms = fit_exposed(
        [
            (model.messages_ms(r.point.devices, config.slice_rows(r.point)), r.parts.communication)
            for r in several
        ]
    )
    return replace(model, exposed=exposed, waiting_ms=waiting_ms)


def prediction(
    config: BenchConfig, model: CostModel, results: Sequence[Result]
) -> list[dict[str, float]]:
    """Returns the predicted figures for up to 64 workers, and for the measured numbers of workers.

    Numbers of workers above the rows of the global batch are left out. The efficiency is relative
    to the smallest measured point.
    """
    figures = []
    base = min(results, key=lambda result: result.point.devices)
    first = base.examples_per_sec / base.point.devices
    for workers in sorted({*PREDICTED, *config.workers}):
        point = MatrixPoint(workers, 1)
        batch = config.global_batch_of(point)
        if batch < workers:
            break
        step_ms = model.step_ms(workers, batch / workers)
        speed = 1000 * batch / step_ms
        figures.append(
            {
                "workers": workers,
                "step_ms": step_ms,
                "communication_ms": model.communication_ms(workers, batch / workers),
                "examples_per_sec": speed,
                "efficiency": speed / workers / first,
            }
        )
    return figures

"""Computes the figures of each place from the measurements, the cost model and the prediction."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tfmulti.bench.config import BenchConfig, MatrixPoint
from tfmulti.bench.cost import CostModel, NetworkModel, fit_computing, fit_exposed, fit_network
from tfmulti.bench.parts import TimeParts
from tfmulti.bench.request import MeasureResult

Found = Mapping[MatrixPoint, Sequence[Sequence[MeasureResult]]]

PREDICTED = (1, 2, 4, 8, 16, 32, 64)  # workers


@dataclass(frozen=True)
class Result:
    """The figures of a place, from the round whose step time is the median of all rounds.

    Attributes:
        place: the place.
        global_batch: the rows of the global batch.
        parts: the parts of the time of a step, as means over the processes. They add up to
            `step_ms`.
        percentiles_ms: percentiles of the time of a step on the chief.
        rounds_ms: the mean time of a step in each round.
        examples_per_sec: the examples of all replicas in a second.
        efficiency: the examples per second and replica, divided by those of the smallest place.
        answers: the results of the processes, by rank.
    """

    place: MatrixPoint
    global_batch: int
    parts: TimeParts
    percentiles_ms: Mapping[str, float]
    rounds_ms: tuple[float, ...]
    examples_per_sec: float
    efficiency: float
    answers: tuple[MeasureResult, ...]

    @property
    def step_ms(self) -> float:
        """The milliseconds of a step."""
        return self.parts.step_ms

    @property
    def device_tflops(self) -> float | None:
        """The TFLOP/s of the model on each device, or None if its operations are not known."""
        flops = self.answers[0].flops_per_example
        if flops is None:
            return None
        return self.examples_per_sec / self.place.devices * flops / 1e12

    def as_dict(self) -> dict[str, Any]:
        """Returns the figures as they stand in bench.json."""
        first, place = self.answers[0], self.place
        found: dict[str, Any] = {
            "place": place.name,
            "workers": place.workers,
            "replicas": place.replicas,
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
            found["device_tflops_per_sec"] = self.device_tflops
            if first.peak_tflops is not None:
                found["mfu"] = self.device_tflops / first.peak_tflops
        return found


def results_of(config: BenchConfig, found: Found) -> list[Result]:
    """Returns the figures of each place, in the order of the places."""
    middle, rounds_ms = {}, {}
    for place, rounds in found.items():
        steps = [TimeParts.mean([answer.parts for answer in answers]).step_ms for answers in rounds]
        middle[place] = rounds[steps.index(statistics.median_low(steps))]
        rounds_ms[place] = tuple(steps)
    speeds = {place: examples_per_sec(answers) for place, answers in middle.items()}
    base = min(found, key=lambda place: place.devices)
    return [
        Result(
            place,
            config.global_batch_of(place),
            TimeParts.mean([answer.parts for answer in middle[place]]),
            middle[place][0].step_ms,
            rounds_ms[place],
            speeds[place],
            speeds[place] / place.devices / (speeds[base] / base.devices),
            tuple(middle[place]),
        )
        for place in config.places
    ]


def examples_per_sec(answers: Sequence[MeasureResult]) -> float:
    """Returns the examples of all replicas per second, by the mean step of the processes."""
    step = answers[0].together
    return 1000 * step.examples / step.steps / TimeParts.mean([a.parts for a in answers]).step_ms


def all_reduces_of(found: Found, kind: str) -> list[tuple[int, int, float]]:
    """Returns the replicas, bytes and seconds of the all-reduces at the places of a kind.

    The seconds are the median over all rounds and processes of a place.
    """
    times: dict[tuple[int, int], list[float]] = {}
    for place, rounds in found.items():
        if place.kind == kind:
            for answer in (answer for answers in rounds for answer in answers):
                for size, seconds in answer.all_reduces:
                    times.setdefault((place.devices, size), []).append(seconds)
    return [(n, size, statistics.median(each)) for (n, size), each in sorted(times.items())]


def link_of(found: Found, kind: str) -> NetworkModel | None:
    """Returns the network model of a kind of places, or None if no all-reduce was measured."""
    messages = [
        answer.message_s
        for place, rounds in found.items()
        if place.kind == kind
        for answers in rounds
        for answer in answers
        if answer.message_s is not None
    ]
    message_s = statistics.median(messages) if messages else None
    return fit_network(all_reduces_of(found, kind), message_s)


def cost_model(
    config: BenchConfig, results: Sequence[Result], found: Found, most: int
) -> CostModel | None:
    """Returns the cost model of workers that each have cores or a device of their own.

    Args:
        config: what was measured.
        results: the figures of each place.
        found: the measurements of each place.
        most: how many workers can have cores or a device of their own. Places with more workers are
            used only if no place with 2 to `most` workers was measured.

    Returns:
        The model, or None if no place with several workers was measured.
    """
    workers = [result for result in results if result.place.kind != "replicas"]
    own = [result for result in workers if result.place.devices <= most]
    if all(result.place.devices == 1 for result in own):
        own = workers
    places = {result.place for result in own}
    link = link_of({place: found[place] for place in found if place in places}, "workers")
    if link is None:
        return None
    most_of, answer = own[-1].place, own[-1].answers[0]
    model = CostModel(
        link,
        fit_computing([(config.share_of(r.place), r.parts.compute) for r in own]),
        exposed=1.0,
        gradient_bytes=round(answer.gradient_bytes - answer.row_bytes * most_of.devices / 2),
        collectives=answer.collectives,
        other_ms=statistics.mean(r.parts.input + r.parts.host for r in own),
        example_bytes=answer.row_bytes / config.share_of(most_of),
    )
    several = [r for r in own if r.place.devices > 1]
    exposed, waiting_ms = fit_exposed(
        [
            (model.told_ms(r.place.devices, config.share_of(r.place)), r.parts.communication)
            for r in several
        ]
    )
    return replace(model, exposed=exposed, waiting_ms=waiting_ms)


def prediction(
    config: BenchConfig, model: CostModel, results: Sequence[Result]
) -> list[dict[str, float]]:
    """Returns the predicted figures for up to 64 workers, and for the measured numbers of workers.

    Numbers of workers above the rows of the global batch are left out. The efficiency is relative
    to the smallest measured place.

    Args:
        config: what was measured.
        model: the cost model.
        results: the figures of each place.
    """
    found = []
    base = min(results, key=lambda result: result.place.devices)
    first = base.examples_per_sec / base.place.devices
    for workers in sorted({*PREDICTED, *config.workers}):
        place = MatrixPoint(workers, 1)
        batch = config.global_batch_of(place)
        if batch < workers:
            break
        step_ms = model.step_ms(workers, batch / workers)
        speed = 1000 * batch / step_ms
        found.append(
            {
                "workers": workers,
                "step_ms": step_ms,
                "communication_ms": model.communication_ms(workers, batch / workers),
                "examples_per_sec": speed,
                "efficiency": speed / workers / first,
            }
        )
    return found

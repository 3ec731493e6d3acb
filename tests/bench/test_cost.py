"""Tests the arithmetic of the measurement: parts, cost model, predictions, limits."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.benches import SIZES, TRUTH, bench, measured
from tfmulti.bench.config import MatrixPoint
from tfmulti.bench.cost import CostModel, NetworkModel, fit_computing, fit_exposed, fit_network
from tfmulti.bench.limits import Situation, limits
from tfmulti.bench.parts import PARTS, Phase, TimeParts
from tfmulti.bench.results import cost_model, prediction, results_of
from tfmulti.config.fit_config import FitConfig


@pytest.mark.parametrize("latency_s", [20e-6, 800e-6])
@pytest.mark.parametrize("bandwidth", [50e6, 12e9])
def test_latency_and_bandwidth_are_fitted_to_noisy_points(
    latency_s: float, bandwidth: float
) -> None:
    rng, truth = random.Random(1), NetworkModel(latency_s, 1 / bandwidth)
    points = [
        (n, size, truth.all_reduce_s(n, size) * rng.uniform(0.95, 1.05))
        for n in (2, 4)
        for size in SIZES
    ]
    fitted = fit_network(points)
    assert fitted is not None
    assert fitted.latency_s == pytest.approx(latency_s, rel=0.05)
    # The tolerance is larger, because the time of the bytes is short compared with the latency.
    assert 1 / fitted.s_per_byte == pytest.approx(bandwidth, rel=0.15)


def test_a_ring_takes_the_time_of_the_papers() -> None:
    network = NetworkModel(latency_s=0.5, s_per_byte=0.01)
    assert network.parts_s(4, 100) == (2 * 3 * 0.5, 2 * 3 / 4 * 100 * 0.01)
    assert network.parts_s(4, 100, collectives=5) == (5 * 2 * 3 * 0.5, 2 * 3 / 4 * 100 * 0.01)
    assert network.all_reduce_s(1, 100) == 0
    assert NetworkModel(0, 1.0).all_reduce_s(1000, 1) == pytest.approx(2, rel=0.01)


def test_workers_that_send_to_all_at_once_take_one_or_two_rounds() -> None:
    network = NetworkModel(latency_s=0.5, s_per_byte=0.01, s_per_message=0.001)
    assert network.parts_s(2, 100, collectives=5) == pytest.approx((5 * 0.501, 100 * 0.01))
    # Each worker sends a short message to all others.
    assert network.parts_s(4, 100, collectives=5)[0] == pytest.approx(5 * 0.503)
    # Three packs of 1.2 MB are sent in pieces, whose sums are sent back.
    seconds = (5 + 3) * 0.503, 2 * 3 / 4 * 1_200_000 * 0.01
    assert network.parts_s(4, 1_200_000, collectives=5) == pytest.approx(seconds)
    assert network.all_reduce_s(1, 100) == 0
    points = [(n, size, network.all_reduce_s(n, size)) for n in (2, 4) for size in SIZES]
    fitted = fit_network(points, 0.001)
    assert fitted is not None
    assert (fitted.latency_s, fitted.s_per_byte) == pytest.approx((0.5, 0.01), rel=1e-3)


def test_embedding_rows_are_sent_to_each_other_worker() -> None:
    """A worker sends 16 examples of 1 KB to three workers at 1 GB/s, in addition to the sums."""
    rows = dataclasses.replace(WITH_ROWS, example_bytes=1_000)
    assert rows.messages_ms(4, 16) - DIRECT.messages_ms(4, 16) == pytest.approx(
        3 * 16 * 1_000 / 1e9 * 1e3
    )
    assert rows.communication_ms(1, 16) == 0


def test_fitted_values_are_not_negative() -> None:
    falling = fit_network([(2, 1000, 0.02), (2, 10_000_000, 0.01)])
    assert falling is not None
    assert falling.latency_s > 0
    assert falling.s_per_byte == 0
    steep = fit_network([(2, 1000, 1e-9), (2, 1_000_000, 1.0)])
    assert steep is not None
    assert steep.latency_s >= 0
    assert steep.s_per_byte > 0
    assert fit_network([]) is None
    assert fit_network([(1, 100, 1.0)]) is None


def test_the_time_of_computing_is_fitted() -> None:
    fitted = fit_computing([(rows, 3.0 + 0.25 * rows) for rows in (8, 32, 64)])
    assert (fitted.fixed_ms, fitted.row_ms) == pytest.approx((3.0, 0.25))
    assert fitted.ms(16) == pytest.approx(7.0)
    same = fit_computing([(32, 10.0), (32, 14.0)])
    assert same.ms(32) == pytest.approx(12.0)


def test_time_beyond_the_model_is_waiting_and_does_not_grow() -> None:
    assert fit_exposed([(2.0, 1.0), (6.0, 3.0)]) == pytest.approx((0.5, 0))
    assert fit_exposed([(0.0, 5.0)]) == (0, 0)
    assert fit_exposed([]) == (0, 0)
    assert fit_exposed([(2.0, 5.0), (6.0, 9.0)]) == pytest.approx((1, 3))


PHASES = st.builds(
    lambda steps, executing, host, waited: Phase(
        steps, 8 * steps, executing + host, executing, waited
    ),
    st.integers(1, 500),
    *(st.floats(1e-6, 100) for _ in range(3)),
)


@given(PHASES, st.none() | PHASES)
def test_the_parts_add_up_to_the_step(together: Phase, alone: Phase | None) -> None:
    parts = TimeParts.of(together, alone)
    assert parts.step_ms == pytest.approx(1000 * together.seconds / together.steps)
    assert all(getattr(parts, name) >= -1e-9 for name in PARTS)
    twice = TimeParts.mean([parts, TimeParts.of(together, None)])
    assert twice.step_ms == pytest.approx(parts.step_ms)


def test_each_part_has_its_time() -> None:
    together = Phase(steps=10, examples=80, seconds=1.0, executing_s=0.9, waited_s=0.2)
    alone = Phase(steps=5, examples=20, seconds=0.9, executing_s=0.25, waited_s=0.05)
    parts = TimeParts.of(together, alone)
    assert parts.as_dict() == pytest.approx(
        {"host": 10, "input": 20, "compute": 40, "communication": 30}
    )
    assert TimeParts.of(together, None).communication == 0
    assert TimeParts.of(together + together, alone + alone).as_dict() == pytest.approx(
        parts.as_dict()
    )
    assert (together + alone).examples == 100
    slower = Phase(steps=1, examples=4, seconds=9.0, executing_s=9.0, waited_s=0.0)
    assert TimeParts.of(together, slower).communication == 0


DIRECT = dataclasses.replace(TRUTH, network=NetworkModel(100e-6, 1 / 1e9, s_per_message=10e-6))
# The rows are those of an embedding.
WITH_ROWS = dataclasses.replace(DIRECT, example_bytes=8_000)


@pytest.mark.parametrize("truth", [TRUTH, DIRECT, WITH_ROWS], ids=["ring", "direct", "rows"])
@pytest.mark.parametrize("weak", [False, True])
def test_a_prediction_follows_from_the_measured_costs(weak: bool, truth: CostModel) -> None:
    config = bench(workers=(1, 2, 4), weak=weak)
    measurements = {point: [measured(config, point, truth=truth)] for point in config.points}
    results = results_of(config, measurements)
    model = cost_model(config, results, measurements, most=4)
    assert model is not None
    assert (model.exposed, model.waiting_ms) == pytest.approx((1, 0.75))
    assert model.network.latency_s == pytest.approx(100e-6)
    assert 1 / model.network.s_per_byte == pytest.approx(1e9)
    assert model.network.s_per_message == truth.network.s_per_message
    predicted = prediction(config, model, results)
    assert [p["workers"] for p in predicted] == [1, 2, 4, 8, 16, 32, 64]
    for point in predicted:
        workers = int(point["workers"])
        share = 64 if weak else 64 / workers
        assert point["step_ms"] == pytest.approx(truth.step_ms(workers, share))
        assert point["examples_per_sec"] == pytest.approx(
            1000 * share * workers / truth.step_ms(workers, share)
        )
    for result in results:
        (point,) = (p for p in predicted if p["workers"] == result.point.devices)
        assert result.examples_per_sec == pytest.approx(point["examples_per_sec"])
        assert result.efficiency == pytest.approx(point["efficiency"])
    tflops = results[1].examples_per_sec / 2 * 6e-6
    assert results[1].as_dict()["device_tflops_per_sec"] == pytest.approx(tflops)
    assert "mfu" not in results[1].as_dict()


def test_measurements_on_shared_cores_are_not_used_for_the_prediction() -> None:
    config = bench(workers=(1, 2, 4), weak=True)
    slow = {4: 3.0}
    measurements = {p: [measured(config, p, slow.get(p.devices, 1.0))] for p in config.points}
    results = results_of(config, measurements)
    model = cost_model(config, results, measurements, most=2)
    assert model is not None
    assert model.computing.ms(64) == pytest.approx(TRUTH.computing.ms(64))
    # All places share cores, so their measurements are used nevertheless.
    every = cost_model(config, results, measurements, most=1)
    assert every is not None
    assert every.computing.ms(64) > 1.5 * TRUTH.computing.ms(64)


def test_no_more_workers_than_rows_are_predicted() -> None:
    config = bench(workers=(1, 2), run={"global_batch_size": 12})
    results = results_of(config, {point: [measured(config, point)] for point in config.points})
    assert [p["workers"] for p in prediction(config, TRUTH, results)] == [1, 2, 4, 8]


def test_the_median_round_is_reported_as_a_whole() -> None:
    config = bench(rounds=3)
    measurements = {
        MatrixPoint(1, 1): [measured(config, MatrixPoint(1, 1), f) for f in (3.0, 1.0, 2.0)]
    }
    (result,) = results_of(config, measurements)
    assert result.parts.compute == pytest.approx(2 * TRUTH.computing.ms(64))
    assert sorted(result.rounds_ms)[1] == result.step_ms
    assert cost_model(config, [result], measurements, most=4) is None


def situation(**parts: float) -> Situation:
    shares = {"compute": 0.0, "communication": 0.0, "input": 0.0, "host": 0.0} | parts
    return Situation(
        name="2 workers",
        kind="workers",
        devices=2,
        parts=TimeParts(**shares),
        run=FitConfig(),
        weak=False,
        gradient_bytes=4_000_000,
        collectives=9,
        network=NetworkModel(1e-6, 10e-9),
        cores=4,
        reader_threads=2,
    )


def changed(base: Situation, **changes: Any) -> list[str]:
    return limits(dataclasses.replace(base, **changes))


def test_each_limit_has_its_advice() -> None:
    (line,) = limits(situation(compute=95, communication=5))
    assert line.startswith("2 workers: compute-bound: 95 % of the step is computing")
    (line,) = limits(situation(compute=50, input=50))
    assert "input-bound: 50 % of the step is waiting for data; try --reader_threads 4" in line
    (line,) = limits(situation(compute=80, host=20))
    assert "host-bound: 20 % of the step" in line
    assert "try --steps_per_execution 8, which a run without that flag finds by itself" in line
    (line,) = changed(situation(compute=80, host=20), gpus=True)
    # On GPUs no run chooses the number of steps automatically.
    assert line.endswith("try --steps_per_execution 8")
    (line,) = changed(situation(host=1), run=FitConfig(steps_per_execution=8))
    assert line.endswith("try --steps_per_execution 32")
    both = limits(situation(compute=10, host=30, input=60))
    assert ["input-bound" in both[0], "host-bound" in both[1]] == [True, True]


def test_the_advice_names_bytes_messages_or_waiting() -> None:
    base = situation(compute=50, communication=50)
    (line,) = limits(base)
    assert "communication-bound: 50 % of the step" in line
    assert "mostly the 4 MB of gradients; try --gradient_compression bfloat16" in line
    assert "a larger --global_batch_size" in line
    (line,) = changed(base, weak=True)
    assert "a larger --per_replica_batch_size" in line
    (line,) = changed(base, network=NetworkModel(2e-3, 1e-9))
    assert "mostly the latency of 9 collectives; try a larger" in line
    assert "--gradient_compression" not in line
    (line,) = changed(base, run=FitConfig(gradient_compression="float16"))
    assert "--gradient_compression" not in line
    (line,) = changed(base, network=NetworkModel(2e-3, 1e-9), synchronized=4)
    assert "mostly the latency of 9 collectives; try --nosync_batch_norm (8 collectives" in line
    (line,) = changed(base, network=NetworkModel(1e-4, 1e-9), synchronized=4)
    assert "mostly waiting for the slowest replica in 9 collectives, which alone would take" in line
    assert "take 5.8 ms; look for other programs there; try --nosync_batch_norm" in line
    (line,) = changed(base, kind="replicas")
    assert "mostly the 4 MB" in line
    # The flag has no effect in one process.
    assert "--gradient_compression" not in line


def test_slow_computing_and_shared_cores_are_reported() -> None:
    base = situation(compute=100)
    (line,) = changed(base, computing_alone=50.0)
    assert "computing takes 2.00 × its part" in line
    assert "try a larger --global_batch_size, or --weak" in line
    (line,) = changed(base, computing_alone=50.0, weak=True)
    assert "the processes slow each other down" in line
    (line,) = changed(base, computing_alone=95.0)
    assert "compute-bound" in line
    (line,) = changed(base, shares_cores=True)
    assert "they share 4 cores, so this efficiency shows the limit" in line

"""Invented measurements of `tfmulti.bench`, computed from costs that the tests know."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tfmulti.bench.config import BenchConfig, MatrixPoint
from tfmulti.bench.cost import CostModel, NetworkModel, fit_computing
from tfmulti.bench.parts import Phase
from tfmulti.bench.request import MeasureRequest, MeasureResult
from tfmulti.config.fit_config import FitConfig
from tfmulti.launch.config import LaunchConfig

SIZES = (4_096, 65_536, 524_288, 2_097_152, 8_388_608)


def bench(**changes: Any) -> BenchConfig:
    run = FitConfig(
        **{
            "model": "mlp",
            "dataset": "synthetic",
            "global_batch_size": 64,
            **changes.pop("run", {}),
        }
    )
    return BenchConfig(run=run.resolved(), **changes)


TRUTH = CostModel(
    network=NetworkModel(100e-6, 1 / 1e9),
    computing=fit_computing([(1, 1.25), (100, 26.0)]),
    exposed=1.0,
    gradient_bytes=4_000_000,
    collectives=3,
    other_ms=0.5,
    waiting_ms=0.75,
)


def measured(
    config: BenchConfig, point: MatrixPoint, factor: float = 1.0, truth: CostModel = TRUTH
) -> list[MeasureResult]:
    """Returns what the processes of a place would measure if `truth` were the costs."""
    rows, steps = config.slice_rows(point), 10
    computing_ms = truth.computing.ms(rows) * factor
    own_ms = computing_ms + truth.communication_ms(point.workers, rows)
    row_bytes = truth.example_bytes * rows if point.workers > 1 else 0.0
    examples = steps * config.global_batch_of(point)
    executing_s = steps * (own_ms + 0.2) / 1000
    together = Phase(steps, examples, executing_s + steps * 0.3e-3, executing_s, steps * 0.2e-3)
    alone = Phase(steps, steps * rows, 1.0, steps * computing_ms / 1000, 0.0)
    peers = point.devices > 1
    times = [(size, truth.network.all_reduce_s(point.workers, size)) for size in SIZES]
    return [
        MeasureResult(
            devices=("CPU:0",),
            parameters=1_000_000,
            gradient_bytes=round(truth.gradient_bytes + row_bytes * point.workers / 2),
            collectives=3 if peers else 0,
            synchronized=0,
            step_ms={"p50": own_ms, "p90": own_ms, "p99": own_ms},
            together=together,
            alone=alone if peers else None,
            all_reduces=tuple(times) if point.workers > 1 else (),
            flops_per_example=6_000_000,
            peak_tflops=None,
            reader_threads=0,
            s_per_message=truth.network.s_per_message if point.workers > 1 else None,
            row_bytes=row_bytes,
        )
        for _ in range(point.workers)
    ]


class Launched:
    """Replaces the launcher: leaves invented answers, and notes the requests."""

    def __init__(self, config: BenchConfig, code: int = 0) -> None:
        self._config, self._code = config, code
        self.requests: list[MeasureRequest] = []
        self.envs: list[Mapping[str, str]] = []
        self.workers: list[str] = []

    def __call__(self, launch: LaunchConfig, env: Mapping[str, str]) -> int:
        request = MeasureRequest.from_json(Path(launch.program[1]).read_text())
        self.requests.append(request)
        self.envs.append(env)
        self.workers.append(launch.per_node)
        point = MatrixPoint(int(launch.per_node), request.run.replicas or 1)
        for rank, result in enumerate(measured(self._config, point)):
            request.result_file(rank).write_text(result.to_json())
        return self._code

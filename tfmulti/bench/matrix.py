"""Measures every point of the matrix in each round, in new processes each time."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tfmulti.bench.config import BenchConfig, MatrixPoint, cores_of
from tfmulti.bench.request import MeasureRequest, MeasureResult
from tfmulti.config.console import Say, number
from tfmulti.config.run_directory import write_text
from tfmulti.errors import TfmultiError
from tfmulti.launch import supervisor
from tfmulti.launch.config import LaunchConfig
from tfmulti.launch.guard import STOPPING

# The exit codes of a launcher that was stopped.
_STOPPED = {128 + number for number in STOPPING}
# The first step may take long, because it is traced.
_STALL_S = 120.0
# A measurement has nothing to save when it is stopped.
_GRACE_S = 2.0


Launch = Callable[[LaunchConfig, Mapping[str, str]], int]


class MeasurementError(TfmultiError):
    """Raised if a measured process fails, or if the results cannot be written.

    Args:
        words: the message.
        exit_code: the exit code of the command.
    """

    def __init__(self, words: str, exit_code: int) -> None:
        super().__init__(words)
        self.exit_code = exit_code


class MeasurementStopped(MeasurementError):
    """Raised if the command was stopped by a signal. Nothing has failed, so no page explains it."""

    anchor = ""


@dataclass
class Matrix:
    """The measurements of one command.

    Args:
        config: what is measured.
        cores: the cores of this machine that may be used.
        gpus: the names of this machine's GPUs. If there are none, CPUs are measured.
        env: the environment of the processes.
        say: prints a labelled line.
        launch: runs the processes of a point until they end, and returns their exit code.
        measurements: the results of the processes, for each point and round. `measure` fills it.
    """

    config: BenchConfig
    cores: tuple[int, ...]
    gpus: tuple[str, ...]
    env: Mapping[str, str]
    say: Say
    launch: Launch = supervisor.run
    measurements: dict[MatrixPoint, list[list[MeasureResult]]] = field(default_factory=dict)

    def measure(self) -> None:
        """Measures all rounds, of which every second one goes from the last point to the first.

        Raises:
            MeasurementError: a process failed.
            MeasurementStopped: a signal has stopped the command. The files of all rounds are gone.
        """
        try:
            # Between two points no launcher hears the signals.
            with supervisor.stopping_by_signals():
                self._measure_rounds()
        except supervisor.Stopped as stop:
            self._remove_files()
            words = "stopped before all was measured, so no file was kept."
            raise MeasurementStopped(words, 128 + stop.number) from None

    def _measure_rounds(self) -> None:
        """Measures all rounds."""
        for number_of_round in range(self.config.rounds):
            direction = -1 if number_of_round % 2 else 1
            for point in self.config.points[::direction]:
                results = self._measured(point, number_of_round)
                self.measurements.setdefault(point, []).append(results)
                step = results[0].together
                self.say(
                    f"round {number_of_round + 1}/{self.config.rounds}",
                    f"{point.name}: {number(1000 * step.seconds / step.steps)} ms a step, "
                    f"{number(step.examples / step.seconds)} examples/s",
                )

    def _measured(self, point: MatrixPoint, number_of_round: int) -> list[MeasureResult]:
        """Runs the processes of a point for one round, and returns their results by rank."""
        name = point.name.replace(" ", "_")
        folder = (
            self.config.output_dir / "logs" / f"round_{number_of_round + 1}" / name
        ).absolute()
        folder.mkdir(parents=True)
        profile = self.config.output_dir / "profile" / name
        request = MeasureRequest(
            run=self.config.run_of(point),
            cores=cores_of(point, self.cores, max(p.devices for p in self.config.points)),
            steps=self.config.steps,
            rows_alone=self._rows_alone(point),
            profile=str(profile.absolute())
            if self.config.profile and not number_of_round
            else None,
            results_dir=str(folder),
        )
        write_text(folder / "request.json", request.to_json())
        launch = LaunchConfig(
            program=("tfmulti.bench.worker", str(folder / "request.json")),
            module=True,
            per_node=str(point.workers),
            max_restarts=0,
            log_dir=folder,
            terminal=(),
            stall_timeout_s=_STALL_S,
            shutdown_grace_s=_GRACE_S,
            standby=False,
        )
        env = {"TF_CPP_MIN_LOG_LEVEL": "2", **self.env}
        if self.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[: point.devices])
        code = self.launch(launch, env)
        if code in _STOPPED:
            raise supervisor.Stopped(code - 128)
        if code:
            raise MeasurementError(
                f"the measurement of {point.name} failed; its processes' output is in "
                f"{_shown(folder)}.",
                code,
            )
        return [
            MeasureResult.from_json(request.result_file(rank).read_text())
            for rank in range(point.workers)
        ]

    def _remove_files(self) -> None:
        """Removes what was written. The folder was new or empty before."""
        for name in ("logs", "profile"):
            shutil.rmtree(self.config.output_dir / name, ignore_errors=True)
        with contextlib.suppress(OSError):
            self.config.output_dir.rmdir()

    def _rows_alone(self, point: MatrixPoint) -> int | None:
        """Returns the rows of a step without peers, or None at a point of one replica.

        CPU replicas of one process share its cores. Without peers one device uses all these cores,
        so it computes all rows of the global batch.
        """
        if point.kind == "one":
            return None
        if point.kind == "replicas" and not self.gpus:
            return self.config.global_batch_of(point)
        return self.config.slice_rows(point)


def _shown(path: Path) -> str:
    """Returns a path as text, relative to the current folder if it is in there."""
    current = Path.cwd()
    return str(path.relative_to(current)) if path.is_relative_to(current) else str(path)

"""Measures every place of the matrix in each round, in new processes each time."""

from __future__ import annotations

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

# The exit codes 128 + SIGHUP, 128 + SIGINT and 128 + SIGTERM.
_STOPPED = (129, 130, 143)
# The first step may take long, because it is traced.
_STALL_S = 120.0


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


@dataclass
class Matrix:
    """The measurements of one command.

    Args:
        config: what is measured.
        cores: the cores of this machine that may be used.
        gpus: the names of this machine's GPUs. If there are none, CPUs are measured.
        env: the environment of the processes.
        say: prints a labelled line.
        launch: runs the processes of a place until they end, and returns their exit code.
        found: the results of the processes, for each place and round. `measure` fills it.
    """

    config: BenchConfig
    cores: tuple[int, ...]
    gpus: tuple[str, ...]
    env: Mapping[str, str]
    say: Say
    launch: Launch = supervisor.run
    found: dict[MatrixPoint, list[list[MeasureResult]]] = field(default_factory=dict)

    def measure(self) -> None:
        """Measures all rounds, of which every second one goes from the last place to the first.

        Raises:
            MeasurementError: a process failed, or was stopped by a signal.
        """
        for number_of_round in range(self.config.rounds):
            order = -1 if number_of_round % 2 else 1
            for place in self.config.places[::order]:
                answers = self._measured(place, number_of_round)
                self.found.setdefault(place, []).append(answers)
                step = answers[0].together
                self.say(
                    f"round {number_of_round + 1}/{self.config.rounds}",
                    f"{place.name}: {number(1000 * step.seconds / step.steps)} ms a step, "
                    f"{number(step.examples / step.seconds)} examples/s",
                )

    def _measured(self, place: MatrixPoint, number_of_round: int) -> list[MeasureResult]:
        """Runs the processes of a place for one round, and returns their results by rank."""
        words = place.name.replace(" ", "_")
        folder = (
            self.config.output_dir / "logs" / f"round_{number_of_round + 1}" / words
        ).absolute()
        folder.mkdir(parents=True)
        profile = self.config.output_dir / "profile" / words
        order = MeasureRequest(
            run=self.config.run_of(place),
            cores=cores_of(place, self.cores, max(p.devices for p in self.config.places)),
            steps=self.config.steps,
            rows_alone=self._rows_alone(place),
            profile=str(profile.absolute())
            if self.config.profile and not number_of_round
            else None,
            answers=str(folder),
        )
        write_text(folder / "order.json", order.to_json())
        launch = LaunchConfig(
            program=("tfmulti.bench.worker", str(folder / "order.json")),
            module=True,
            per_node=str(place.workers),
            max_restarts=0,
            log_dir=folder,
            terminal=(),
            stall_timeout_s=_STALL_S,
            standby=False,
        )
        env = {"TF_CPP_MIN_LOG_LEVEL": "2", **self.env}
        if self.gpus:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(self.gpus[: place.devices])
        code = self.launch(launch, env)
        if code in _STOPPED:
            raise MeasurementError("stopped before all was measured; no bench.json.", code)
        if code:
            raise MeasurementError(
                f"the measurement of {place.name} failed; its processes' output is in "
                f"{_shown(folder)}.",
                code,
            )
        return [
            MeasureResult.from_json(order.answer_file(rank).read_text())
            for rank in range(place.workers)
        ]

    def _rows_alone(self, place: MatrixPoint) -> int | None:
        """Returns the rows of a step without peers, or None at a place of one replica.

        CPU replicas of one process share its cores. Without peers one device uses all these cores,
        so it computes all rows of the global batch.
        """
        if place.kind == "one":
            return None
        if place.kind == "replicas" and not self.gpus:
            return self.config.global_batch_of(place)
        return self.config.share_of(place)


def _shown(path: Path) -> str:
    """Returns a path as text, relative to the current folder if it is in there."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)

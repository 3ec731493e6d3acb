"""Defines what is measured: `BenchConfig`, and the points of its matrix."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from tfmulti.config import registry
from tfmulti.config.fit_config import FitConfig
from tfmulti.errors import ConfigError


@dataclass(frozen=True, order=True)
class MatrixPoint:
    """A point of the matrix: the replicas of one process, or workers with one replica each.

    Attributes:
        workers: the number of processes.
        replicas: the number of replicas of a process.
    """

    workers: int
    replicas: int

    @property
    def devices(self) -> int:
        """The number of all replicas. One of the two factors is 1."""
        return self.workers * self.replicas

    @property
    def kind(self) -> str:
        """The kind of the point: `one`, `replicas` or `workers`."""
        if self.devices == 1:
            return "one"
        return "workers" if self.workers > 1 else "replicas"

    @property
    def name(self) -> str:
        """The name of the point: `1 replica`, `4 replicas` or `2 workers`."""
        if self.workers > 1:
            return f"{self.workers} workers"
        return f"{self.replicas} replica{'s' if self.replicas > 1 else ''}"


@dataclass(frozen=True, kw_only=True)
class BenchConfig:
    """A matrix of points, and the run that is measured at each of them.

    Args:
        run: the model, the data, the batch size and the other options of `fit`. The batch size is
            that of the global batch at every point; with `weak` it is that of each replica.
        replicas: the numbers of replicas in one process to measure.
        workers: the numbers of processes with one replica each to measure.
        weak: whether each replica keeps its batch size, so that the global batch grows.
        rounds: how often each point is measured, each time in new processes.
        steps: how many steps are measured after the warm-up. None: as many as `measure.MEASURED_S`
            holds.
        profile: whether each point writes a trace for TensorBoard.
        output_dir: a new or empty folder for the results.

    Raises:
        ConfigError: a value breaks its rule.
    """

    run: FitConfig
    replicas: tuple[int, ...] = (1,)
    workers: tuple[int, ...] = ()
    weak: bool = False
    rounds: int = 3
    steps: int | None = None
    profile: bool = False
    output_dir: Path = Path("bench")

    def __post_init__(self) -> None:
        for name, value in (("rounds", self.rounds), ("steps", self.steps)):
            if value is not None and value < 1:
                raise ConfigError(f"--{name} is {value}, but it must be at least 1.")
        if self.run.per_replica_batch_size is not None and not self.weak:
            raise ConfigError(
                f"--per_replica_batch_size {self.run.per_replica_batch_size} is valid only "
                "with --weak. Give --weak, or --global_batch_size."
            )
        most = max(point.devices for point in self.points)
        if not self.weak and self.batch < most:
            raise ConfigError(
                f"--global_batch_size {self.batch} has fewer rows than {most} replicas. Give at "
                f"least {most}, or --weak, which gives this number to each replica."
            )
        if self.run.model in registry.MODELS or self.run.dataset != "synthetic":
            return
        raise ConfigError(
            f"--model {self.run.model} has no synthetic data. Give --dataset, such as "
            "synthetic:shape=32x32x3."
        )

    @property
    def points(self) -> tuple[MatrixPoint, ...]:
        """All points, each once: first those of one process, then workers, both by their size."""
        replicas = [MatrixPoint(1, count) for count in sorted(self.replicas)]
        workers = [MatrixPoint(count, 1) for count in sorted(self.workers)]
        return tuple(dict.fromkeys([*replicas, *workers]))

    @property
    def batch(self) -> int:
        """The size of the global batch; with `weak`, that of each replica."""
        option = self.run.global_batch_size or self.run.per_replica_batch_size
        size = option or registry.recipe_of(self.run.dataset).global_batch_size
        # FitConfig refuses data without a batch size of its own unless one is given.
        assert size is not None
        return size

    def global_batch_of(self, point: MatrixPoint) -> int:
        """Returns the rows of the global batch at a point."""
        return self.batch * point.devices if self.weak else self.batch

    def slice_rows(self, point: MatrixPoint) -> int:
        """Returns the rows of the largest replica slice at a point."""
        return -(-self.global_batch_of(point) // point.devices)

    def run_of(self, point: MatrixPoint) -> FitConfig:
        """Returns the configuration of the run at a point."""
        batch, dataset = self.global_batch_of(point), self.run.dataset
        # The data has four global batches, so that no batch is smaller than the others.
        if dataset == "synthetic":
            # Without --dataset a built-in model is measured with made-up data of the form it was
            # made for.
            example = registry.MODELS[str(self.run.model)].example_data
            dataset = f"synthetic:{example},examples={4 * batch}"
        kinds = {"one": "one_device", "replicas": "mirrored", "workers": "multi_worker_mirrored"}
        return dataclasses.replace(
            self.run,
            strategy=kinds[point.kind],
            replicas=point.replicas,
            ignore_cluster=point.kind != "workers",
            dataset=dataset,
            global_batch_size=batch,
            per_replica_batch_size=None,
            # By default a run changes this number while it trains, which cannot be measured.
            steps_per_execution=self.run.steps_per_execution or 1,
            # A dry run leaves no run directory.
            dry_run=True,
            verbose="0",
        )

    def checked_run(self, point: MatrixPoint) -> FitConfig:
        """Returns the run at a point in a form that one process can check alone."""
        run = self.run_of(point)
        if point.kind == "workers":
            run = dataclasses.replace(run, strategy="one_device", ignore_cluster=True)
        return run


def cores_of(point: MatrixPoint, cores: tuple[int, ...], most: int) -> tuple[tuple[int, ...], ...]:
    """Returns the cores of each process at a point; each replica has the same number of cores.

    Args:
        point: the point.
        cores: the cores of this machine that may be used.
        most: the replicas of the largest point. If they are more than the cores, each worker gets
            one core, and several workers get the same one.

    >>> cores_of(MatrixPoint(2, 1), (0, 1, 2, 3), most=2)
    ((0, 1), (2, 3))
    >>> cores_of(MatrixPoint(1, 2), (0, 1, 2, 3, 4, 5), most=3)
    ((0, 1, 2, 3),)
    """
    count = max(1, len(cores) // most)
    if point.workers == 1:
        return (cores[: count * point.replicas],)
    return tuple(
        tuple(cores[(rank * count + i) % len(cores)] for i in range(count))
        for rank in range(point.workers)
    )

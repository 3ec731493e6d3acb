"""Measures how a model's training scales on this machine, and says what limits it.

    python -m tfmulti.bench --model resnet20 --replicas 1,2
    python -m tfmulti.bench --model resnet20 --workers 1,2 --weak
    python -m tfmulti.bench --model cnn --dataset mnist --replicas 1,2,4 --workers 1,2,4 --profile

--replicas counts the replicas of one process: GPUs, or logical CPU devices. --workers counts
processes with one replica each, which are connected over loopback. Each point is measured --rounds
times in new processes. Every second round goes through the points in reverse order. The results in
--output_dir are bench.json, bench.png, the same picture for TensorBoard (folder tensorboard) and
the logs of the processes. The command also takes the flags of python -m tfmulti.fit that say what
is trained. Without --dataset it measures with made-up data in the form that the model needs.

The time of a step is shown in four parts that add up to it. Computing is the time of a step without
peers, on the same cores or device and with the same rows. Communication is what a step takes longer
with peers. Input is the time of waiting for data inside the step. Host is the time of Python
between two steps. All-reduces of several sizes are measured by themselves. A model of their cost
predicts up to 64 workers; the prediction is not a measurement.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from datetime import datetime

from tfmulti.bench import flags
from tfmulti.bench.config import BenchConfig
from tfmulti.bench.matrix import Launch, Matrix, MeasurementError
from tfmulti.bench.picture import draw, log_picture
from tfmulti.bench.report import Report, busy_warnings
from tfmulti.cluster.gpus import visible_gpus
from tfmulti.config.command_line import exit_code_of
from tfmulti.config.console import Say, speaker
from tfmulti.config.run_directory import check_new, write_text
from tfmulti.data.source import Source
from tfmulti.errors import ConfigError, DeviceError
from tfmulti.launch import supervisor
from tfmulti.run import validation


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""

    def command() -> None:
        config = flags.parse(sys.argv if argv is None else argv, __doc__ or "", datetime.now())
        if config is not None:
            gpus = visible_gpus(os.environ)
            check(config, gpus)
            measure(config, gpus, speaker(True))

    return exit_code_of(command)


def check(config: BenchConfig, gpus: Sequence[str]) -> None:
    """Checks the points, the run and the data, before anything is started or written.

    Raises:
        UserError: something cannot be measured as asked.
    """
    check_new("output_dir", config.output_dir)
    for point in config.points:
        if gpus and point.devices > len(gpus):
            raise DeviceError(
                f"{point.name} need as many GPUs, but this machine has {len(gpus)}. Use at most "
                f"{len(gpus)}, or set CUDA_VISIBLE_DEVICES='' to measure CPUs."
            )
    # Between these two points only the number of devices differs.
    smallest, largest = (
        pick(config.points, key=lambda point: point.devices) for pick in (min, max)
    )
    for point in dict.fromkeys((smallest, largest)):
        run = config.checked_run(point)
        job = validation.check(run, env={"CUDA_VISIBLE_DEVICES": ",".join(gpus)})
        if job.data is not None and not isinstance(job.data.train, Source):
            raise ConfigError(
                f"--dataset {run.dataset} is a stream, but a measurement takes batches of several "
                "sizes. Give data that can be read at random."
            )


def measure(
    config: BenchConfig, gpus: tuple[str, ...], say: Say, launch: Launch = supervisor.run
) -> Report:
    """Measures the matrix, prints and writes the results, and returns them.

    It measures CPUs if there are no GPUs. `say` prints a labelled line, and `launch` runs the
    processes of a point.

    Raises:
        MeasurementError: a process failed, or the disk is full.
    """
    cores, load = tuple(sorted(os.sched_getaffinity(0))), os.getloadavg()[0]
    describe(config, gpus, cores, load, say)
    matrix = Matrix(config, cores, gpus, os.environ, say, launch)
    matrix.measure()
    report = Report.of(matrix, load)
    print()
    for line in report.table():
        print(line)
    print()
    for label, lines in (("limit", report.limits), ("model", report.model_lines())):
        for line in lines:
            # The first part is the limit or figure, and the others explain it.
            first, *others = line.split("; ")
            say(label, first)
            for words in others:
                say("", words)
    write(report, say)
    return report


def describe(
    config: BenchConfig, gpus: Sequence[str], cores: Sequence[int], load: float, say: Say
) -> None:
    """Prints what will be measured, and warns of what may distort the figures."""
    scaling = f"batch {config.batch} " + ("a replica (weak)" if config.weak else "in all (strong)")
    say("measuring", f"{config.run.model} at {', '.join(p.name for p in config.points)}; {scaling}")
    most = max(point.devices for point in config.points)
    if not gpus and most > len(cores):
        say(
            "warning",
            f"{most} replicas share {len(cores)} cores: their efficiency shows the limit of the "
            "machine",
        )
    for line in busy_warnings(load, len(cores)):
        say("warning", line)


def write(report: Report, say: Say) -> None:
    """Writes bench.json, and bench.png if matplotlib is installed, with an image for TensorBoard.

    Raises:
        MeasurementError: the disk is full, or the files cannot be written.
    """
    config, folder = report.config, report.config.output_dir
    files = []
    try:
        write_text(folder / "bench.json", json.dumps(report.as_dict(), indent=1) + "\n")
        files.append("bench.json")
        draw(report, folder / "bench.png")
        log_picture(folder / "bench.png", folder / "tensorboard")
        files += ["bench.png", "tensorboard"]
    except ImportError:
        say("warning", "no bench.png: matplotlib is not installed (pip install matplotlib)")
    except OSError as error:
        raise MeasurementError(
            f"{folder} cannot take the results, which are printed above: "
            f"{error.strerror or error}. Make room, and measure again for its files.",
            1,
        ) from None
    show_traces = f"; tensorboard --logdir {folder / 'profile'}" if config.profile else ""
    say("written", f"{folder}: {', '.join(files)}{show_traces}")


if __name__ == "__main__":
    sys.exit(main())

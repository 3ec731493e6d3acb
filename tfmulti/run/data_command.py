"""Shows a data set, its split over replicas, and whether it is read fast enough for the devices.

    python -m tfmulti.data digits
    python -m tfmulti.data images:photos --global_batch_size 30 --replicas 8
    python -m tfmulti.data csv:table.csv,target=price --nomeasure

SOURCE is a value of --dataset. The command prints the number and the form of the examples in each
part, the classes with their numbers of examples, and the first batch. It draws images into the file
of --picture. Then it prints the plan, which says how many rows each replica gets, and the speed of
the data beside that of the model's steps. The command also takes the flags of
python -m tfmulti.fit. It keeps nothing of what it trains.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from absl import flags

from tfmulti.config.command_line import exit_code_of
from tfmulti.config.console import quiet_stderr
from tfmulti.config.fit_config import FitConfig
from tfmulti.config.flags import add_flags, config_of, help_text, make_flags, parse_into
from tfmulti.errors import ConfigError
from tfmulti.launch import garbage_collection
from tfmulti.run import validation

# The names, defaults and help lines of the flags of this command alone.
_OWN_FLAGS: tuple[tuple[str, str | bool | None, str], ...] = (
    ("workers", "1", "Workers whose plan is shown, of --replicas each."),
    ("picture", "first_batch.png", "Where the first batch of images is drawn."),
    ("measure", True, "Measure how fast batches come, against the model's step."),
)


@dataclass(frozen=True)
class Request:
    """What a command line asks for.

    Attributes:
        config: the run whose data is shown.
        workers: the number of workers whose plan is shown.
        picture: the file for the images of the first batch.
        measure: whether the speed is measured.
    """

    config: FitConfig
    workers: int
    picture: str
    measure: bool


def parse(argv: Sequence[str]) -> Request | None:
    """Returns what a command line asks for, or None if it has `--help`.

    Raises:
        ConfigError: there is not exactly one SOURCE, or a flag is wrong.
    """
    values = _flags()
    rest = parse_into(values, argv)
    if values.help:
        return None
    if len(rest) != 1:
        words = f"the arguments {' '.join(rest)}" if rest else "no argument"
        raise ConfigError(
            f"{words}: one SOURCE is needed, such as digits or images:FOLDER. See --help."
        )
    if not values.workers.isdecimal() or int(values.workers) < 1:
        raise ConfigError(f"--workers is {values.workers!r}, but it must be a number from 1.")
    config = config_of(values, dataset=rest[0], ignore_cluster=True, dry_run=True)
    return Request(config, int(values.workers), values.picture, values.measure)


def _flags() -> flags.FlagValues:
    """Returns the flags of a run and those of this command."""
    values = make_flags()
    add_flags(values, _OWN_FLAGS)
    return values


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""

    def command() -> None:
        request = parse(sys.argv if argv is None else argv)
        if request is None:
            print(help_text(__doc__ or "", _flags(), [name for name, *_ in _OWN_FLAGS]))
            return
        job = validation.check(request.config, env={})
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        with quiet_stderr(), garbage_collection.importing():
            # The import of TensorFlow is slow, so mistakes of the user are reported before it.
            from tfmulti.run import inspection
        inspection.show(job, request.workers, request.picture, measure=request.measure)

    return exit_code_of(command)


if __name__ == "__main__":
    sys.exit(main())

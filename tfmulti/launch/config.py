"""What the launcher is asked to do: `LaunchConfig`, from a command line in torchrun's words."""

from __future__ import annotations

import argparse
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tfmulti.errors import ConfigError, did_you_mean
from tfmulti.gpus import visible_gpus

STREAMS: dict[str, tuple[str, ...]] = {
    "0": (),
    "1": ("stdout",),
    "2": ("stderr",),
    "3": ("stdout", "stderr"),
}


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """One job: the program, how many workers it has, and what happens when one fails.

    Args:
        program: the script or module and its arguments.
        module: whether `program[0]` is a module, as in `python -m`.
        python: whether it is Python's at all; else `program[0]` is a command.
        workers: processes on this machine.
        gpus: the GPUs that they share, by name.
        max_restarts: starts of the whole job without progress, after the first.
        monitor_interval_s: between two looks at the workers.
        log_dir: of all workers' output, a folder an attempt.
        terminal, files: the streams of a worker that go to the terminal and to files.
        start_timeout_s: from the first worker that listens until all do.
        shutdown_grace_s: from SIGTERM to SIGKILL.
        stall_timeout_s: without the end of any step; at least five of the longest steps.
        standby: whether processes with TensorFlow imported wait for the next attempt.

    Raises:
        ConfigError: a value breaks its rule.
    """

    program: tuple[str, ...]
    module: bool = False
    python: bool = True
    workers: int = 1
    gpus: tuple[str, ...] = ()
    max_restarts: int = 3
    monitor_interval_s: float = 0.1
    log_dir: Path = Path("logs")
    terminal: tuple[str, ...] = ("stdout", "stderr")
    files: tuple[str, ...] = ("stdout", "stderr")
    start_timeout_s: float = 300.0
    shutdown_grace_s: float = 30.0
    stall_timeout_s: float = 15.0
    standby: bool = True

    def __post_init__(self) -> None:
        if not self.program:
            raise ConfigError(
                "no program was given. Write: python -m tfmulti.launch --nproc-per-node 2 "
                "-m tfmulti.fit …, or a script of your own."
            )
        name = self.program[0]
        if self.python and not self.module and not Path(name).is_file():
            raise ConfigError(f"there is no script {name!r}. Give its path, or -m for a module.")
        if not self.python and shutil.which(name) is None:
            raise ConfigError(f"there is no command {name!r}. Give its path.")
        if self.gpus and self.workers > len(self.gpus):
            raise ConfigError(
                f"--nproc-per-node {self.workers} is more than the {len(self.gpus)} GPUs of this "
                f"machine, and each worker needs its own. Use at most {len(self.gpus)}, or hide "
                "the GPUs with CUDA_VISIBLE_DEVICES=''."
            )
        if self.gpus and len(self.gpus) % self.workers:
            raise ConfigError(
                f"the {len(self.gpus)} GPUs cannot be shared evenly by --nproc-per-node "
                f"{self.workers}, and TensorFlow wants as many on each worker. Use a divisor of "
                f"{len(self.gpus)}, or set CUDA_VISIBLE_DEVICES to fewer."
            )


class _Parser(argparse.ArgumentParser):
    """argparse whose complaint is an exception instead of the end of the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See python -m tfmulti.launch --help.")


# name, default, what stands for a value (None: a switch), help
_FLAGS: tuple[tuple[str, str | None, str | None, str], ...] = (
    (
        "nproc-per-node",
        "1",
        "N|auto|cpu|gpu",
        "Workers on this machine. auto: one a GPU, or one; gpu: one a GPU; cpu: one a core.",
    ),
    (
        "max-restarts",
        "3",
        "N",
        "Restarts of the whole job without progress; a run that moved on earns them back.",
    ),
    ("monitor-interval", "0.1", "S", "Seconds between two looks at the workers."),
    (
        "log-dir",
        None,
        "DIR",
        "Folder of the workers' output and errors. Default: logs/ in the --run_dir that the "
        "program is given, else logs/ here.",
    ),
    ("tee", "3", "STREAMS", "Streams for terminal and files: 0 none, 1 stdout, 2 stderr, 3 both."),
    ("redirects", "0", "STREAMS", "Streams for the files alone."),
    ("start-timeout", "300", "S", "Seconds from the first worker that listens until all do."),
    ("shutdown-grace-s", "30", "S", "Seconds from SIGTERM to SIGKILL."),
    (
        "stall-timeout-s",
        "15",
        "S",
        "Seconds without the end of any step, at least five of the longest steps; 0: never.",
    ),
    (
        "no-standby",
        None,
        None,
        "Keep no processes with TensorFlow imported in readiness: saves their memory, 0.4 GB a "
        "worker, and makes a restart four seconds slower.",
    ),
    ("module", None, None, "The program is a module, as in python -m."),
    ("no-python", None, None, "The program is a command, not Python's."),
)
_SHORT = {"module": "-m", "tee": "-t", "redirects": "-r"}


def make_parser(doc: str) -> argparse.ArgumentParser:
    """Returns the parser of the launcher's own flags; `_` and `-` in them are the same."""
    parser = _Parser(
        prog="python -m tfmulti.launch",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, default, metavar, words in _FLAGS:
        spellings = dict.fromkeys([f"--{name}", f"--{name.replace('-', '_')}"])
        names = [*([_SHORT[name]] if name in _SHORT else []), *spellings]
        if metavar is None:
            parser.add_argument(*names, action="store_true", help=words)
        else:
            shown = f" Default: {default}." if default else ""
            parser.add_argument(*names, default=default, metavar=metavar, help=words + shown)
    parser.add_argument("program", nargs=argparse.REMAINDER, help="What the workers run.")
    return parser


def parse(argv: Sequence[str], doc: str, env: Mapping[str, str] = os.environ) -> LaunchConfig:
    """Returns what a command line asks for. `SystemExit(0)` after `--help`.

    Raises:
        ConfigError: an unknown flag or a wrong value.
    """
    given, unknown = make_parser(doc).parse_known_args(argv)
    if unknown:
        name = unknown[0].partition("=")[0].lstrip("-").replace("_", "-")
        raise ConfigError(f"no flag --{name}; {did_you_mean(name, [f[0] for f in _FLAGS])}")
    gpus = visible_gpus(env)
    program = given.program[1:] if given.program[:1] == ["--"] else given.program
    terminal = _streams("tee", given.tee)
    only_files = _streams("redirects", given.redirects)
    return LaunchConfig(
        program=tuple(program),
        module=given.module,
        python=not given.no_python,
        workers=_workers(given.nproc_per_node, len(gpus)),
        gpus=gpus,
        max_restarts=_whole("max-restarts", given.max_restarts, 0),
        monitor_interval_s=_seconds("monitor-interval", given.monitor_interval),
        log_dir=Path(given.log_dir) if given.log_dir else _default_log_dir(program),
        terminal=tuple(name for name in terminal if name not in only_files),
        files=tuple(dict.fromkeys([*terminal, *only_files])),
        start_timeout_s=_seconds("start-timeout", given.start_timeout),
        shutdown_grace_s=_seconds("shutdown-grace-s", given.shutdown_grace_s),
        stall_timeout_s=_seconds("stall-timeout-s", given.stall_timeout_s) or math.inf,
        standby=not given.no_standby and not given.no_python,
    )


def _default_log_dir(program: Sequence[str]) -> Path:
    """Returns logs/ in the run directory that the program's own flags name, or here."""
    for at, word in enumerate(program):
        name, equals, value = word.partition("=")
        if name in ("--run_dir", "-run_dir"):
            if equals:
                return Path(value) / "logs"
            if at + 1 < len(program):
                return Path(program[at + 1]) / "logs"
    return Path("logs")


def _workers(text: str, gpus: int) -> int:
    if text == "auto":
        return max(1, gpus)
    if text == "gpu":
        if not gpus:
            raise ConfigError(
                "--nproc-per-node gpu, but this machine has no GPU that a program may see. Give a "
                "number, or cpu for one worker a core."
            )
        return gpus
    if text == "cpu":
        return os.cpu_count() or 1
    return _whole("nproc-per-node", text, 1)


def _whole(name: str, text: str, low: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if value < low:
        raise ConfigError(f"--{name} is {text!r}, but it must be a whole number from {low}.")
    return value


def _seconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise ConfigError(f"--{name} is {text!r}, but it must be a number of seconds.")
    return value


def _streams(name: str, text: str) -> tuple[str, ...]:
    if text not in STREAMS:
        raise ConfigError(
            f"--{name} is {text!r}, but it must be 0 (none), 1 (stdout), 2 (stderr) or 3 (both)."
        )
    return STREAMS[text]

"""The flags of `python -m tfmulti.bench`: those of a run, and those of a measurement."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from absl import flags

from tfmulti.bench.config import BenchConfig
from tfmulti.config.flags import add_flags, config_of, help_text, make_flags, parse_flags
from tfmulti.errors import ConfigError

# The names, defaults and help lines of the flags of a measurement alone.
_OWN_FLAGS: tuple[tuple[str, str | bool | None, str], ...] = (
    ("workers", None, "Numbers of processes of one replica each, on this machine, such as 1,2,4."),
    ("weak", False, "Keep the batch of each replica: the global one grows with them."),
    ("strong", False, "Keep the global batch: each replica's share shrinks. The default."),
    ("rounds", "3", "How often each point is measured, in new processes."),
    ("steps", None, "Steps that are measured each time. Default: as many as five seconds hold."),
    ("profile", False, "Leave a trace of some steps at each point, for TensorBoard."),
    (
        "output_dir",
        None,
        "A new folder for bench.json, bench.png and logs. Default: bench/MODEL-TIME.",
    ),
)

# Flags of a run that a measurement does not have, or that it sets itself at each point.
_IGNORED = (
    *("strategy", "ignore_cluster", "epochs", "steps_per_epoch", "run_dir", "resume"),
    *("checkpoint_every_s", "checkpoint_every_steps", "keep_checkpoints", "export_dir", "verbose"),
    *("dry_run", "device_memory_gb", "log_throughput", "tracker", "validation_split", "test_split"),
)


def parse(argv: Sequence[str], manual: str, now: datetime) -> BenchConfig | None:
    """Returns the configuration of a command line, or None if it asked for (printed) help.

    `manual` stands above the flags in the help. The time names the default output folder.

    Raises:
        ConfigError: a flag is unknown or wrong.
    """
    values = _flags()
    if not parse_flags(values, argv, _IGNORED, "a measurement"):
        print(help_text(manual, values, [name for name, *_ in _OWN_FLAGS], _IGNORED))
        return None
    if values.weak and values.strong:
        raise ConfigError(
            "--weak keeps the batch of each replica and --strong the global one. Give one of them."
        )
    replicas = counts("replicas", "1" if values.replicas is None else values.replicas)
    # The flag is a list here, but the configuration of a run has one number.
    values["replicas"].unparse()
    run = _run(values)
    return BenchConfig(
        run=run,
        replicas=replicas,
        workers=counts("workers", values.workers) if values.workers is not None else (),
        weak=values.weak,
        rounds=_number("rounds", values.rounds),
        steps=_number("steps", values.steps) if values.steps is not None else None,
        profile=values.profile,
        output_dir=Path(values.output_dir or default_output(run.model, now)),
    )


def _run(values: flags.FlagValues) -> Any:
    """Returns the run that the flags describe, without its number of replicas."""
    defaults: dict[str, Any] = {}
    if not values["dataset"].present and not values.config:
        defaults["dataset"] = "synthetic"
    if values["peak_tflops"].present:
        # In a run, --peak_tflops is an error without --log_throughput.
        defaults["log_throughput"] = True
    run = config_of(values, **defaults)
    return dataclasses.replace(run, replicas=None).resolved()


def default_output(model: str | None, now: datetime) -> str:
    """Returns a folder for a measurement, named by its model and the time."""
    name = (model or "model").rpartition(":")[2].rpartition(".")[2]
    return f"bench/{name}-{now:%Y%m%d-%H%M%S}"


def counts(name: str, text: str) -> tuple[int, ...]:
    """Returns the numbers of a list such as `1,2,4`, each once.

    Raises:
        ConfigError: an item is not a whole number from 1.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"--{name} is {text!r}, but it must be numbers from 1 with commas between, such as "
            "1,2,4."
        )
    return tuple(dict.fromkeys(int(part) for part in parts))


def _number(name: str, text: str) -> int:
    """Returns the number that a flag has; raises ConfigError if it is not a whole number."""
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"--{name} is {text!r}, but it must be a whole number.") from None


def _flags() -> flags.FlagValues:
    """Returns the flags of a run, some with other defaults and help, and those of a measurement."""
    values = make_flags()
    values["replicas"].help = (
        "Numbers of replicas in one process to measure, such as 1,2,4: GPUs, or logical CPU "
        "devices."
    )
    values.set_default("dataset", "synthetic")
    values["dataset"].help += " Made-up data of the model's form, where none is given."
    values["global_batch_size"].help += " With --weak: of one replica."
    values["steps_per_execution"].help = (
        "Optimizer steps of one call into TensorFlow; more hides the cost of a call. Default: one, "
        "since a number that is chosen during the run cannot be measured."
    )
    values["peak_tflops"].help = (
        "TFLOP/s that a device can do at most, for model FLOPs utilisation. Default: that of known "
        "GPUs."
    )
    add_flags(values, _OWN_FLAGS)
    return values

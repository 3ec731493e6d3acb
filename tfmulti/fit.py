"""Trains a Keras model on one device, many devices or many machines.

    python -m tfmulti.fit                                     digits, one device
    python -m tfmulti.fit --strategy mirrored --replicas 2    two local devices
    python -m tfmulti.fit --dataset mnist --model lenet --global_batch_size 128
    python -m tfmulti.fit --config runs/NAME/config.json      the same run again

On several machines, run the same command on each with TF_CONFIG in the environment.
Exit codes: 0 done, 1 the program failed, 2 a mistake in what was asked (one line on
standard error), 130 stopped by Ctrl-C and 143 by SIGTERM, with what was reached saved.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

from absl import flags

from tfmulti import errors, preflight
from tfmulti.config import FitConfig, base_type, read_config_file
from tfmulti.console import quiet_stderr
from tfmulti.environments import find_cluster
from tfmulti.errors import ConfigError, TfmultiError, did_you_mean


def make_flags() -> flags.FlagValues:
    """Returns one flag for each field of `FitConfig`, and `--config` and `--help`."""
    values = flags.FlagValues()
    define = {
        str: flags.DEFINE_string,
        int: flags.DEFINE_string,  # checked by FitConfig, whose message names the rule
        float: flags.DEFINE_string,
        bool: flags.DEFINE_boolean,
    }
    flags.DEFINE_string(
        "config",
        None,
        "JSON file of these flags, such as a run's config.json; flags win.",
        flag_values=values,
    )
    flags.DEFINE_boolean("help", False, "Show this text.", short_name="h", flag_values=values)
    for item in dataclasses.fields(FitConfig):
        help = item.metadata["help"]
        if item.metadata["choices"]:
            help += f" One of: {', '.join(item.metadata['choices'])}."
        plain = item.default is None or isinstance(item.default, bool)
        default = item.default if plain else str(item.default)
        define[base_type(item)](item.name, default, help, flag_values=values)
    return values


def parse(argv: Sequence[str]) -> FitConfig | None:
    """Returns the configuration of a command line, or None where help was asked for.

    Raises:
        ConfigError: an unknown flag or argument, or a wrong value.
    """
    values = make_flags()
    names = {item.name for item in dataclasses.fields(FitConfig)} | {"config", "help"}
    try:
        rest = values(list(argv))
    except flags.UnrecognizedFlagError as error:
        name = error.flagname.lstrip("-")
        raise ConfigError(f"no flag --{name}; {did_you_mean(name, names)}") from None
    except flags.Error as error:
        raise ConfigError(f"{error}. See python -m tfmulti.fit --help.") from None
    if values.help:
        return None
    if len(rest) > 1:
        raise ConfigError(
            f"the argument {rest[1]!r} belongs to no flag. Write --flag=value, and see --help."
        )
    given: dict[str, Any] = read_config_file(values.config) if values.config else {}
    for item in dataclasses.fields(FitConfig):
        if values[item.name].present:
            given[item.name] = _convert(item, values[item.name].value)
    _keep_one_batch_size(values, given)
    return FitConfig(**given)


def _convert(item: dataclasses.Field[Any], value: Any) -> Any:
    kind = base_type(item)
    if not isinstance(value, str) or kind is str:
        return value
    if value.lower() == "none" and "None" in str(item.type):
        return None
    try:
        return kind(value)
    except ValueError:
        noun = "a whole number" if kind is int else "a number"
        raise ConfigError(f"--{item.name} is {value!r}, but it must be {noun}.") from None


def _keep_one_batch_size(values: flags.FlagValues, given: dict[str, Any]) -> None:
    """A batch size on the command line takes the place of the other one in the file."""
    pair = ("global_batch_size", "per_replica_batch_size")
    for name, other in (pair, pair[::-1]):
        if values[name].present and not values[other].present:
            given.pop(other, None)


def help_text() -> str:
    """Returns what `--help` prints."""
    lines = [__doc__ or "", "Flags:"]
    values = make_flags()
    for name in ["config", *(item.name for item in dataclasses.fields(FitConfig))]:
        flag = values[name]
        default = f" (default: {flag.default})" if flag.default not in (None, False) else ""
        lines.append(f"  --{name}")
        lines.append(textwrap.indent(textwrap.fill(f"{flag.help}{default}", 72), " " * 6))
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit code."""
    try:
        config = parse(sys.argv if argv is None else argv)
        if config is None:
            print(help_text())
            return errors.EXIT_DONE
        cluster, _ = find_cluster(os.environ)
        if cluster is not None and cluster.is_evaluator:
            print("tfmulti: the workers evaluate; this evaluator task has nothing to do.")
            return errors.EXIT_DONE
        job = preflight.check(config, cluster)
        if job.done is not None:
            print(
                f"{'done':<10} {config.run_dir} has all {job.done.epochs} epochs; nothing is left "
                "to do. Give more --epochs, or a new --run_dir."
            )
            return errors.EXIT_DONE
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
        with quiet_stderr():
            from tfmulti import loop  # 4 s for TensorFlow: only when all that can be is checked
        stopped_by = loop.run(job).stopped_by
    except TfmultiError as error:
        print(f"tfmulti: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        print("tfmulti: stopped by Ctrl-C before training began.", file=sys.stderr)
        return errors.EXIT_INTERRUPTED
    return {"SIGINT": errors.EXIT_INTERRUPTED, "SIGTERM": errors.EXIT_TERMINATED}.get(
        stopped_by or "", errors.EXIT_DONE
    )


if __name__ == "__main__":
    sys.exit(main())

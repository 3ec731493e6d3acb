"""The flags of a run, for the commands that describe one: each field of `FitConfig` is a flag."""

from __future__ import annotations

import dataclasses
import sys
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

from absl import flags

from tfmulti import errors
from tfmulti.config.fit_config import FitConfig, read_config_file
from tfmulti.config.training_options import TrainingOptions, base_type
from tfmulti.errors import ConfigError, TfmultiError, did_you_mean


def exit_code(command: Callable[[], object]) -> int:
    """Runs a command, and returns the process' exit code; a user's mistake is one line."""
    try:
        command()
    except TfmultiError as error:
        print(f"tfmulti: {error}", file=sys.stderr)
        return int(error.exit_code)
    except KeyboardInterrupt:
        return errors.EXIT_INTERRUPTED
    return errors.EXIT_DONE


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
    rest = parse_into(values, argv)
    if values.help:
        return None
    if rest:
        raise ConfigError(
            f"the argument {rest[0]!r} belongs to no flag. Write --flag=value, and see --help."
        )
    return config_of(values)


def parse_into(values: flags.FlagValues, argv: Sequence[str]) -> list[str]:
    """Gives flags the values of a command line, and returns the arguments that are no flags.

    Raises:
        ConfigError: an unknown flag, or one without its value.
    """
    try:
        return list(values(list(argv))[1:])
    except flags.UnrecognizedFlagError as error:
        name = error.flagname.lstrip("-")
        raise ConfigError(f"no flag --{name}; {did_you_mean(name, list(values))}") from None
    except flags.Error as error:
        raise ConfigError(f"{error}. See --help.") from None


def config_of(values: flags.FlagValues, **given_before: Any) -> FitConfig:
    """Returns the configuration of parsed flags, and of the file that `--config` names.

    Raises:
        ConfigError: a value is wrong.
    """
    given: dict[str, Any] = read_config_file(values.config) if values.config else {}
    given |= given_before
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


def help_text(
    manual: str,
    values: flags.FlagValues,
    more: Sequence[str] = (),
    without: Sequence[str] = (),
) -> str:
    """Returns what `--help` prints: a command's manual, and its flags, `more` of them first."""
    lines = [manual, "Flags:"]
    inherited = {item.name for item in dataclasses.fields(TrainingOptions)}
    names = [item.name for item in dataclasses.fields(FitConfig)]
    of_run = sorted(names, key=inherited.__contains__)  # what a run is, then how it is trained
    for name in [*more, "config", *(name for name in of_run if name not in without)]:
        flag = values[name]
        default = f" (default: {flag.default})" if flag.default not in (None, False) else ""
        lines.append(f"  --{name}")
        lines.append(textwrap.indent(textwrap.fill(f"{flag.help}{default}", 72), " " * 6))
    return "\n".join(lines)

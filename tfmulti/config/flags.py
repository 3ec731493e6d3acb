"""Makes the command line flags of a run, one for each field of `FitConfig`, and parses them."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from absl import flags

from tfmulti.config.fit_config import FitConfig, read_config_file
from tfmulti.config.training_options import TrainingOptions, base_type, form_of
from tfmulti.errors import ConfigError, did_you_mean


def make_flags() -> flags.FlagValues:
    """Returns the flags: one for each field of `FitConfig`, `--config` and `--help`."""
    values = flags.FlagValues()
    # Numbers are parsed as text, because FitConfig checks them and its message names the rule.
    define = {
        str: flags.DEFINE_string,
        int: flags.DEFINE_string,
        float: flags.DEFINE_string,
        bool: flags.DEFINE_boolean,
    }
    add_flags(
        values,
        [("config", None, "JSON file of these flags, such as a run's config.json; flags win.")],
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


def add_flags(
    values: flags.FlagValues, added: Iterable[tuple[str, str | bool | None, str]]
) -> None:
    """Adds flags of one command, each with its name, its default and its help text."""
    for name, default, help in added:
        define = flags.DEFINE_boolean if isinstance(default, bool) else flags.DEFINE_string
        define(name, default, help, flag_values=values)


def parse(argv: Sequence[str]) -> FitConfig | None:
    """Returns the configuration of a command line, or None if it has `--help`.

    Raises:
        ConfigError: a flag or an argument is unknown, or a value is wrong.
    """
    values = make_flags()
    return config_of(values) if parse_flags(values, argv) else None


def parse_flags(
    values: flags.FlagValues, argv: Sequence[str], unused: Collection[str] = (), command: str = ""
) -> bool:
    """Parses a command line of flags alone, and returns whether it does not ask for help.

    Args:
        values: the flags, which get their values.
        argv: the command line.
        unused: the flags that have no effect.
        command: what they have no effect on, for the message.

    Raises:
        ConfigError: a flag is unknown, has no value or no effect, or an argument is not a flag.
    """
    rest = parse_into(values, argv, unused)
    if values.help:
        return False
    if rest:
        raise ConfigError(
            f"the argument {rest[0]!r} belongs to no flag. Write --flag=value, and see --help."
        )
    for name in unused:
        if values[name].present:
            raise ConfigError(f"--{name} has no effect on {command}. Leave it out.")
    return True


def parse_into(
    values: flags.FlagValues, argv: Sequence[str], unused: Collection[str] = ()
) -> list[str]:
    """Parses a command line into flags, and returns the arguments that are not flags.

    Args:
        values: the flags, which get their values.
        argv: the command line.
        unused: the flags that have no effect. The answer to a typo leaves them out.

    Raises:
        ConfigError: a flag is unknown, or it has no value.
    """
    try:
        return list(values(list(argv))[1:])
    except flags.UnrecognizedFlagError as error:
        name = error.flagname.lstrip("-")
        known = [flag for flag in values if flag not in unused]
        raise ConfigError(f"no flag --{name}; {did_you_mean(name, known, '--')}") from None
    except flags.Error as error:
        raise ConfigError(f"{error}. See --help.") from None


def config_of(values: flags.FlagValues, **defaults: Any) -> FitConfig:
    """Returns the configuration from parsed flags and from the file of `--config`.

    Args:
        values: the parsed flags. They win over all other values.
        defaults: values by field for flags that are not given. They win over those of the file.

    Raises:
        ConfigError: a value is wrong, or the file cannot be used.
    """
    fields: dict[str, Any] = read_config_file(values.config) if values.config else {}
    fields |= defaults
    for item in dataclasses.fields(FitConfig):
        if values[item.name].present:
            fields[item.name] = _convert(item, values[item.name].value)
    _keep_one_batch_size(values, fields)
    return FitConfig(**fields)


def _convert(item: dataclasses.Field[Any], value: Any) -> Any:
    """Returns the value of a flag in the type of its field, or raises ConfigError."""
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


def _keep_one_batch_size(values: flags.FlagValues, fields: dict[str, Any]) -> None:
    """Removes the other batch size from `fields` if the command line gives only one of the two."""
    pair = ("global_batch_size", "per_replica_batch_size")
    for name, other in (pair, pair[::-1]):
        if values[name].present and not values[other].present:
            fields.pop(other, None)


def help_text(
    manual: str,
    values: flags.FlagValues,
    more: Sequence[str] = (),
    without: Sequence[str] = (),
) -> str:
    """Returns the text of `--help`: the manual of a command, and then its flags.

    Args:
        manual: the manual of the command.
        values: the flags of the command.
        more: the names of flags that come first. They are no fields of `FitConfig`.
        without: the names of fields of `FitConfig` that are not shown.
    """
    lines = [manual, "Flags:"]
    inherited = {item.name for item in dataclasses.fields(TrainingOptions)}
    # A command that gives a flag another help text may give it another form, too.
    forms = {
        item.name: f" ({form_of(item)})" if text.startswith(item.metadata["help"]) else ""
        for item in dataclasses.fields(FitConfig)
        if (text := str(values[item.name].help))
    }
    # First the flags that say what the run is, then those that say how it is trained.
    of_run = sorted(forms, key=inherited.__contains__)
    for name in [*more, "config", *(name for name in of_run if name not in without)]:
        flag = values[name]
        default = f" (default: {flag.default})" if flag.default not in (None, False) else ""
        lines.append(f"  --{name}{forms.get(name, '')}")
        lines.append(textwrap.indent(textwrap.fill(f"{flag.help}{default}", 72), " " * 6))
    return "\n".join(lines)

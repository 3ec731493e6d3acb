"""Options after a data set's name: `synthetic:shape=28x28x1,classes=10`."""

from __future__ import annotations

from typing import Any

from tfmulti.errors import ConfigError, did_you_mean


def parse_options(dataset: str, text: str, defaults: dict[str, Any]) -> dict[str, Any]:
    """Returns the defaults, updated with the options of a text `key=value,…`.

    Messages begin with the name of the data set. The type of a default decides which values its
    option takes. A tuple takes whole numbers joined by `x`, and a text takes any text. None and a
    number take one whole number. Whole numbers are at least 1.

    Raises:
        ConfigError: a key is unknown, or a value has the wrong form.
    """
    options = dict(defaults)
    for item in filter(None, text.split(",")):
        key, equals, value = item.partition("=")
        if key not in defaults or not equals:
            raise ConfigError(
                f"--dataset {dataset}:{text}: no option {key!r}; {did_you_mean(key, defaults)} "
                "Write options as key=value,key=value."
            )
        if isinstance(defaults[key], str):
            if not value:
                raise ConfigError(f"--dataset {dataset}:{text}: {key} has no value. Give it one.")
            options[key] = value
            continue
        numbers = value.split("x") if isinstance(defaults[key], tuple) else [value]
        if not all(number.isdecimal() and int(number) > 0 for number in numbers):
            form = "numbers such as 28x28x1" if isinstance(defaults[key], tuple) else "a number"
            raise ConfigError(
                f"--dataset {dataset}:{text}: {key} is {value!r}, but it must be {form}, from 1."
            )
        parsed = tuple(int(number) for number in numbers)
        options[key] = parsed if isinstance(defaults[key], tuple) else parsed[0]
    return options

"""Knows the experiment trackers that a run can log to, without importing one."""

from __future__ import annotations

import importlib.util

from tfmulti.errors import ConfigError, did_you_mean

TENSORBOARD, MLFLOW, WANDB = "tensorboard", "mlflow", "wandb"
TRACKERS = (TENSORBOARD, MLFLOW, WANDB)
NONE = "none"


def names_in(text: str) -> tuple[str, ...]:
    """Returns the names in the text of `--tracker`, each once.

    Raises:
        ConfigError: a name is unknown, or `none` is not alone.
    """
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if names == (NONE,):
        return ()
    if NONE in names:
        raise ConfigError(f"--tracker {text} has other names beside {NONE!r}. Give it alone.")
    for name in names:
        if name not in TRACKERS:
            known = did_you_mean(name, (*TRACKERS, NONE))
            raise ConfigError(f"--tracker {text} has the unknown name {name!r}; {known}")
    return names


def check_installed(name: str) -> None:
    """Raises ConfigError if a tracker's package is not installed."""
    if importlib.util.find_spec(name) is None:
        raise ConfigError(
            f"the tracker {name} is not installed on this machine. Install it on all machines of "
            f"the job: pip install {name}"
        )

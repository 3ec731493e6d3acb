"""The errors that tfmulti raises, and the exit code of each.

    TfmultiError                 exit code 1: the program failed
    ├── VerificationError        replicas give other numbers than one device
    └── UserError                exit code 2: a mistake in what was asked for
        ├── ConfigError          a flag, an argument or a configuration file
        ├── ClusterError         TF_CONFIG, or the cluster that it describes
        ├── DeviceError          devices that this machine does not have
        ├── DataError            a data set: missing, damaged or of the wrong form
        ├── ModelError           a model that cannot be built or trained as asked
        ├── RunDirError          the run directory
        └── ResumeError          a run that cannot go on from its checkpoints

Each message is one line: the value, the rule, the place and the next step.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USER = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT
EXIT_TERMINATED = 143  # 128 + SIGTERM: everything is saved, start me again


class TfmultiError(Exception):
    """The base of every error that tfmulti raises by itself."""

    exit_code: int = EXIT_FAILED
    __init__ = Exception.__init__  # by this TensorFlow knows that it can raise the type anew

    def __str__(self) -> str:
        """Returns the message in one line.

        An error in a function that TensorFlow traces is raised anew, with the traceback as
        text before the message.
        """
        message = super().__str__().rpartition(f"{type(self).__name__}: ")[2]
        return " ".join(message.split())


class VerificationError(TfmultiError):
    """A step on replicas gives other numbers than on one device; nothing was trained."""


class UserError(TfmultiError, ValueError):
    """What was asked for cannot be done; the message says what to change."""

    exit_code = EXIT_USER


class ConfigError(UserError):
    """A flag, an argument or a configuration file is wrong."""


class ClusterError(UserError):
    """The description of the cluster is wrong."""


class DeviceError(UserError):
    """This machine does not have the devices asked for."""


class DataError(UserError):
    """The data is missing, damaged or not of the form that training needs."""


class ModelError(UserError):
    """The model cannot be built, or not trained as asked."""


class RunDirError(UserError):
    """The run directory cannot be used."""


class ResumeError(UserError):
    """The run cannot go on from where its checkpoints say."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns the end of an error message: the nearest known name, then all of them.

    >>> did_you_mean("resnet5", ["mlp", "resnet50"])
    "did you mean 'resnet50'? Known: mlp, resnet50."
    """
    names = sorted(known)
    near = get_close_matches(name, names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}Known: {', '.join(names)}."

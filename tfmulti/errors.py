"""Defines the errors that tfmulti raises, and their exit codes.

    TfmultiError                 exit code 1: the program failed
    ├── VerificationError        replicas compute other numbers than one device
    ├── ChecksFailed             a check of the doctor has failed
    └── UserError                exit code 2: a mistake of the user
        ├── ConfigError          a wrong flag, argument or configuration file
        ├── ClusterError         a wrong TF_CONFIG, or a wrong cluster
        ├── DeviceError          devices, or memory, that this machine does not have
        ├── DataError            data that is missing, damaged or in a wrong form
        ├── ModelError           a model that cannot be built or trained as asked
        ├── RunDirError          a run directory that cannot be used
        └── ResumeError          a run that cannot resume from its checkpoints

Each message is one line with the value, the rule, the place and the next step.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USER = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT
# Another worker was lost, and no launcher starts this one again. Kubeflow's TFJob restarts it, too.
EXIT_PEER_LOST = 138
# 128 + SIGTERM: everything is saved, and the run can be started again.
EXIT_TERMINATED = 143


# What Keras makes of the message of an error in the `call` of a layer.
_IN_LAYER = re.compile(
    r"Exception encountered when calling .*?\n\s*\x1b\[1m(.*?)\x1b\[0m\s*Arguments received by",
    re.DOTALL,
)


def without_layer(message: str) -> str:
    """Returns the message of an error, without what Keras adds to it about the layer."""
    found = _IN_LAYER.search(message)
    return found[1] if found else message


class TfmultiError(Exception):
    """The base class of every error that tfmulti raises."""

    exit_code: int = EXIT_FAILED
    # The heading of docs/troubleshooting.md for messages without another heading.
    anchor: str = "failed"
    # With this line TensorFlow keeps the type of an error that a traced function raises. It raises
    # the error again, with a traceback in its message.
    __init__ = Exception.__init__

    def __str__(self) -> str:
        """Returns the message in one line.

        What TensorFlow and Keras write around the message is left out: a traceback before it, and
        the arguments of the layer.
        """
        message = super().__str__().rpartition(f"{type(self).__name__}: ")[2]
        return " ".join(without_layer(message).split())


class VerificationError(TfmultiError):
    """A step on replicas gives other numbers than on one device, so nothing was trained."""

    anchor = "verification"


class ChecksFailed(TfmultiError):
    """A check of the doctor has failed. Its report says what to do; a restart cannot help."""


class UserError(TfmultiError, ValueError):
    """The user has asked for something that cannot be done. The message says what to change."""

    exit_code = EXIT_USER
    anchor = "configuration"


class ConfigError(UserError):
    """A flag, an argument or a configuration file is wrong."""


class ClusterError(UserError):
    """The description of the cluster is wrong."""

    anchor = "cluster"


class DeviceError(UserError):
    """This machine does not have the devices or the memory asked for."""

    anchor = "devices"


class DataError(UserError):
    """The data is missing, damaged or not in the form that training needs."""

    anchor = "data"


class ModelError(UserError):
    """The model cannot be built or trained as asked."""

    anchor = "model"


class RunDirError(UserError):
    """The run directory cannot be used."""

    anchor = "run-directory"


class ResumeError(UserError):
    """The run cannot resume from its checkpoints."""

    anchor = "resume"


# A longer list would hide the nearest name.
MOST_LISTED = 20


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Returns the end of an error message: a similar known name if there is one, then all names.

    If there is one, a list of more than `MOST_LISTED` names is left out.

    Args:
        name: the unknown name.
        known: all known names.
        prefix: what a user writes before each name, such as the dashes of a flag.

    >>> did_you_mean("resnet5", ["mlp", "resnet50"])
    "did you mean 'resnet50'? Known: mlp, resnet50."
    >>> did_you_mean("cuont", ["count", "kind"], "--")
    'did you mean --count? Known: --count, --kind.'
    """
    names = sorted(known)
    nearest = get_close_matches(name, names, n=1)
    listed = ", ".join(prefix + name for name in names)
    if not nearest:
        return f"known: {listed}."
    hint = f"did you mean {prefix + nearest[0] if prefix else repr(nearest[0])}?"
    return hint if len(names) > MOST_LISTED else f"{hint} Known: {listed}."

"""Checks the program of a job that a scheduler starts later, and gives it a run directory.

A job may wait for hours before its program can report a typo. So `tfmulti sbatch` and `tfmulti
kubernetes` check the flags of `tfmulti.fit` before they print anything.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from tfmulti.errors import ConfigError

_FIT = ("-m", "tfmulti.fit")


def check_program(program: Sequence[str], example: str) -> None:
    """Checks the words of a program.

    Args:
        program: `-m` and a module, or a script, with its arguments.
        example: a command with a program, for the message.

    Raises:
        ConfigError: there is no program, or the program is `tfmulti.fit` and a flag of it is wrong.
    """
    if not program or tuple(program) == ("-m",):
        raise ConfigError(f"no program was given. Write it after --: {example}.")
    if tuple(program[:2]) != _FIT:
        return
    # The modules of this package import the standard library alone.
    from tfmulti.config.flags import config_of, make_flags, parse_flags

    values = make_flags()
    # sbatch's patterns stand for numbers.
    words = [re.sub("%[jAa]", "0", word) for word in program[1:]]
    # The file of --config may be on the machines of the job alone.
    if parse_flags(values, words) and not values.config:
        config_of(values)


def with_run_dir(program: Sequence[str], run_dir: str) -> list[str]:
    """Returns a program's words. `tfmulti.fit` without a run directory gets this one."""
    has_one = any(word.startswith(("--run_dir", "-run_dir")) for word in program)
    is_fit = tuple(program[:2]) == _FIT
    return [*program, "--run_dir", run_dir] if is_fit and not has_one else list(program)

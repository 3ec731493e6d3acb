"""Runs the commands, and reads the command lines of those without absl's flags.

`Parser` is an argparse parser whose errors are ConfigErrors. `exit_code_of` runs a command, and
turns each error of tfmulti into one line.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from tfmulti.config import limited_reading
from tfmulti.config.troubleshooting import print_error
from tfmulti.errors import EXIT_DONE, EXIT_INTERRUPTED, ConfigError, TfmultiError, did_you_mean

_EXIT_NO_READER = 128 + signal.SIGPIPE


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises ConfigError instead of printing its usage and exiting.

    A flag must be written in full.

    Args:
        prog: the command, as the user types it.
        doc: the description that `--help` shows, with its line breaks.
        program: an example of the command with a program after `--`, if it takes one.
    """

    def __init__(self, prog: str, doc: str, program: str = "") -> None:
        super().__init__(
            prog,
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._program = program

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError with argparse's message."""
        words = message.removeprefix("argument ").rstrip(".")
        raise ConfigError(f"{words}. See {self.prog} --help.")

    def parsed(self, words: Sequence[str]) -> argparse.Namespace:
        """Returns the values of the arguments.

        Raises:
            ConfigError: an argument is unknown, or a value is wrong.
            SystemExit: the help was asked for and has been shown.
        """
        values, unknown = self.parse_known_args(words)
        if not unknown:
            return values
        if self._program and (unknown[0] == "-m" or not unknown[0].startswith("-")):
            raise ConfigError(
                f"unexpected argument {unknown[0]!r}. Write the program after --: {self._program}."
            )
        if not unknown[0].startswith("-"):
            raise ConfigError(f"unexpected argument {unknown[0]!r}. See {self.prog} --help.")
        name = unknown[0].partition("=")[0].lstrip("-").replace("_", "-")
        flags = [flag for action in self._actions for flag in action.option_strings]
        known = {flag[2:].replace("_", "-") for flag in flags if flag.startswith("--")}
        raise ConfigError(f"no flag --{name}; {did_you_mean(name, known - {'help'}, '--')}")


def whole_number(text: str) -> int:
    """Returns the whole number of an argument, which is not negative.

    Raises:
        ArgumentTypeError: the text is not such a number.

    >>> whole_number("12")
    12
    """
    number = limited_reading.whole_number(text)
    if number is None:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number")
    return number


def load_for_exit() -> None:
    """Loads the library that glibc needs when a thread ends at the exit of the process.

    If no file could be opened by then, glibc would abort the process.
    """
    with contextlib.suppress(OSError):
        ctypes.CDLL("libgcc_s.so.1")


def exit_code_of(command: Callable[[], int | None]) -> int:
    """Runs a command that prints to standard output, and returns its exit code.

    An error of tfmulti is printed in one line. If the reader of the output ends first, as in
    `tfmulti fit --help | head -1`, the command ends without a message. If it has not done its work
    by then, its exit code is 141, as of a program that SIGPIPE ends.

    Args:
        command: returns the exit code, or None if all went well.
    """
    load_for_exit()
    code = _EXIT_NO_READER
    try:
        try:
            code = command() or EXIT_DONE
        except TfmultiError as error:
            print_error(error)
            code = int(error.exit_code)
        except KeyboardInterrupt:
            code = EXIT_INTERRUPTED
        except SystemExit as end:
            # argparse raises this after it has printed the help.
            if end.code:
                raise
            code = EXIT_DONE
        sys.stdout.flush()
    except BrokenPipeError:
        if not _has_lost_its_reader(sys.stdout.fileno()):
            # A connection to another worker has ended.
            raise
        # Python writes the rest when it exits, and that would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _has_lost_its_reader(output: int) -> bool:
    """Returns whether no process can still read what is written to a descriptor, see poll(2)."""
    poll = select.poll()
    poll.register(output, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))

"""Prints on the terminal of a run, where the chief speaks and the other workers are silent."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator

from tfmulti.config.troubleshooting import documented, escaped

Say = Callable[[str, str], None]


def speaker(is_chief: bool) -> Say:
    """Returns a function `say(label, text)` that prints a line, on the chief only."""

    def say(label: str, text: str) -> None:
        if is_chief:
            print(f"{label:<10} {escaped(documented(text))}", flush=True)

    return say


def left_out(words: str) -> None:
    """Prints to standard error that an example was left out because it cannot be read.

    Args:
        words: where the example is, and why it cannot be read.
    """
    print(f"tfmulti: left out {escaped(words)}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Holds back what is written to standard error in the block, and prints it if the block fails.

    TensorFlow's C++ code prints lines about CPU features and missing GPUs at every start, before a
    log level can be set. An error that has an exit code, such as a user's mistake, prints nothing
    of them.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException as error:
            os.dup2(kept, 2)
            if not getattr(error, "exit_code", None):
                held.seek(0)
                os.write(2, held.read())
            raise
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def number(value: float) -> str:
    """Returns a number as text, with four significant digits or with a comma for each thousand.

    >>> number(1234567.8), number(0.012345)
    ('1,234,568', '0.01235')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"

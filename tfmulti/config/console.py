"""What a run says on the terminal: the chief speaks, the other workers do not."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator

Say = Callable[[str, str], None]


def speaker(is_chief: bool) -> Say:
    """Returns `say(label, text)`: a labelled line on the chief, nothing elsewhere."""

    def say(label: str, text: str) -> None:
        if is_chief:
            print(f"{label:<10} {text}", flush=True)

    return say


def left_out(words: str) -> None:
    """Prints of an example that could not be read where it is and why."""
    print(f"tfmulti: left out {words}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Holds back what libraries write to standard error, and shows it if an error follows.

    TensorFlow's C++ parts greet every start with lines about CPU features and missing GPUs,
    before any log level can be set.
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
    """Returns a figure to read: four significant digits, thousands marked.

    >>> number(1234567.8), number(0.012345)
    ('1,234,568', '0.01235')
    """
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"

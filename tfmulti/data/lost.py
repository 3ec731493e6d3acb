"""Examples that could not be read when the data was loaded, and their limit.

Every pass over the data lacks these examples, and a pass may lose more while it reads. The training
loop adds up both; this module checks the losses of loading alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from tfmulti.config.reading import NEXT_STEP
from tfmulti.errors import DataError


def check_lost(lost: Sequence[str], most: int) -> None:
    """Checks that at most `most` examples are left out.

    Args:
        lost: for each example one sentence that says where it is, and why it cannot be read.
        most: how many may be left out.

    Raises:
        DataError: more examples are left out; the message names the first of them.
    """
    if len(lost) <= most:
        return
    if not most:
        raise DataError(f"{lost[0]} {NEXT_STEP}")
    raise DataError(
        f"{len(lost):,} examples cannot be read, more than --skip_bad_records {most} allows; "
        f"the first is {lost[0]} Repair the data, or raise --skip_bad_records."
    )


@contextlib.contextmanager
def naming(lost: Sequence[str]) -> Iterator[None]:
    """Adds to a DataError from the context the first example that was left out before, if any.

    What is left out may be the cause, such as the only rows of a class.

    Args:
        lost: for each example one sentence that says where it is, and why it cannot be read.

    Raises:
        DataError: the context has raised it.
    """
    try:
        yield
    except DataError as error:
        if not lost:
            raise
        count = f"{len(lost):,} row{'s' if len(lost) > 1 else ''}"
        raise DataError(f"{error} {count} cannot be read; the first is {lost[0]}") from None

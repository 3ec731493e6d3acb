"""Examples that could not be read when the data was loaded: their number and its limit.

Every pass over the data lacks these examples, and a pass may lose more while it reads. The training
loop adds up both; this module checks the losses of loading alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tfmulti.config.reading import NEXT_STEP
from tfmulti.errors import DataError


class Lost(NamedTuple):
    """Examples that are left out together, and one sentence that says where they are and why."""

    words: str
    examples: int = 1


def lost_examples(lost: Sequence[Lost]) -> int:
    """Returns the number of examples that are left out.

    >>> lost_examples([Lost("row 3 of a.csv: it is cut off."), Lost("row group 1: it is.", 10)])
    11
    """
    return sum(each.examples for each in lost)


def check_lost(lost: Sequence[Lost], most: int) -> None:
    """Checks that at most `most` examples are left out.

    Raises:
        DataError: more examples are left out; the message names the first of them.
    """
    count = lost_examples(lost)
    if count <= most:
        return
    first = lost[0].words
    if not most:
        raise DataError(f"{first} {NEXT_STEP}")
    raise DataError(
        f"{count:,} examples cannot be read, more than --skip_bad_records {most} allows; "
        f"the first is {first} Mend the data, or allow more."
    )

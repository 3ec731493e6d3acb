"""Examples that could not be read when data was loaded: how many they are, and may be.

Each pass over the data lacks them. Only who knows the other losses of a pass adds them up
(`epochs`); here it is said of loading alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tfmulti.config.reading import NEXT_STEP
from tfmulti.errors import DataError


class Lost(NamedTuple):
    """Examples that are left out together: where they are and why, in one sentence."""

    words: str
    examples: int = 1


def lost_examples(lost: Sequence[Lost]) -> int:
    """Returns how many examples are left out.

    >>> lost_examples([Lost("row 3 of a.csv: it is cut off."), Lost("row group 1: it is.", 10)])
    11
    """
    return sum(each.examples for each in lost)


def check_lost(lost: Sequence[Lost], most: int) -> None:
    """Checks that no more examples are left out than may be, `most`.

    Raises:
        DataError: more are; it names the first of them.
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

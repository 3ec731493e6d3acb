"""How data is read: what a user may choose, as a value."""

from __future__ import annotations

from dataclasses import dataclass

from tfmulti.errors import ConfigError

NEXT_STEP = "Mend or remove it, or give --skip_bad_records N to leave out up to N such examples."


@dataclass(frozen=True)
class ReadOptions:
    """How the examples of a source are read.

    `threads` is how many examples are read at a time by each worker (0: in the thread that
    feeds the step; None: as it is measured). Up to `skip_bad_records` examples that cannot be
    read are left out in each pass over the data, counted over all workers, with the
    `lost_at_loading` that each pass lacks. Where none may be and several workers read, the step
    tells all of them of the first one. Where each example has an output, as in `predict`, none
    may be: `keeps_each`.

    Raises:
        ConfigError: a number below 0.
    """

    threads: int | None = None
    skip_bad_records: int = 0
    lost_at_loading: int = 0
    keeps_each: bool = False

    def __post_init__(self) -> None:
        for name, value in (
            ("reader_threads", self.threads),
            ("skip_bad_records", self.skip_bad_records),
        ):
            if value is not None and value < 0:
                raise ConfigError(f"{name} is {value}, but it must be at least 0.")

    @property
    def next_step(self) -> str:
        """What to do about an example that cannot be read."""
        if self.keeps_each:
            return "Mend or remove it: predict has a row for each example, so it leaves out none."
        return NEXT_STEP

"""`ReadOptions`: what a user may choose about the reading of data, and the limit of bad records."""

from __future__ import annotations

from dataclasses import dataclass

from tfmulti.errors import ConfigError, DataError

NEXT_STEP = "Repair or remove it, or give --skip_bad_records N to leave out up to N such examples."


@dataclass(frozen=True)
class ReadOptions:
    """How the examples of a source are read.

    Args:
        threads: how many examples each worker reads at a time. 0 reads in the thread that feeds the
            steps. None decides by measuring the time that reading takes.
        skip_bad_records: how many examples may be left out of each pass over the data because they
            cannot be read, counted over all workers. With 0 the first such example is an error. If
            there are several workers, the step then tells all of them.
        lost_at_loading: how many examples could not be read when the data was loaded. Every pass
            lacks them, so they count too.
        keeps_each: whether each example needs an output, as in `predict`. Then no example may be
            left out.

    Raises:
        ConfigError: `threads` or `skip_bad_records` is below 0.
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
    def skips_bad(self) -> bool:
        """Whether examples that cannot be read are left out."""
        return self.skip_bad_records > 0

    def check_lost(self, lost: int) -> None:
        """Checks that a pass over the data has not lost too many examples.

        Raises:
            DataError: the `lost` examples, and those lost at loading, are more than
                `skip_bad_records`.
        """
        if lost + self.lost_at_loading <= self.skip_bad_records:
            return
        loaded = f" and {self.lost_at_loading} when it was loaded" if self.lost_at_loading else ""
        raise DataError(
            f"{lost} examples of this pass over the data could not be read{loaded}, more than "
            f"--skip_bad_records {self.skip_bad_records} allows; each was named when it was read. "
            "Repair the data, or raise --skip_bad_records."
        )

    @property
    def next_step(self) -> str:
        """The end of an error message: what to do about an example that cannot be read."""
        if self.keeps_each:
            return "Repair or remove it: predict returns a row for each example."
        return NEXT_STEP

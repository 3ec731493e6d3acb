"""What to do where the steps wait for data, in a line."""

from __future__ import annotations

MUCH = 0.1  # of the steps' time: less is not worth a line


def advice(share: float, threads: int | None, *, cached: bool, cores: int = 0) -> str:
    """Returns what a waiting share means and which flag to try.

    Args:
        share: the part of the steps' time that was waiting, 0 to 1.
        threads: those that read (0: the one that feeds the steps); None: there are none,
            since the data comes in batches of its own.
        cached: whether the examples are kept after they were read once.
        cores: those of this worker.

    >>> advice(0.61, 2, cached=False, cores=4)
    'input-bound: 61 % of the step is waiting for data; try --reader_threads 4'
    """
    words = f"input-bound: {share:.0%} of the step is waiting for data; ".replace("%", " %", 1)
    if threads is None:
        return words + "the Dataset yields too slowly: give it num_parallel_calls and prefetch"
    if threads < cores:
        return words + f"try --reader_threads {cores}"
    if not cached:
        return words + "try --cache memory, or --cache disk where that is too large"
    return words + "reading takes all cores: give it more of them, or smaller examples"

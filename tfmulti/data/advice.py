"""Advice in one line for a run whose steps wait for data."""

from __future__ import annotations

# Steps that wait for a smaller share of their time than this get no advice.
HIGH_SHARE = 0.1


def advice(share: float, threads: int | None, *, cached: bool, cores: int = 0) -> str:
    """Returns one line that says what a waiting share means and which flag to try.

    Args:
        share: the part of the steps' time that was spent waiting for data, 0 to 1.
        threads: the number of reader threads; 0 if the thread that feeds the steps reads the data
            itself. None if the data comes as a Dataset of batches, which has no reader threads.
        cached: whether the examples are kept after they were read once.
        cores: the number of cores of this worker.

    >>> advice(0.61, 2, cached=False, cores=4)
    'input-bound: 61 % of the step is waiting for data; try --reader_threads 4'
    """
    message = f"input-bound: {100 * share:.0f} % of the step is waiting for data; "
    if threads is None:
        return message + "give a Dataset num_parallel_calls and prefetch, or a PyDataset workers"
    if threads < cores:
        return message + f"try --reader_threads {cores}"
    if not cached:
        return message + "try --cache memory, or --cache disk where that is too large"
    return message + "reading takes all cores: give it more of them, or smaller examples"

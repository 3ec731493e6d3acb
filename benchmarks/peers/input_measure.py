"""Measures a side of `benchmarks.input` in its own process."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

# The time of reading after the first batch.
LONG_S = 4.0


def measure(
    begin: Callable[[], Iterator[int]],
    end: Callable[[], None] = lambda: None,
    resume: Callable[[], Callable[[], Any]] | None = None,
) -> None:
    """Measures a side and prints its figures as a line of JSON.

    Args:
        begin: builds the pipeline, and returns an endless iterator of the rows of each batch.
        end: ends the pipeline.
        resume: prepares a new pipeline, and returns a function that reads the first batch after
            90 % of an epoch. Only this function is timed.
    """
    print("READY", flush=True)
    # The parent measures the memory before anything is read.
    sys.stdin.readline()
    began = time.perf_counter()
    batches = begin()
    next(batches)
    first_s = time.perf_counter() - began
    rows, began = 0, time.perf_counter()
    while time.perf_counter() - began < LONG_S:
        rows += next(batches)
    per_s = rows / (time.perf_counter() - began)
    print("READ", flush=True)
    sys.stdin.readline()
    began = time.perf_counter()
    del batches
    end()
    end_s = time.perf_counter() - began
    resume_s = None
    if resume is not None:
        take = resume()
        began = time.perf_counter()
        take()
        resume_s = time.perf_counter() - began
    figures = {
        "examples_per_s": per_s,
        "first_batch_s": first_s,
        "end_s": end_s,
        "resume_s": resume_s,
    }
    print(json.dumps(figures), flush=True)

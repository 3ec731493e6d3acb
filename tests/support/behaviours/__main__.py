"""Runs all behaviours under any strategy.

    python -m tests.support.behaviours OUT STRATEGY [REPLICAS]

writes OUT (RANK in it becomes the worker's rank): a JSON object, behaviour -> what it
returned, or `{"error": [type, message]}`.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path

import keras

from tests.support.behaviours import (
    batches,
    compiled,
    costs,
    numbers,
    rewritten,
    stops,
    upstream,
    usage,
    verifying,
)
from tests.support.behaviours.common import BEHAVIOURS, KINDS, here
from tfmulti import make_strategy
from tfmulti.distribution.strategies import placement_of

MODULES = (
    usage,
    batches,
    numbers,
    compiled,
    rewritten,
    stops,
    upstream,
    costs,
    verifying,
)  # importing them registers what they hold


def main(out: str, kind: str, replicas: str | None = None, *only: str) -> None:
    gc.freeze()  # Keras collects garbage before each: in vain among what was imported
    here.strategy = make_strategy(kind, replicas=int(replicas) if replicas else None)
    here.place = placement_of(here.strategy)
    here.shared = Path(out).parent / "shared"
    here.shared.mkdir(exist_ok=True)
    results = {}
    for name, function in BEHAVIOURS.items():
        if kind not in KINDS.get(name, (kind,)) or (only and name not in only):
            continue
        started = time.perf_counter()
        keras.utils.clear_session()
        try:
            results[name] = function()
        except Exception as error:
            results[name] = {"error": [type(error).__name__, str(error)]}
        print(f"{time.perf_counter() - started:6.2f} s  {name}", flush=True)
    Path(out.replace("RANK", str(here.place.rank))).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])

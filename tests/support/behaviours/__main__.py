"""Runs behaviours at a place.

    python -m tests.support.behaviours OUT PLACE MODULE:FUNCTION[:CASE] …

writes OUT, in which RANK becomes the worker's rank: a JSON object with `{"result": value}` or
`{"error": [type, message], "traceback": text}` for each behaviour.
"""

from __future__ import annotations

import gc
import importlib
import json
import sys
import time
import traceback
from pathlib import Path

import keras

from tests.support.behaviours.common import here
from tests.support.cases import strategy_at
from tfmulti.distribution.strategies import placement_of


def main(out: str, place: str, *names: str) -> None:
    # Keras collects garbage before each behaviour, and need not look through its imports.
    gc.freeze()
    here.strategy = strategy_at(place)
    here.placement = placement_of(here.strategy)
    outcomes = {}
    for number, name in enumerate(names):
        started, before = time.perf_counter(), time.process_time()
        here.shared = Path(out).parent / f"shared_{number}"
        here.shared.mkdir(exist_ok=True)
        module, function, *case = name.split(":", 2)
        keras.utils.clear_session()
        try:
            result = getattr(importlib.import_module(module), function)(*case)
            outcomes[name] = {"result": result}
        except Exception as error:
            described = [type(error).__name__, str(error)]
            outcomes[name] = {"error": described, "traceback": traceback.format_exc()}
        seconds, busy = time.perf_counter() - started, time.process_time() - before
        print(f"{seconds:6.2f} s, {busy:6.2f} s of a core  {name}", flush=True)
    Path(out.replace("RANK", str(here.placement.rank))).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Trains by tfmulti's `prepare` and `model.fit`.

    python -m benchmarks.peers.training_tfmulti WORKLOAD one|mirrored|workers [NAME=VALUE …]

NAME=VALUE are arguments of `prepare`.
"""

from __future__ import annotations

import ast
import sys
from typing import Any

from benchmarks.peers.training_clock import StepClock
from benchmarks.workloads import WORKLOADS, compile_model, keras_model


def main(name: str, kind: str, *options: str) -> None:
    import tfmulti

    strategy = tfmulti.make_strategy(
        {"one": "one_device", "mirrored": "mirrored", "workers": "multi_worker_mirrored"}[kind],
        replicas=2 if kind == "mirrored" else None,
    )
    import keras

    work = WORKLOADS[name]
    with strategy.scope():
        model = keras_model(name, keras)
        changes = {n: _value(v) for n, _, v in (option.partition("=") for option in options)}
        tfmulti.prepare(model, seed=1, **changes)
        compile_model(model, keras)
    clock = StepClock(work.warm_up)

    x, y = work.data()
    model.fit(x, y, batch_size=work.batch, verbose=0, callbacks=[clock.callback(keras)])
    clock.print()


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


if __name__ == "__main__":
    main(*sys.argv[1:])

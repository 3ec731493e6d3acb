"""Trains on several workers and writes down which examples each of them read.

python -m tests.support.reads OUT_RANK.json
"""

from __future__ import annotations

import contextlib
import errno
import gc
import io
import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.support.threads import left_since
from tfmulti import make_strategy, prepare
from tfmulti.data.arrays import ArraySource
from tfmulti.distribution.strategies import placement_of
from tfmulti.errors import DataError
from tfmulti.training.state.trainer_state import state_of

EXAMPLES, BATCH, EPOCHS = 50, 12, 2
BAD = (3, 17, 44)


class Logged(ArraySource):
    """Notes (epoch, example) of each read, and its bytes; some examples cannot be read."""

    def __init__(self, rows: int, bad: tuple[int, ...] = (), pause_s: float = 0.0) -> None:
        x = np.random.default_rng(2).standard_normal((rows, 4)).astype(np.float32)
        super().__init__((x, (np.arange(rows) % 3).astype(np.int32)))
        self.bad, self.pause_s = bad, pause_s
        self.error = OSError(5, "Input/output error")
        self.reads: list[tuple[int, int]] = []
        self.bytes = self.pauses = 0
        self._lock = threading.Lock()

    def read_into(self, indices: np.ndarray, epoch: int, out: Any) -> None:
        time.sleep(self.pause_s)
        self.pauses += epoch == EPOCHS - 1
        if set(self.bad) & set(indices.tolist()):
            raise self.error
        with self._lock:
            self.reads += [(epoch, index) for index in indices.tolist()]
        super().read_into(indices, epoch, out)
        self.bytes += sum(leaf.nbytes for leaf in out)

    def where(self, index: int) -> str:
        return f"some.file, record {index}"


def main(out: str) -> None:
    gc.freeze()  # the collector need not look through TensorFlow
    strategy = make_strategy()

    def trained(source: Any, validation: Any = None, **options: Any) -> keras.Model:
        keras.utils.set_random_seed(3)
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, "softmax")])
            prepare(model, seed=9, **options)
            model.compile(keras.optimizers.SGD(0.1), "sparse_categorical_crossentropy")
        model.fit(
            source,
            batch_size=BATCH if isinstance(source, ArraySource) else None,
            epochs=EPOCHS,
            validation_data=validation,
            verbose=0,
        )
        return model

    found: dict[str, Any] = {}
    threads = set(threading.enumerate())
    source, validation = Logged(EXAMPLES), Logged(7)
    plain = model = trained(source, validation, reader_threads=2)
    found["training"], found["bytes"] = source.reads, source.bytes
    found["validation"], found["loss"] = validation.reads, model.history.history["loss"]
    few = Logged(2)
    trained(few, reader_threads=0)
    found["few"] = few.reads
    slow = Logged(EXAMPLES, pause_s=0.4)
    state = state_of(trained(slow, reader_threads=0))
    found["waited"], found["paused"] = state.epoch.waited_s, slow.pauses * slow.pause_s
    found["epoch"] = state.epoch.seconds
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        skipping = Logged(EXAMPLES, BAD)
        model = trained(skipping, reader_threads=0, skip_bad_records=len(BAD))
        found["skipped"] = [skipping.reads, state_of(model).run.lost, state_of(model).run.examples]
        for name, most in (("too many", len(BAD) - 1), ("any", 0)):
            try:
                trained(Logged(EXAMPLES, BAD), reader_threads=0, skip_bad_records=most)
            except DataError as error:
                found[name] = str(error)
        gone = Logged(EXAMPLES, BAD[:1])
        gone.error = OSError(errno.ESTALE, "Stale file handle")
        try:
            trained(gone, reader_threads=0)
        except DataError as error:
            found["gone"] = str(error)
        try:
            trained(Logged(EXAMPLES), Logged(EXAMPLES, BAD[:1]), reader_threads=0)
        except DataError as error:
            found["any of validation"] = str(error)
        for name, reads in (("evaluation", plain.evaluate), ("prediction", model.predict)):
            for bad in ((), BAD):
                try:
                    reads(Logged(EXAMPLES, bad), batch_size=BATCH, verbose=0)
                except DataError as error:
                    found[f"any of {name}" if bad else name] = str(error)
    found["said"] = said.getvalue()
    rank = placement_of(strategy).rank
    values = Logged(EXAMPLES)
    values.data[0][EXAMPLES // 2] += rank
    batches = tf.data.Dataset.from_tensor_slices(Logged(EXAMPLES).data).batch(BATCH)
    others = {
        "rows": Logged(EXAMPLES + rank),
        "values": values,
        "kind": batches if rank else Logged(EXAMPLES),
    }
    for name, other in others.items():
        try:
            trained(other)
            found[f"other {name}"] = None
        except DataError as error:
            found[f"other {name}"] = str(error)
    found["left"] = left_since(threads)
    Path(out.replace("RANK", str(rank))).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

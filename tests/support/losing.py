"""Trains on two workers, of which the second is lost in its fourth step, and says what came of it.

python -m tests.support.losing HOW   (with TF_CONFIG; HOW: kill, stop, error, step, or a method)

With `step` its step fails, and the process lives on. With the name of a method no worker is lost,
but the chief alone calls this method.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
import time
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tfmulti import make_strategy, prepare, verify
from tfmulti.distribution.strategies import placement_of

ALONE = ("fit", "evaluate", "predict", "verify", "train_on_batch")
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def main(how: str) -> int:
    strategy = make_strategy()
    rank = placement_of(strategy).rank

    class Loses(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            if rank == 1 and batch == 3 and how not in ("step", *ALONE):
                if how in SIGNALS:
                    os.kill(os.getpid(), SIGNALS[how])
                raise RuntimeError("of this worker alone")

    def loss(y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        if rank == 1 and how == "step":
            tf.debugging.assert_less(tf.cast(model.optimizer.iterations.value, tf.int32), 3)
        return tf.reduce_mean(tf.square(y_true - y_pred), -1)

    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        prepare(model, seed=1)
        model.compile("sgd", loss)
    x = np.ones((200, 4), np.float32)
    try:
        model.fit(x, x[:, :3], batch_size=10, verbose=0, callbacks=[Loses()])
        if how in ALONE and rank == 0:
            targets = [] if how == "predict" else [x[:, :3]]
            options = {} if how in ("verify", "train_on_batch") else {"verbose": 0}
            method = functools.partial(verify, model) if how == "verify" else getattr(model, how)
            method(x, *targets, **options)
    except tf.errors.OpError as error:
        print(type(error).__name__, error.message.splitlines()[0])
        sys.stdout.flush()
        if rank == 1:
            time.sleep(600)
        os._exit(3)  # TensorFlow would wait for the lost worker
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

"""A regression under MirroredStrategy, as in TensorFlow's introduction to it.

    python examples/regression.py

trains Dense(64, relu) -> Dense(1) with Adam 0.01 on 100 rows of normal data, batch 16, 10
epochs of 10 steps, on two replicas (logical CPU devices where there are no GPUs), and ends
with a line like: loss 0.94 -> 0.01
"""

import keras
import numpy as np

from tfmulti import make_strategy, prepare

strategy = make_strategy("mirrored", replicas=2)

rng = np.random.default_rng(0)
x = rng.standard_normal((100, 10))
y = x @ rng.standard_normal((10, 1)) / 10**0.5

with strategy.scope():
    model = prepare(
        keras.Sequential(
            [keras.Input((10,)), keras.layers.Dense(64, "relu"), keras.layers.Dense(1)]
        )
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")

history = model.fit(x, y, batch_size=16, epochs=10, steps_per_epoch=10, verbose=0).history
print(f"loss {history['loss'][0]:.2f} -> {history['loss'][-1]:.2f}")

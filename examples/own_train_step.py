"""A model with a train_step of its own, on replicas or on workers, unchanged.

    python examples/own_train_step.py

trains on one device; with TF_CONFIG set, one process a worker, on all workers together. The
step is written for one device: tfmulti averages its gradients over the global batch. It ends
with a line like: accuracy 0.98 on 1 replicas
"""

import keras
import numpy as np
import tensorflow as tf

from tfmulti import make_strategy, prepare


class Classifier(keras.Model):
    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(32, "relu")
        self.out = keras.layers.Dense(2, "softmax")
        self.loss_object = keras.losses.SparseCategoricalCrossentropy()
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")

    def call(self, x):
        return self.out(self.hidden(x))

    @property
    def metrics(self):
        return [self.accuracy]

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            predictions = self(x, training=True)
            loss = self.loss_object(y, predictions)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self.accuracy.update_state(y, predictions)
        return {"accuracy": self.accuracy.result()}


strategy = make_strategy("auto")
keras.utils.set_random_seed(0)

x = np.random.standard_normal((512, 8)).astype("float32")
y = (x[:, 0] * x[:, 1] > 0).astype("int32")

with strategy.scope():
    model = prepare(Classifier())
    model.compile(keras.optimizers.Adam(0.01))

history = model.fit(x, y, batch_size=64, epochs=20, verbose=0).history
print(f"accuracy {history['accuracy'][-1]:.2f} on {strategy.num_replicas_in_sync} replicas")

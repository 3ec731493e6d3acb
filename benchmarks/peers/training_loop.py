"""Trains by the loop of TensorFlow's guide to custom training.

python -m benchmarks.peers.training_loop WORKLOAD one|workers
"""

from __future__ import annotations

import sys
from typing import Any

import keras
import tensorflow as tf

from benchmarks.peers.training_clock import StepClock
from benchmarks.workloads import LEARNING_RATE, MOMENTUM, WORKLOADS, keras_model


def main(name: str, kind: str) -> None:
    work = WORKLOADS[name]
    several = kind == "workers"
    strategy = (
        tf.distribute.MultiWorkerMirroredStrategy() if several else tf.distribute.get_strategy()
    )
    x, y = work.data()
    data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=1).repeat()
    data = data.batch(work.batch).prefetch(2)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    shared = strategy.experimental_distribute_dataset(data.with_options(options))
    with strategy.scope():
        model = keras_model(name, keras)
        optimizer = keras.optimizers.SGD(LEARNING_RATE, momentum=MOMENTUM)
        optimizer.build(model.trainable_variables)
        loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
        accuracy = keras.metrics.SparseCategoricalAccuracy()
        accuracy.update_state(tf.zeros([1], tf.int32), tf.zeros([1, work.outputs]))

    def step(batch: Any) -> tf.Tensor:
        images, labels = batch
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = tf.nn.compute_average_loss(loss_of(labels, logits), global_batch_size=work.batch)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        accuracy.update_state(labels, logits)
        return loss

    @tf.function
    def train_step(iterator: Any) -> tf.Tensor:
        losses = strategy.run(step, args=(next(iterator),))
        return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

    iterator = iter(shared)
    clock = StepClock(work.warm_up)
    for number in range(work.warm_up + work.steps):
        float(train_step(iterator))
        clock.end(number + 1)
    clock.print()


if __name__ == "__main__":
    main(*sys.argv[1:])

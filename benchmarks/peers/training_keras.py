"""Trains by `model.fit` of Keras 3 or tf_keras: alone, under MirroredStrategy or on two workers.

    python -m benchmarks.peers.training_keras WORKLOAD one|mirrored|workers keras|tf_keras [STEPS]

STEPS is compile's `steps_per_execution`.
"""

from __future__ import annotations

import contextlib
import importlib
import sys

import tensorflow as tf

from benchmarks.peers.training_clock import StepClock
from benchmarks.workloads import WORKLOADS, compile_model, keras_model


def main(name: str, kind: str, package: str, steps: str = "1") -> None:
    keras = importlib.import_module(package)
    work = WORKLOADS[name]
    strategy = None
    if kind == "mirrored":
        cpu = tf.config.list_physical_devices("CPU")[0]
        devices = [tf.config.LogicalDeviceConfiguration()] * 2
        tf.config.set_logical_device_configuration(cpu, devices)
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    elif kind == "workers":
        strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope() if strategy else contextlib.nullcontext():
        model = keras_model(name, keras)
        compile_model(model, keras, int(steps))
    clock = StepClock(work.warm_up)

    x, y = work.data()
    # tf_keras shards a Dataset by its rows.
    if kind == "workers":
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = (
            tf.data.experimental.AutoShardPolicy.DATA
        )
        data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x), seed=1).batch(work.batch)
        x, y = data.with_options(options), None
    batch = None if y is None else work.batch
    model.fit(x, y, batch_size=batch, verbose=0, callbacks=[clock.callback(keras)])
    clock.print()


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Sums of float32 values that travel between workers in half the bytes, added in float32.

TensorFlow's all-reduce adds in the type that travels: with more than two workers it rounds on
each hop, and small parts beside large ones are lost. Here every worker gets one piece of all
workers' values (an all-to-all), adds it in float32, rounds once, and gives the sum to all (an
all-gather): reduce-scatter and all-gather as in Thakur, Rabenseifner and Gropp, Optimization of
collective communication operations in MPICH, 2005. That takes the bytes of a ring, 2 (n - 1) / n of
what is summed, and each sum is made in one place, so it is the same on all.
"""

from __future__ import annotations

import tensorflow as tf

from tfmulti import collectives


def total(narrow: tf.Tensor) -> tf.Tensor | None:
    """Returns the sum of all workers' values as float32; None where it cannot be made here.

    All workers get the same bits. The sum is rounded to the type that travels.

    Args:
        narrow: `[n]`, float16 or bfloat16, of a length known when the step is traced.
    """
    workers = collectives.workers_at(narrow)
    if workers is None:
        return None
    size = narrow.shape.num_elements()
    piece = -(-size // workers)
    padded = tf.pad(narrow, [[0, piece * workers - size]])
    pieces = collectives.swap(tf.reshape(padded, [workers, piece]))
    own = tf.cast(tf.reduce_sum(tf.cast(pieces, tf.float32), 0), narrow.dtype)
    # The halves of a bfloat16 are gathered as those of a float16, which the kernel takes.
    everyone = collectives.gather(tf.bitcast(own, tf.float16))
    joined = tf.reshape(tf.bitcast(everyone, narrow.dtype), [-1])[:size]
    return tf.cast(joined, tf.float32)

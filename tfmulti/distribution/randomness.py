"""Random numbers of a global batch: each replica draws those of its own rows.

On one device a layer draws one tensor for the batch, of which row `i` belongs to example
`i`. Here each replica draws from the same seed the numbers that stand at its own rows of
that tensor: two replicas never share a mask, an example is augmented alike on any number of
workers, and the numbers are those of one device.

TensorFlow's stateless generator is Philox (Salmon et al., Parallel random numbers: as easy
as 1, 2, 3, SC 2011): the numbers come from a counter, so a replica begins at its own place
without drawing what stands before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfmulti.distribution import row_labels
from tfmulti.distribution.replica_slice import ReplicaSlice

Draw = Callable[..., Any]  # (Keras' own function, share, drawn seed, Keras' arguments)

_BITS = 128  # of one value of Philox' counter


def by_parts(
    draw: Callable[..., Any], share: ReplicaSlice, seed: tf.Tensor, arguments: dict[str, Any]
) -> Any:
    """Returns `draw(share, seed, **arguments)`, part by part where rows were concatenated.

    Of a batch that was concatenated with another one along the rows, as a discriminator gets it,
    each part has its own place among the numbers that one device draws.
    """
    tensor = arguments.get("inputs", arguments.get("logits", arguments.get("x")))
    shape = arguments.get("shape")
    parts = _parts_of(tensor if tensor is not None else shape)
    if parts is None or len(parts) == 1 or 0 in parts or "x" in arguments:
        drawn = draw(share, seed, **arguments)
        if parts is not None and "x" not in arguments:
            row_labels.mark(drawn, row_labels.rows(parts))
        elif tensor is None:
            known = not any(tf.is_tensor(size) for size in _as_list(shape))
            reason = "random numbers of a shape that does not count the rows of the batch"
            row_labels.mark(drawn, row_labels.ALIKE if known else row_labels.local(reason))
        return drawn
    read = tf.maximum(share.own_rows, 1)
    before, drawn = 0, []
    pieces = tf.split(tensor, [k * read for k in parts]) if tensor is not None else None
    for number, k in enumerate(parts):
        # The draws count rows of examples, of which each has `k`.
        first = share.first_row + before * share.global_rows // k
        rows = share.global_rows * sum(parts) // k
        own = share._replace(first_row=first, global_rows=rows)
        given = dict(arguments)
        if pieces is not None:
            given["inputs" if "inputs" in given else "logits"] = pieces[number]
        else:
            given["shape"] = [tf.cast(k * read, tf.int32), *_as_list(shape)[1:]]
        drawn.append(draw(own, seed, **given))
        before += k
    found = tf.concat(drawn, 0)
    row_labels.mark(found, row_labels.rows(parts))
    return found


def _parts_of(value: Any) -> tuple[int, ...] | None:
    """Returns the parts of the rows that a tensor has, or that a shape counts."""
    if not row_labels.are_kept():
        return None
    if isinstance(value, tf.Tensor) and value.dtype.is_floating:
        return row_labels.label_of(value).parts or None
    if isinstance(value, tf.Tensor) and value.shape.rank == 1:
        return row_labels.parts_counted(value)
    if isinstance(value, (list, tuple)) and len(value) and tf.is_tensor(value[0]):
        return row_labels.parts_counted(value[0])
    return None


def uniform(
    share: ReplicaSlice,
    seed: tf.Tensor,
    shape: Any,
    minval: Any,
    maxval: Any,
    dtype: Any,
) -> tf.Tensor:
    """Returns uniform numbers in [minval, maxval), as `tf.random.stateless_uniform` has them.

    `shape` is that of this share: where its first axis counts rows, the numbers are those of
    these rows in the tensor of the global batch; else all shares draw the same.
    """
    dtype = tf.as_dtype(dtype)
    low, high = tf.cast(minval, dtype), tf.cast(maxval, dtype)
    if dtype.is_integer:
        draw = tf.raw_ops.StatelessRandomUniformIntV2
        return _aligned(share, shape, dtype.size, seed, draw, minval=low, maxval=high)
    unit = _aligned(
        share, shape, dtype.size, seed, tf.raw_ops.StatelessRandomUniformV2, dtype=dtype
    )
    return unit * (high - low) + low


def randint(
    share: ReplicaSlice,
    seed: tf.Tensor,
    shape: Any,
    minval: Any,
    maxval: Any,
    dtype: Any,
) -> tf.Tensor:
    """Returns whole numbers in [minval, maxval); see `uniform`."""
    known = keras.backend.standardize_dtype(dtype) in ("int32", "int64")
    drawn = dtype if known else "int64"
    return tf.cast(uniform(share, seed, shape, minval, maxval, drawn), dtype)


def normal(
    share: ReplicaSlice,
    seed: tf.Tensor,
    shape: Any,
    mean: Any,
    stddev: Any,
    dtype: Any,
) -> tf.Tensor:
    """Returns normal numbers, as `tf.random.stateless_normal` has them; see `uniform`."""
    dtype = tf.as_dtype(dtype)
    numbers = _aligned(
        share, shape, dtype.size, seed, tf.raw_ops.StatelessRandomNormalV2, dtype=dtype
    )
    return numbers * tf.cast(stddev, dtype) + tf.cast(mean, dtype)


def dropout(
    original: Draw, share: ReplicaSlice, seed: tf.Tensor, inputs: Any, rate: float, noise_shape: Any
) -> tf.Tensor:
    """Returns the inputs with some elements 0 and the others scaled by 1 / (1 - rate)."""

    sizes = shape_of(inputs)
    if noise_shape is not None:
        sizes = [sizes[i] if size is None else size for i, size in enumerate(noise_shape)]

    def sample(shape: Any, dtype: Any) -> Any:
        del shape  # the same sizes, but all unknown
        return uniform(share, seed, sizes, 0, 1, dtype)

    return tf.nn.experimental.general_dropout(inputs, rate, sample, sizes)


def from_whole(
    original: Draw, share: ReplicaSlice, seed: tf.Tensor, shape: Any, **parameters: Any
) -> tf.Tensor:
    """Returns this share's rows of the numbers of the global batch.

    For distributions whose numbers cannot be reached without those before them. Parameters
    that are tensors are this share's own; then its numbers are too (`seed_of_share`).
    """
    shape = _as_list(shape)
    rows = _rows_per_row(share, shape)
    own = any(getattr(value, "shape", ()) for value in parameters.values())
    if rows is None:
        return original(shape, **parameters, seed=_Drawn(seed))
    if own:
        return original(shape, **parameters, seed=_Drawn(seed_of_share(share, seed, shape)))
    # Where the first axis counts no rows after all, all shares draw the same.
    size = tf.where(rows > 0, share.global_rows * rows, tf.cast(shape[0], tf.int64))
    whole = original([tf.cast(size, tf.int32), *shape[1:]], **parameters, seed=_Drawn(seed))
    first = share.first_row * rows
    return tf.reshape(whole[first : first + tf.cast(shape[0], tf.int64)], shape)


def categorical(
    original: Draw, share: ReplicaSlice, seed: tf.Tensor, logits: Any, num_samples: int, dtype: Any
) -> tf.Tensor:
    """Returns samples for each row of `logits`, as one device draws them for the whole batch."""
    logits = tf.convert_to_tensor(logits)
    rows = _rows_per_row(share, shape_of(logits))
    if rows is None:
        return original(logits, num_samples, dtype, seed=_Drawn(seed))
    # Each row of the kernel has numbers of its own; what the other rows are is no matter.
    before = tf.cast(share.first_row * rows, tf.int32)
    padded = tf.pad(logits, [[before, 0], [0, 0]])
    return original(padded, num_samples, dtype, seed=_Drawn(seed))[before:]


def shuffle(original: Draw, share: ReplicaSlice, seed: tf.Tensor, x: Any, axis: int) -> tf.Tensor:
    """Returns `x` in another order along `axis`: the rows of a share among themselves."""
    size = shape_of(tf.convert_to_tensor(x))[axis]
    return original(x, axis, seed=_Drawn(seed_of_share(share, seed, [size])))


def _of_our_own(draw: Draw) -> Draw:
    """Returns a draw that gets Keras' function, as the others of `DRAWS`, and does not need it."""
    return lambda original, share, seed, **arguments: draw(share, seed, **arguments)


DRAWS: dict[str, Draw] = {
    "uniform": _of_our_own(uniform),
    "randint": _of_our_own(randint),
    "normal": _of_our_own(normal),
    "dropout": dropout,
    "truncated_normal": from_whole,
    "gamma": from_whole,
    "beta": from_whole,
    "binomial": from_whole,
    "categorical": categorical,
    "shuffle": shuffle,
}


def seed_of_share(share: ReplicaSlice, seed: tf.Tensor, shape: list[Any]) -> tf.Tensor:
    """Returns a seed that differs from share to share, where the first axis counts rows."""
    rows = _rows_per_row(share, shape)
    if rows is None:
        return seed
    return tf.where(rows > 0, tf.random.fold_in(seed, share.first_row), seed)


class _Drawn(keras.random.SeedGenerator):
    """A seed generator whose seed is drawn already."""

    def __init__(self, seed: tf.Tensor) -> None:
        self._drawn = seed

    def next(self, ordered: bool = True) -> Any:
        return self._drawn


def shape_of(value: Any) -> list[Any]:
    """Returns a tensor's shape, whole numbers where they are known."""
    dynamic = tf.shape(value)
    return [dynamic[i] if size is None else size for i, size in enumerate(value.shape)]


def _aligned(
    share: ReplicaSlice,
    shape: Any,
    bytes_each: int,
    seed: tf.Tensor,
    draw: Callable[..., Any],
    **options: Any,
) -> Any:
    """Returns `draw(..., **options)` of a shape from where this share's rows begin."""
    shape = _as_list(shape)
    count = (
        tf.reduce_prod(tf.cast(tf.stack(shape), tf.int64)) if shape else tf.constant(1, tf.int64)
    )
    rows = _rows_per_row(share, shape)
    if rows is None:
        start = tf.constant(0, tf.int64)
    else:
        start = share.first_row * rows * tf.math.floordiv(count, _at_least_one(shape[0]))
    together = _BITS // max(32, 8 * bytes_each)  # numbers of one value of the counter
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    low = counter[0] + tf.cast(start // together, tf.uint64)
    high = counter[1] + tf.cast(low < counter[0], tf.uint64)
    skip = start % together
    numbers = draw(
        shape=tf.reshape(skip + count, [1]),
        key=key,
        counter=tf.stack([low, high]),
        alg=tf.raw_ops.StatelessRandomGetAlg(),
        **options,
    )
    return tf.reshape(numbers[skip : skip + count], shape)


def _as_list(shape: Any) -> list[Any]:
    if isinstance(shape, tf.Tensor):
        known = tf.get_static_value(shape)
        return [int(size) for size in known] if known is not None else tf.unstack(shape)
    return list(shape)


def _at_least_one(size: Any) -> tf.Tensor:
    return tf.maximum(tf.cast(size, tf.int64), 1)


def _rows_per_row(share: ReplicaSlice, shape: list[Any]) -> tf.Tensor | None:
    """Returns how many rows of `shape` an example has; None or 0 where its rows are none.

    A first axis that is known before the step runs, where the rows are not, does not count
    them; nor does one that no whole number of the rows makes up.
    """
    if not shape:
        return None
    size = tf.get_static_value(shape[0])
    if size is None:
        read = tf.maximum(share.own_rows, 1)
        size = tf.cast(shape[0], tf.int64)
        return tf.where(size % read == 0, size // read, 0)
    if share.read_rows is None or int(size) % share.read_rows:
        return None
    return tf.constant(int(size) // share.read_rows, tf.int64)

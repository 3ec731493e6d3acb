"""Draws the random numbers of the global batch: each replica draws those of its own rows.

One device draws one tensor of random numbers for a batch, in which row `i` belongs to example `i`.
Here each replica draws from the same seed the numbers at its own rows of that tensor. So two
replicas never share a mask, an example is augmented alike on any number of workers, and the numbers
are those of one device.

TensorFlow's stateless generator is Philox (Salmon et al., Parallel random numbers: as easy as 1, 2,
3, SC 2011). It computes 128 random bits from each value of a counter, without the bits of earlier
values. If `k` numbers fit into these bits, the number at position `p` of the tensor comes from the
counter's value `start + p // k`. So a replica begins at its own position, and does not draw what
comes before it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfmulti.distribution import row_labels
from tfmulti.distribution.replica_slice import ReplicaSlice

# It takes Keras' own function, the replica slice, the seed of this draw, and Keras' arguments.
Draw = Callable[..., Any]

# The random bits of one value of Philox' counter.
_BITS = 128


def by_parts(
    draw: Callable[..., Any],
    replica_slice: ReplicaSlice,
    seed: tf.Tensor,
    arguments: dict[str, Any],
) -> Any:
    """Returns `draw(replica_slice, seed, **arguments)`, part by part if rows were concatenated.

    A batch may be concatenated with another one along the rows, as for a discriminator. Then each
    part has its own place among the numbers that one device draws.

    Args:
        draw: one of `DRAWS` with Keras' function.
        replica_slice: this replica's slice.
        seed: the seed of this draw.
        arguments: the arguments of Keras' function without the seed, by name.
    """
    tensor = arguments.get("inputs", arguments.get("logits", arguments.get("x")))
    shape = arguments.get("shape")
    parts = _parts_of(tensor if tensor is not None else shape)
    if parts is None or len(parts) == 1 or 0 in parts or "x" in arguments:
        drawn = draw(replica_slice, seed, **arguments)
        if parts is not None and "x" not in arguments:
            row_labels.mark(drawn, row_labels.rows(parts))
        elif tensor is None:
            known = not any(tf.is_tensor(size) for size in _as_list(shape))
            reason = "random numbers of a shape that does not count the rows of the batch"
            row_labels.mark(drawn, row_labels.ALIKE if known else row_labels.local(reason))
        return drawn
    read = tf.maximum(replica_slice.own_rows, 1)
    before, drawn = 0, []
    # Parameters may have rows, too, such as a mean for each row.
    pieces = {
        name: tf.split(value, [k * read for k in parts])
        for name, value in arguments.items()
        if isinstance(value, tf.Tensor) and value.dtype.is_floating and _parts_of(value) == parts
    }
    # `noise_shape` counts the rows where a dropout has one mask for many entries of a row.
    counting = [
        name
        for name in ("shape", "noise_shape")
        if arguments.get(name) is not None and _parts_of(arguments[name]) == parts
    ]
    for number, k in enumerate(parts):
        # The draws multiply these by `k`, the number of entries of an example in this part.
        first = replica_slice.first_row + before * replica_slice.global_rows // k
        rows = replica_slice.global_rows * sum(parts) // k
        own = replica_slice._replace(first_row=first, global_rows=rows)
        given = arguments | {name: piece[number] for name, piece in pieces.items()}
        for name in counting:
            given[name] = [tf.cast(k * read, tf.int32), *_as_list(arguments[name])[1:]]
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
    replica_slice: ReplicaSlice,
    seed: tf.Tensor,
    shape: Any,
    minval: Any,
    maxval: Any,
    dtype: Any,
) -> tf.Tensor:
    """Returns uniform numbers in [minval, maxval), as `tf.random.stateless_uniform` draws them.

    If the first axis of the shape counts rows, these are the numbers of this replica's rows in the
    tensor of the global batch. Otherwise all replicas draw the same numbers.

    Args:
        replica_slice: this replica's slice.
        seed: the seed of this draw.
        shape: the shape for this replica's rows.
        minval: the least number.
        maxval: the upper end of the interval.
        dtype: a type of floating point or whole numbers.
    """
    dtype = tf.as_dtype(dtype)
    low, high = tf.cast(minval, dtype), tf.cast(maxval, dtype)
    if dtype.is_integer:
        draw = tf.raw_ops.StatelessRandomUniformIntV2
        return _aligned(replica_slice, shape, dtype.size, seed, draw, minval=low, maxval=high)
    unit = _aligned(
        replica_slice, shape, dtype.size, seed, tf.raw_ops.StatelessRandomUniformV2, dtype=dtype
    )
    return unit * (high - low) + low


def randint(
    replica_slice: ReplicaSlice,
    seed: tf.Tensor,
    shape: Any,
    minval: Any,
    maxval: Any,
    dtype: Any,
) -> tf.Tensor:
    """Returns whole numbers in [minval, maxval); see `uniform`.

    Args:
        replica_slice: this replica's slice.
        seed: the seed of this draw.
        shape: the shape for this replica's rows.
        minval: the least number.
        maxval: the upper end of the interval.
        dtype: the type of the result. Types other than int32 and int64 are drawn as int64.
    """
    known = keras.backend.standardize_dtype(dtype) in ("int32", "int64")
    drawn = dtype if known else "int64"
    return tf.cast(uniform(replica_slice, seed, shape, minval, maxval, drawn), dtype)


def normal(
    replica_slice: ReplicaSlice,
    seed: tf.Tensor,
    shape: Any,
    mean: Any,
    stddev: Any,
    dtype: Any,
) -> tf.Tensor:
    """Returns normal numbers, as `tf.random.stateless_normal` draws them; see `uniform`.

    Args:
        replica_slice: this replica's slice.
        seed: the seed of this draw.
        shape: the shape for this replica's rows.
        mean: the mean of the distribution.
        stddev: the standard deviation of the distribution.
        dtype: a floating point type.
    """
    dtype = tf.as_dtype(dtype)
    numbers = _aligned(
        replica_slice, shape, dtype.size, seed, tf.raw_ops.StatelessRandomNormalV2, dtype=dtype
    )
    return numbers * tf.cast(stddev, dtype) + tf.cast(mean, dtype)


def dropout(
    original: Draw,
    replica_slice: ReplicaSlice,
    seed: tf.Tensor,
    inputs: Any,
    rate: float,
    noise_shape: Any,
) -> tf.Tensor:
    """Returns the inputs with some elements 0 and the others scaled by 1 / (1 - rate).

    Args:
        original: Keras' function, which is not called.
        replica_slice: this replica's slice.
        seed: the seed of this draw.
        inputs: this replica's rows.
        rate: the part of the elements that become 0.
        noise_shape: the shape of the mask, where None stands for a size of `inputs`; None for all.
    """
    sizes = shape_of(inputs)
    if noise_shape is not None:
        sizes = [sizes[i] if size is None else size for i, size in enumerate(noise_shape)]

    def sample(shape: Any, dtype: Any) -> Any:
        # These are the same sizes, but all unknown.
        del shape
        return uniform(replica_slice, seed, sizes, 0, 1, dtype)

    return tf.nn.experimental.general_dropout(inputs, rate, sample, sizes)


def from_whole(
    original: Draw, replica_slice: ReplicaSlice, seed: tf.Tensor, shape: Any, **parameters: Any
) -> tf.Tensor:
    """Returns this replica's rows of the numbers that one device draws for the global batch.

    This is for distributions whose numbers cannot be drawn without those before them. So each
    replica draws the numbers of all rows, and keeps its own. If a parameter is a tensor, it has the
    values of this replica alone. Then the replica draws with a seed of its own (`seed_of_slice`).

    Args:
        original: Keras' function.
        replica_slice: this replica's slice.
        seed: the seed of this draw.
        shape: the shape for this replica's rows.
        **parameters: further arguments of Keras' function.
    """
    shape = _as_list(shape)
    rows = _rows_per_row(replica_slice, shape)
    own = any(getattr(value, "shape", ()) for value in parameters.values())
    if rows is None:
        return original(shape, **parameters, seed=_Drawn(seed))
    if own:
        return original(shape, **parameters, seed=_Drawn(seed_of_slice(replica_slice, seed, shape)))
    # If the first axis counts no rows after all, all replicas draw the same numbers.
    size = tf.where(rows > 0, replica_slice.global_rows * rows, tf.cast(shape[0], tf.int64))
    whole = original([tf.cast(size, tf.int32), *shape[1:]], **parameters, seed=_Drawn(seed))
    first = replica_slice.first_row * rows
    return tf.reshape(whole[first : first + tf.cast(shape[0], tf.int64)], shape)


def categorical(
    original: Draw,
    replica_slice: ReplicaSlice,
    seed: tf.Tensor,
    logits: Any,
    num_samples: int,
    dtype: Any,
) -> tf.Tensor:
    """Returns samples for each row of `logits`, as one device draws them for the global batch.

    Args:
        original: Keras' function.
        replica_slice: this replica's slice.
        seed: the seed of this draw.
        logits: this replica's rows.
        num_samples: the number of samples for each row.
        dtype: the type of the result.
    """
    logits = tf.convert_to_tensor(logits)
    rows = _rows_per_row(replica_slice, shape_of(logits))
    if rows is None:
        return original(logits, num_samples, dtype, seed=_Drawn(seed))
    # The kernel's numbers for a row depend on its position, and not on the values of other rows.
    before = tf.cast(replica_slice.first_row * rows, tf.int32)
    padded = tf.pad(logits, [[before, 0], [0, 0]])
    return original(padded, num_samples, dtype, seed=_Drawn(seed))[before:]


def shuffle(
    original: Draw, replica_slice: ReplicaSlice, seed: tf.Tensor, x: Any, axis: int
) -> tf.Tensor:
    """Returns `x` in another order along `axis`; each replica shuffles its own rows.

    Args:
        original: Keras' function.
        replica_slice: this replica's slice.
        seed: the seed of this draw.
        x: this replica's values.
        axis: the axis to shuffle.
    """
    size = shape_of(tf.convert_to_tensor(x))[axis]
    return original(x, axis, seed=_Drawn(seed_of_slice(replica_slice, seed, [size])))


def _of_our_own(draw: Draw) -> Draw:
    """Returns a draw that gets Keras' function, like the others of `DRAWS`, and ignores it."""
    return lambda original, replica_slice, seed, **arguments: draw(replica_slice, seed, **arguments)


# The draws by the names of the functions in Keras' TensorFlow backend.
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


def seed_of_slice(replica_slice: ReplicaSlice, seed: tf.Tensor, shape: list[Any]) -> tf.Tensor:
    """Returns a seed of this replica's own if a shape begins with rows; else the same seed."""
    rows = _rows_per_row(replica_slice, shape)
    if rows is None:
        return seed
    return tf.where(rows > 0, tf.random.fold_in(seed, replica_slice.first_row), seed)


class _Drawn(keras.random.SeedGenerator):
    """A seed generator that returns one given seed."""

    def __init__(self, seed: tf.Tensor) -> None:
        self._drawn = seed

    def next(self, ordered: bool = True) -> Any:
        return self._drawn


def shape_of(value: Any) -> list[Any]:
    """Returns a tensor's shape: whole numbers where they are known, and tensors elsewhere."""
    dynamic = tf.shape(value)
    return [dynamic[i] if size is None else size for i, size in enumerate(value.shape)]


def _aligned(
    replica_slice: ReplicaSlice,
    shape: Any,
    bytes_each: int,
    seed: tf.Tensor,
    draw: Callable[..., Any],
    **options: Any,
) -> Any:
    """Returns what `draw` draws for a shape, from the position where this replica's rows begin.

    Args:
        replica_slice: this replica's slice.
        shape: the shape for this replica's rows.
        bytes_each: the size of one number.
        seed: the seed of this draw.
        draw: an operation of TensorFlow that draws by a key and a counter.
        **options: further arguments of `draw`.
    """
    shape = _as_list(shape)
    count = (
        tf.reduce_prod(tf.cast(tf.stack(shape), tf.int64)) if shape else tf.constant(1, tf.int64)
    )
    rows = _rows_per_row(replica_slice, shape)
    if rows is None:
        start = tf.constant(0, tf.int64)
    else:
        start = replica_slice.first_row * rows * tf.math.floordiv(count, _at_least_one(shape[0]))
    # So many numbers come from one value of the counter.
    together = _BITS // max(32, 8 * bytes_each)
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    low = counter[0] + tf.cast(start // together, tf.uint64)
    # The counter has two halves of 64 bits. If the lower half overflows, the upper one grows by 1.
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


def _rows_per_row(replica_slice: ReplicaSlice, shape: list[Any]) -> tf.Tensor | None:
    """Returns how many entries of axis 0 an example has; None or 0 if the axis counts no rows.

    Axis 0 counts no rows if its size is known before the step runs and the number of rows is not.
    Nor does it if its size is not a whole multiple of the number of rows.
    """
    if not shape:
        return None
    size = tf.get_static_value(shape[0])
    if size is None:
        read = tf.maximum(replica_slice.own_rows, 1)
        size = tf.cast(shape[0], tf.int64)
        return tf.where(size % read == 0, size // read, 0)
    if replica_slice.read_rows is None or int(size) % replica_slice.read_rows:
        return None
    return tf.constant(int(size) // replica_slice.read_rows, tf.int64)

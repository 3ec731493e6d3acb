"""Draws the random numbers of the global batch. Each replica draws those of its own rows.

One device draws one tensor of random numbers for a batch, in which row `i` belongs to example `i`.
Here each replica draws from the same seed the numbers at its own rows of that tensor. So two
replicas never share a mask, an example is augmented alike on any number of workers, and the numbers
are those of one device.

TensorFlow's stateless generator is Philox (Salmon et al., Parallel random numbers: as easy as 1, 2,
3, SC 2011). It computes 128 random bits from each value of a counter, without the bits of earlier
values. If `k` numbers fit into these bits, the number at position `p` of the tensor comes from the
counter's value `start + p // k`. So a replica can begin at the position of its own rows.

XLA makes other floating-point numbers from the same random bits. Where it compiles a step, the
numbers are made from the bits here, as TensorFlow's own kernels make them
(tensorflow/core/lib/random/random_distributions.h).

Each draw takes the replica slice, the seed of this draw, and the arguments of Keras' function
without the seed. Some draws take Keras' function first. A shape is that for this replica's rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from tfmulti.distribution import global_values, row_labels
from tfmulti.distribution.replica_slice import ReplicaSlice, is_compiling, refuse_to_compile
from tfmulti.distribution.row_rules import Kind, Label, Parts

Draw = Callable[..., Any]

# The random bits of one value of Philox' counter.
_BITS = 128
# For each float type: the unsigned type of the same size, the bits of its mantissa, and the bits of
# 1.0.
_FORMS = {
    tf.float32: (tf.uint32, 23, 0x3F800000),
    tf.bfloat16: (tf.uint16, 7, 0x3F80),
    tf.float16: (tf.uint16, 10, 0x3C00),
}


def by_parts(
    draw: Callable[..., Any],
    replica_slice: ReplicaSlice,
    seed: tf.Tensor,
    arguments: dict[str, Any],
) -> Any:
    """Returns `draw(replica_slice, seed, **arguments)`, part by part if rows were concatenated.

    A batch may be concatenated with another one along the rows, as for a discriminator. Then the
    numbers of each part stand together in the tensor that one device draws.

    Args:
        draw: one of `DRAWS` with Keras' function.
        replica_slice: this replica's slice.
        seed: the seed of this draw.
        arguments: the arguments of Keras' function without the seed, by name.
    """
    if "inputs" in arguments:
        if arguments.get("noise_shape") is None:
            # A dropout of a matrix of the whole batch, such as the product of a graph's edges and
            # rows.
            inputs = global_values.input_of_one_device(replica_slice, arguments["inputs"])
            arguments = arguments | {"inputs": inputs}
        # A row of comparisons with all rows is longer on one device, and gets more numbers.
        inputs = global_values.rows_of_one_device(replica_slice, arguments["inputs"])
        arguments = arguments | {"inputs": inputs}
    for name in ("shape", "noise_shape"):
        if arguments.get(name) is not None:
            arguments = arguments | {name: _with_numbers(arguments[name])}
    tensor = arguments.get("inputs", arguments.get("logits", arguments.get("x")))
    shape = arguments.get("shape")
    parts = _parts_of(tensor if tensor is not None else shape)
    if parts is None or len(parts) == 1 or 0 in parts or "x" in arguments:
        drawn = draw(replica_slice, seed, **arguments)
        if parts is not None and "x" not in arguments:
            _label_drawn(drawn, row_labels.rows(parts), arguments)
        elif tensor is None:
            _label_drawn(drawn, _label_of_shape(shape), arguments)
        elif row_labels.are_kept() and row_labels.label_of(tensor).kind is Kind.GLOBAL:
            reason = "a dropout, or other random numbers, of values that follow from several rows"
            row_labels.mark(drawn, row_labels.local(reason))
        return drawn
    read_rows = tf.maximum(replica_slice.own_rows, 1)
    entries_before, drawn = 0, []
    # Other arguments may have rows, too, such as a mean for each row.
    split_arguments = {
        name: tf.split(value, [entries * read_rows for entries in parts])
        for name, value in arguments.items()
        if isinstance(value, tf.Tensor) and value.dtype.is_floating and _parts_of(value) == parts
    }
    # `noise_shape` counts the rows if a dropout has one mask for many entries of a row.
    row_shapes = [
        name
        for name in ("shape", "noise_shape")
        if arguments.get(name) is not None and _parts_of(arguments[name]) == parts
    ]
    for index, entries in enumerate(parts):
        first = replica_slice.first_row * entries + entries_before * replica_slice.global_rows
        of_all = replica_slice.global_rows * sum(parts)
        part_slice = replica_slice._replace(entries=(first, of_all))
        part_arguments = arguments | {
            name: values[index] for name, values in split_arguments.items()
        }
        for name in row_shapes:
            part_arguments[name] = [
                tf.cast(entries * read_rows, tf.int32),
                *_as_list(arguments[name])[1:],
            ]
        drawn.append(draw(part_slice, seed, **part_arguments))
        entries_before += entries
    concatenated = tf.concat(drawn, 0)
    _label_drawn(concatenated, row_labels.rows(parts), arguments)
    return concatenated


def _label_of_shape(shape: Any) -> Label:
    """Returns the label of numbers that are drawn for a shape that counts no rows."""
    if any(row_labels.label_of(size).kind is not Kind.ALIKE for size in _as_list(shape)):
        reason = "random numbers of a shape that does not count the rows of the batch"
        return row_labels.local(reason)
    return row_labels.ALIKE


def _label_drawn(drawn: tf.Tensor, label: Label, arguments: dict[str, Any]) -> None:
    """Labels drawn numbers, unless an argument depends on the rows of other replicas.

    Then the label follows from the operations, of which `_aligned` has labelled the draw itself.
    """
    given = [v for name, v in arguments.items() if "shape" not in name and tf.is_tensor(v)]
    kinds = {row_labels.label_of(value).kind for value in given}
    if row_labels.is_marked(drawn):
        return
    if kinds <= {Kind.ALIKE, Kind.ROWS}:
        row_labels.mark(drawn, label)
    elif label.kind is not Kind.LOCAL and row_labels.label_of(drawn).kind is Kind.LOCAL:
        row_labels.mark(drawn, row_labels.local("random numbers with parameters of several rows"))


def _parts_of(value: Any) -> Parts | None:
    """Returns the parts of the rows that a tensor has, or that a shape counts."""
    if not row_labels.are_kept():
        return None
    if isinstance(value, tf.Tensor) and value.dtype.is_floating:
        return row_labels.label_of(value).parts or None
    if isinstance(value, tf.Tensor) and value.op.type == "Pack":
        value = list(value.op.inputs)
    if isinstance(value, tf.Tensor) and value.shape.rank == 1:
        return row_labels.parts_counted(value)
    if isinstance(value, (list, tuple)) and len(value) and tf.is_tensor(value[0]):
        # If a later size follows from the rows, too, one device draws more numbers for each row.
        later = (row_labels.may_count_rows(size) for size in value[1:] if tf.is_tensor(size))
        return row_labels.parts_counted(value[0]) if not any(later) else None
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
    """
    dtype = tf.as_dtype(dtype)
    low, high = tf.cast(minval, dtype), tf.cast(maxval, dtype)
    if dtype.is_integer:
        draw = tf.raw_ops.StatelessRandomUniformIntV2
        return _aligned(replica_slice, shape, dtype.size, seed, draw, minval=low, maxval=high)
    return _unit(replica_slice, seed, shape, dtype) * (high - low) + low


def _unit(
    replica_slice: ReplicaSlice,
    seed: tf.Tensor,
    shape: Any,
    dtype: tf.DType,
    parts: Parts | None = None,
) -> tf.Tensor:
    """Returns uniform numbers in [0, 1); see `uniform` and `_aligned`."""
    draw = tf.raw_ops.StatelessRandomUniformV2
    return _aligned(replica_slice, shape, dtype.size, seed, draw, parts, dtype=dtype)


def randint(
    replica_slice: ReplicaSlice,
    seed: tf.Tensor,
    shape: Any,
    minval: Any,
    maxval: Any,
    dtype: Any,
) -> tf.Tensor:
    """Returns whole numbers in [minval, maxval); see `uniform`.

    Types other than int32 and int64 are drawn as int64.
    """
    is_drawn_as_it_is = keras.backend.standardize_dtype(dtype) in ("int32", "int64")
    drawn_dtype = dtype if is_drawn_as_it_is else "int64"
    return tf.cast(uniform(replica_slice, seed, shape, minval, maxval, drawn_dtype), dtype)


def normal(
    replica_slice: ReplicaSlice,
    seed: tf.Tensor,
    shape: Any,
    mean: Any,
    stddev: Any,
    dtype: Any,
) -> tf.Tensor:
    """Returns normal numbers, as `tf.random.stateless_normal` draws them; see `uniform`."""
    dtype = tf.as_dtype(dtype)
    numbers = _aligned(
        replica_slice, shape, dtype.size, seed, tf.raw_ops.StatelessRandomNormalV2, dtype=dtype
    )
    # `tf.cast` would round a Python number to float32 first.
    return numbers * tf.convert_to_tensor(stddev, dtype) + tf.convert_to_tensor(mean, dtype)


def dropout(
    original: Draw,
    replica_slice: ReplicaSlice,
    seed: tf.Tensor,
    inputs: Any,
    rate: float,
    noise_shape: Any,
) -> tf.Tensor:
    """Returns the inputs with some elements 0 and the others scaled by 1 / (1 - rate).

    `noise_shape` is the shape of the mask, where None stands for a size of `inputs`.
    """
    sizes, label, parts = shape_of(inputs), row_labels.label_of(inputs), None
    if label.kind is Kind.MIXED and label.parts and 0 not in label.parts:
        # A replica may be unable to compute the inputs, and so their shape, from its own rows.
        parts = label.parts
        sizes[0] = tf.cast(tf.maximum(replica_slice.own_rows, 1) * sum(parts), tf.int32)
    if noise_shape is not None:
        sizes = [sizes[i] if size is None else size for i, size in enumerate(noise_shape)]
        parts = parts if noise_shape[0] is None else None

    def sample(shape: Any, dtype: Any) -> Any:
        # `shape` has the same sizes as `sizes`, but all are unknown.
        del shape
        return _unit(replica_slice, seed, sizes, dtype, parts)

    return tf.nn.experimental.general_dropout(
        inputs, rate, sample, None if noise_shape is None else sizes
    )


def from_whole(
    original: Draw, replica_slice: ReplicaSlice, seed: tf.Tensor, shape: Any, **parameters: Any
) -> tf.Tensor:
    """Returns this replica's rows of the numbers that one device draws for the global batch.

    The numbers of some distributions cannot be drawn without those before them. So each replica
    draws the numbers of all rows, and keeps its own. If a parameter is a tensor, it has the values
    of this replica alone. Then the replica draws with its own seed (`seed_of_slice`).
    """
    shape = _as_list(shape)
    entries = _entries(replica_slice, shape)
    has_own_parameters = any(getattr(value, "shape", ()) for value in parameters.values())
    if entries is None:
        return original(shape, **parameters, seed=Drawn(seed))
    if has_own_parameters:
        own_seed = Drawn(seed_of_slice(replica_slice, seed, shape))
        drawn = original(shape, **parameters, seed=own_seed)
        reason = "random numbers of a distribution with a tensor of parameters"
        row_labels.mark(drawn, row_labels.local(reason))
        return drawn
    first, of_all = entries
    # If the first axis counts no rows after all, all replicas draw the same numbers.
    size = tf.where(of_all > 0, of_all, tf.cast(shape[0], tf.int64))
    all_numbers = original([tf.cast(size, tf.int32), *shape[1:]], **parameters, seed=Drawn(seed))
    return tf.reshape(all_numbers[first : first + tf.cast(shape[0], tf.int64)], shape)


def categorical(
    original: Draw,
    replica_slice: ReplicaSlice,
    seed: tf.Tensor,
    logits: Any,
    num_samples: int,
    dtype: Any,
) -> tf.Tensor:
    """Returns samples for each row of `logits`, as one device draws them for the global batch."""
    logits = tf.convert_to_tensor(logits)
    entries = _entries(replica_slice, shape_of(logits))
    if entries is None:
        return original(logits, num_samples, dtype, seed=Drawn(seed))
    # The numbers for a row depend on its position, but not on the values of other rows.
    rows_before = tf.cast(entries[0], tf.int32)
    padded = tf.pad(logits, [[rows_before, 0], [0, 0]])
    return original(padded, num_samples, dtype, seed=Drawn(seed))[rows_before:]


def shuffle(
    original: Draw, replica_slice: ReplicaSlice, seed: tf.Tensor, x: Any, axis: int
) -> tf.Tensor:
    """Returns `x` in another order along `axis`. Each replica shuffles its own rows."""
    size = shape_of(tf.convert_to_tensor(x))[axis]
    return original(x, axis, seed=Drawn(seed_of_slice(replica_slice, seed, [size])))


def _of_our_own(draw: Draw) -> Draw:
    """Returns a draw that also takes Keras' function, and ignores it."""
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


# XLA can compile these draws with the numbers that TensorFlow's kernels draw.
FOR_XLA = frozenset(DRAWS[name] for name in ("uniform", "randint", "normal", "dropout"))


def seed_of_slice(replica_slice: ReplicaSlice, seed: tf.Tensor, shape: list[Any]) -> tf.Tensor:
    """Returns this replica's own seed if a shape begins with rows; else the given seed."""
    entries = _entries(replica_slice, shape)
    if entries is None:
        return seed
    return tf.where(
        entries[1] > 0, tf.random.fold_in(seed, tf.cast(replica_slice.first_row, seed.dtype)), seed
    )


class Drawn(keras.random.SeedGenerator):
    """A seed generator that returns one given seed."""

    def __init__(self, seed: tf.Tensor) -> None:
        self._drawn = seed

    def next(self, ordered: bool = True) -> Any:
        """Returns the given seed, whatever `ordered` says."""
        return self._drawn


def shape_of(value: Any) -> list[Any]:
    """Returns a tensor's shape, with whole numbers for known sizes and tensors for others."""
    dynamic = tf.shape(value)
    return [dynamic[i] if size is None else size for i, size in enumerate(value.shape)]


def _aligned(
    replica_slice: ReplicaSlice,
    shape: Any,
    number_bytes: int,
    seed: tf.Tensor,
    draw: Callable[..., Any],
    parts: Parts | None = None,
    **options: Any,
) -> Any:
    """Returns what `draw` draws for a shape, from the position where this replica's rows begin.

    Args:
        replica_slice: this replica's slice.
        shape: the shape for this replica's rows.
        number_bytes: the size of one number.
        seed: the seed of this draw.
        draw: an operation of TensorFlow that draws by a key and a counter.
        parts: the parts of the rows that the shape counts, if it does not tell them itself.
        **options: further arguments of `draw`.
    """
    shape = _as_list(shape)
    entries = _entries(replica_slice, shape)
    # How many numbers come from one value of the counter.
    per_counter = _BITS // max(32, 8 * number_bytes)
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=seed)
    skip = None
    if entries is not None:
        counter, skip = _counter_at(counter, entries[0], _product(shape[1:]), per_counter)
    options |= {"key": key, "counter": counter, "alg": tf.raw_ops.StatelessRandomGetAlg()}
    if is_compiling() and draw in _BY_BITS:
        if options["dtype"] not in _FORMS:
            name = options["dtype"].name
            refuse_to_compile(f"draws {name} numbers, and XLA would draw other ones")
        draw = _BY_BITS[draw]
    if skip is None:
        drawn = draw(shape=tf.stack(shape) if shape else tf.zeros([0], tf.int32), **options)
    else:
        count = _product(shape)
        # XLA needs the size before the step runs, but not the position of the rows.
        size = count + per_counter if is_compiling() else skip + count
        numbers = draw(shape=tf.reshape(size, [1]), **options)
        drawn = tf.reshape(tf.slice(numbers, [skip], [count]), shape)
    if "minval" not in options:
        parts = parts or _parts_of(shape)
        row_labels.mark(drawn, row_labels.rows(parts) if parts else _label_of_shape(shape))
    return drawn


def _product(sizes: list[Any]) -> Any:
    """Returns the product of sizes: a whole number if all are known, else an int64 scalar."""
    unknown = [tf.cast(size, tf.int64) for size in sizes if tf.is_tensor(size)]
    return math.prod([int(size) for size in sizes if not tf.is_tensor(size)] + unknown)


def _counter_at(
    counter: tf.Tensor, entry: tf.Tensor, size: Any, per_counter: int
) -> tuple[tf.Tensor, tf.Tensor | None]:
    """Returns the counter that draws the numbers of an entry, and how many to skip, or None.

    Args:
        counter: the counter that draws the first number of all, uint64 of shape [2].
        entry: the number of entries before this one, int64 scalar.
        size: how many numbers an entry has.
        per_counter: how many numbers come from one value of the counter.
    """
    if isinstance(size, int) and size % per_counter == 0:
        steps, skip = entry * (size // per_counter), None
    else:
        start = entry * size
        steps, skip = start // per_counter, start % per_counter
    low, high = tf.unstack(counter)
    moved = low + tf.cast(steps, tf.uint64)
    # The counter has two halves of 64 bits. If the lower half overflows, the upper one grows by 1.
    return tf.stack([moved, high + tf.cast(moved < low, tf.uint64)]), skip


def _uniform_by_bits(dtype: tf.DType, **options: Any) -> tf.Tensor:
    """Returns what StatelessRandomUniformV2 draws, from the random bits.

    The low bits of 32 random ones become the mantissa of a number in [1, 2). The other arguments
    are those of the operation.
    """
    unsigned, mantissa, one = _FORMS[dtype]
    bits = tf.raw_ops.StatelessRandomUniformFullIntV2(dtype=tf.uint32, **options)
    bits = tf.cast(bits & tf.constant((1 << mantissa) - 1, tf.uint32), unsigned)
    return tf.bitcast(bits | tf.constant(one, unsigned), dtype) - tf.constant(1, dtype)


def _normal_by_bits(dtype: tf.DType, shape: tf.Tensor, **options: Any) -> tf.Tensor:
    """Returns what StatelessRandomNormalV2 draws, within the rounding of logarithm and sine.

    Two uniform numbers give two normal ones (Box and Muller, A note on the generation of random
    normal deviates, 1958). The other arguments are those of the operation.
    """
    count = tf.reduce_prod(shape)
    pairs = (count + 1) // 2
    drawn = _uniform_by_bits(tf.float32, shape=tf.reshape(2 * pairs, [1]), **options)
    first, second = tf.unstack(tf.reshape(drawn, [pairs, 2]), axis=1)
    radius = tf.sqrt(-2.0 * tf.math.log(tf.maximum(first, 1e-7)))
    angle = 2.0 * math.pi * second
    numbers = tf.stack([tf.sin(angle) * radius, tf.cos(angle) * radius], axis=1)
    return tf.cast(tf.reshape(tf.reshape(numbers, [2 * pairs])[:count], shape), dtype)


# What XLA compiles in the place of an operation that would draw other numbers.
_BY_BITS: dict[Any, Callable[..., Any]] = {
    tf.raw_ops.StatelessRandomUniformV2: _uniform_by_bits,
    tf.raw_ops.StatelessRandomNormalV2: _normal_by_bits,
}


def _entries(replica_slice: ReplicaSlice, shape: list[Any]) -> tuple[Any, Any] | None:
    """Returns where this replica's entries of axis 0 begin, and how many all replicas have.

    Both are int64 scalars. It is None, or both are 0, if the axis counts no rows: if its size is
    known before the step runs and the number of rows is not, or if its size is not a whole multiple
    of the number of rows.
    """
    if not shape or _is_alike(shape[0]):
        return None
    size = tf.get_static_value(shape[0])
    read_rows = replica_slice.read_rows
    if size is not None and (read_rows is None or int(size) % read_rows):
        return None
    if replica_slice.entries is not None:
        return replica_slice.entries
    per_row: Any
    if size is not None and read_rows is not None:
        per_row = int(size) // read_rows
    elif (parts := _parts_of(shape)) and 0 not in parts:
        per_row = sum(parts)
    else:
        read = tf.maximum(replica_slice.own_rows, 1)
        length = tf.cast(shape[0], tf.int64)
        per_row = tf.where(length % read == 0, length // read, 0)
    if isinstance(per_row, int) and per_row == 1:
        return replica_slice.first_row, replica_slice.global_rows
    return replica_slice.first_row * per_row, replica_slice.global_rows * per_row


def _is_alike(size: Any) -> bool:
    """Returns whether a size that is first known in the step does not depend on the rows."""
    is_labelled = tf.is_tensor(size) and row_labels.are_kept()
    return is_labelled and row_labels.label_of(size).kind is Kind.ALIKE


def _with_numbers(shape: Any) -> Any:
    """Returns a shape with whole numbers for tensors that are known before the step is traced."""
    if tf.is_tensor(shape):
        return shape if tf.is_symbolic_tensor(shape) else shape.numpy().tolist()
    is_known = [tf.is_tensor(size) and not tf.is_symbolic_tensor(size) for size in shape]
    return [int(n) if known else n for n, known in zip(shape, is_known, strict=True)]


def _as_list(shape: Any) -> list[Any]:
    if isinstance(shape, tf.Tensor):
        sizes = tf.get_static_value(shape)
        return [int(size) for size in sizes] if sizes is not None else tf.unstack(shape)
    return list(shape)

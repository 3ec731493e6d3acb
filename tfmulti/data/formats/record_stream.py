"""GZIP-compressed TFRecord files as a stream, because they can only be read in order.

The stream consists of TensorFlow's operations only. TensorFlow's threads would call a Python
function inside a Dataset. If the program ends while a thread is in such a function, as after an
error, the program waits for ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tfmulti.data.formats.examples import in_record
from tfmulti.data.formats.features import Feature, Features
from tfmulti.data.formats.pixels import most_pixels
from tfmulti.data.loader import cores
from tfmulti.data.source import map_nest

if TYPE_CHECKING:
    import tensorflow as tf

# The error messages of these operations contain this name, by which the run recognizes them.
SCOPE = "tfmulti_record"


def stream(
    paths: Sequence[str],
    features: Features,
    classes: int | None,
    global_batch_size: int,
    *,
    seed: int | None = None,
    buffer: int = 0,
) -> tf.data.Dataset:
    """Returns the examples of GZIP files as a Dataset of global batches; the last may be smaller.

    TensorFlow's kernels decode and resize images. They resize bilinearly, or by the mean of the
    covered pixels if the image shrinks to half its size or less. The EXIF orientation is ignored.

    Args:
        paths: the files.
        features: the features of a record.
        classes: the number of classes, which limits the labels. None: labels are not checked.
        global_batch_size: the rows of a batch.
        seed: if given, each pass has another order of the files, and of the records within a
            buffer. None keeps the order.
        buffer: the number of records of that buffer.
    """
    import tensorflow as tf

    def decoded(records: tf.Tensor) -> Any:
        with tf.name_scope(SCOPE):
            return _decoded(tf, records, features, classes)

    files = tf.data.Dataset.from_tensor_slices(list(paths))
    if seed is not None:
        files = files.shuffle(len(paths), seed=seed, reshuffle_each_iteration=True)
    records = files.flat_map(lambda path: tf.data.TFRecordDataset(path, compression_type="GZIP"))
    if seed is not None:
        records = records.shuffle(buffer, seed=seed, reshuffle_each_iteration=True)
    return records.batch(global_batch_size).map(decoded, num_parallel_calls=cores())


def _decoded(tf: Any, records: tf.Tensor, features: Features, classes: int | None) -> Any:
    """Returns a batch of examples from encoded records, as TensorFlow operations."""
    used: set[str] = set()
    map_nest(used.add, features.names)
    chosen = {name: features.features[name] for name in used}
    parsed = tf.io.parse_example(records, {name: in_record(tf, f) for name, f in chosen.items()})
    values = {name: _value(tf, parsed[name], feature) for name, feature in chosen.items()}
    if classes is not None:
        label = values[str(features.y)]
        outside = f"{features.y!r} is out of range 0..{classes - 1}"
        inside = (label >= 0) & (tf.cast(label, tf.int64) < classes)
        with tf.control_dependencies([tf.debugging.Assert(tf.reduce_all(inside), [outside])]):
            values[str(features.y)] = tf.identity(label)
    return map_nest(lambda name: values[name], features.names)


def _value(tf: Any, rows: tf.Tensor, feature: Feature) -> tf.Tensor:
    """Returns a feature of a batch in its final form."""
    if feature.type == "raw":
        flat = tf.io.decode_raw(rows, tf.as_dtype(feature.dtype), little_endian=True)
        return tf.reshape(flat, [tf.size(rows), *feature.shape])
    if feature.type == "image":
        decode = functools.partial(_image, tf, shape=feature.shape)
        return tf.map_fn(decode, rows, fn_output_signature=tf.uint8)
    return rows


def _image(tf: Any, data: tf.Tensor, shape: tuple[int, ...]) -> tf.Tensor:
    """Returns one image, decoded and resized, uint8 of `shape`."""
    height, width, channels = shape
    pixels = _declared_pixels(tf, data)
    limit = most_pixels()
    # TensorFlow takes memory for all pixels that the header declares. The Python code that looks
    # for the bad record tells the user which limit it is.
    fits = tf.debugging.Assert((pixels > 0) & (pixels <= limit), ["the image is too large"])
    with tf.control_dependencies([fits]):
        data = tf.identity(data)
    image = tf.io.decode_image(data, channels, expand_animations=False)
    image.set_shape([None, None, channels])
    size = tf.shape(image)
    shrinks = (size[0] >= 2 * height) & (size[1] >= 2 * width)
    resized = tf.cond(
        shrinks,
        lambda: tf.image.resize(image, [height, width], "area"),
        lambda: tf.image.resize(image, [height, width]),
    )
    return tf.saturate_cast(tf.round(resized), tf.uint8)


def _declared_pixels(tf: Any, data: tf.Tensor) -> tf.Tensor:
    """Returns how many pixels the header of an image declares; 0 if the format is not read.

    It does in TensorFlow what `pixels` does in Python.
    """

    def numbers(start: int, count: int, dtype: Any, is_little_endian: bool = True) -> Any:
        part = tf.strings.substr(data, start, count * dtype.size)
        return tf.cast(tf.io.decode_raw(part, dtype, is_little_endian), tf.int64)

    def canvas() -> Any:
        parts = tf.reshape(numbers(24, 6, tf.uint8), [2, 3])
        return tf.reduce_sum(parts * [1, 1 << 8, 1 << 16], 1) + 1

    def lossless() -> Any:
        bits = numbers(21, 1, tf.int32)[0]
        return tf.stack([bits % (1 << 14), bits // (1 << 14) % (1 << 14)]) + 1

    # TensorFlow decodes GIF files as well, but they are not among the formats of `features`.
    sides_of: dict[tuple[int, bytes], Callable[[], Any]] = {
        (0, b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"): lambda: numbers(16, 2, tf.int32, False),
        (0, b"\xff\xd8\xff"): lambda: tf.cast(tf.image.extract_jpeg_shape(data)[:2], tf.int64),
        (0, b"BM"): lambda: tf.abs(numbers(18, 2, tf.int32)),
        (8, b"WEBPVP8X"): canvas,
        (8, b"WEBPVP8L"): lossless,
        (8, b"WEBPVP8 "): lambda: numbers(26, 2, tf.uint16) % (1 << 14),
    }
    cases = [
        (tf.strings.substr(data, start, len(mark)) == mark, sides)
        for (start, mark), sides in sides_of.items()
    ]
    sides = tf.case(cases, lambda: tf.zeros([2], tf.int64))
    # An image whose side is not a positive number counts as one without pixels.
    return tf.reduce_prod(tf.maximum(sides, 0))

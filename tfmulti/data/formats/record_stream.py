"""GZIP-compressed TFRecord files as a stream, because they can only be read in order.

The stream consists of TensorFlow's operations only. TensorFlow's threads would call a Python
function inside a Dataset. If the program ends while a thread is in such a function, as after an
error, the program waits for ever.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tfmulti.data.formats.examples import in_record
from tfmulti.data.formats.features import Feature, Features
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
    found = tf.io.parse_example(records, {name: in_record(tf, f) for name, f in chosen.items()})
    values = {name: _value(tf, found[name], feature) for name, feature in chosen.items()}
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
        make = functools.partial(_image, tf, shape=feature.shape)
        return tf.map_fn(make, rows, fn_output_signature=tf.uint8)
    return rows


def _image(tf: Any, data: tf.Tensor, shape: tuple[int, ...]) -> tf.Tensor:
    """Returns one image, decoded and resized, uint8 of `shape`."""
    height, width, channels = shape
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

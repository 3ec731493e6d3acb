"""GZIP-compressed TFRecord files as a stream: what cannot be read at random is read in order.

All of it are TensorFlow's operations. A function of Python's inside a Dataset is called by
TensorFlow's threads, and where one of them is in it while the program ends, as after an error,
that waits for ever.
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

SCOPE = "tfmulti_record"  # stands in the errors of these operations


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

    Args:
        classes: labels must be below it, where it is given.
        seed: each pass has another order: the files anew, and the records within a buffer of
            so many. None keeps the order.

    Images are decoded and resized by TensorFlow's kernels: bilinear, or by the mean where they
    become less than half as large. The orientation that EXIF says is not looked at.
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
    if feature.type == "raw":
        flat = tf.io.decode_raw(rows, tf.as_dtype(feature.dtype), little_endian=True)
        return tf.reshape(flat, [tf.size(rows), *feature.shape])
    if feature.type == "image":
        make = functools.partial(_image, tf, shape=feature.shape)
        return tf.map_fn(make, rows, fn_output_signature=tf.uint8)
    return rows


def _image(tf: Any, data: tf.Tensor, shape: tuple[int, ...]) -> tf.Tensor:
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

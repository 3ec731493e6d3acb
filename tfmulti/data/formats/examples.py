"""Encoded examples (`tf.train.Example`) to arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tfmulti.data.formats.features import Feature
from tfmulti.data.formats.pixels import decode_into
from tfmulti.data.io.files import tensorflow
from tfmulti.errors import DataError


def parse_into(
    features: Mapping[str, Feature], records: Sequence[bytes], out: Mapping[str, np.ndarray]
) -> None:
    """Writes the features that `out` names into its arrays, one row for each record.

    Args:
        features: the features that a record may hold, by name.
        records: the encoded examples.
        out: for each wanted name an array with one row for each record.

    Raises:
        DataError: a record lacks a feature or has it in another form; the message says which.
    """
    import tensorflow as tf

    form = {name: in_record(tf, features[name]) for name in out}
    try:
        with tf.device("CPU:0"):
            columns = tf.io.parse_example(list(records), form)
    except (tf.errors.InvalidArgumentError, UnicodeDecodeError):
        # TensorFlow's message quotes the bytes of the record, and may not be UTF-8 text.
        raise DataError(_first_reason(tf, records, {n: features[n] for n in out})) from None
    for name, rows in out.items():
        values = columns[name].numpy()
        kind = features[name].type
        if kind not in ("image", "raw"):
            rows[...] = values
            continue
        for i, data in enumerate(values):
            try:
                _decode_into(data, kind, rows[i : i + 1])
            except ValueError as error:
                raise DataError(f"feature {name!r}: {error}") from None


def parse_numbers_into(
    features: Mapping[str, Feature], records: Sequence[bytes], out: Mapping[str, np.ndarray]
) -> None:
    """Does the work of `parse_into` for features that are numbers, one record at a time.

    It does not set up TensorFlow's devices. The arguments and errors are those of `parse_into`.
    """
    tf = tensorflow()
    for row, record in enumerate(records):
        parsed = _features_in(tf, record)
        for name, rows in out.items():
            reason = _reason(parsed, name, features[name])
            if reason:
                raise DataError(reason)
            if features[name].type == "raw":
                _decode_into(parsed[name].bytes_list.value[0], "raw", rows[row : row + 1])
            else:
                values = parsed[name].int64_list.value or parsed[name].float_list.value
                rows[row] = np.reshape(values, rows.shape[1:])


def in_record(tf: Any, feature: Feature) -> Any:
    """Returns the form of a feature in a record, as `tf.io.parse_example` takes it."""
    if feature.type in ("image", "raw"):
        return tf.io.FixedLenFeature([], tf.string)
    dtype = tf.string if feature.dtype == "str" else tf.as_dtype(feature.dtype)
    return tf.io.FixedLenFeature(feature.shape, dtype)


def _decode_into(data: bytes, kind: str, row: np.ndarray) -> None:
    """Writes the value of an image or raw feature into `row`, an array of one row."""
    if kind == "image":
        decode_into(data, row[0])
        return
    if len(data) != row.nbytes:
        raise DataError(
            f"there are {len(data):,} bytes, but {row.dtype} of shape {row.shape[1:]} has "
            f"{row.nbytes:,}"
        )
    row[...] = np.frombuffer(data, row.dtype.newbyteorder("<")).reshape(row.shape)


def _first_reason(tf: Any, records: Sequence[bytes], features: Mapping[str, Feature]) -> str:
    """Returns why TensorFlow cannot parse the first wrong record of these."""
    for record in records:
        try:
            parsed = _features_in(tf, record)
        except ValueError as error:
            return str(error)
        for name, feature in features.items():
            reason = _reason(parsed, name, feature)
            if reason:
                return reason
    return "the record does not have the form that the features say"


def _features_in(tf: Any, record: bytes) -> Any:
    """Returns the features of a record; raises DataError if it is not an example."""
    try:
        return tf.train.Example.FromString(record).features.feature
    except Exception:
        raise DataError("the record is not a tf.train.Example") from None


def _reason(parsed: Any, name: str, feature: Feature) -> str | None:
    """Returns why a feature of a record cannot be read, or None if it can."""
    if name not in parsed:
        return f"there is no feature {name!r}, but {', '.join(sorted(parsed)) or 'none'}"
    kinds = {"int64": "int64_list", "float32": "float_list"}
    expected, actual = kinds.get(feature.type, "bytes_list"), parsed[name].WhichOneof("kind")
    if actual != expected:
        dtypes = {"int64_list": "int64", "float_list": "float32", "bytes_list": "bytes"}
        dtype = dtypes.get(actual, "nothing")
        return f"feature {name!r} holds {dtype}, but {feature.type} was expected"
    is_encoded = feature.type in ("image", "raw")
    count = 1 if is_encoded else int(np.prod(feature.shape, dtype=int))
    values = len(getattr(parsed[name], expected).value)
    if values != count:
        shape = "" if is_encoded else f" for shape {list(feature.shape)}"
        return f"feature {name!r} has {values} values, but {count} were expected{shape}"
    return None

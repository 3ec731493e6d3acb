"""TFRecord files of `tf.train.Example`, with random access by an index of their records."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from tfmulti.data.data_set import DataSet, DataSpec
from tfmulti.data.formats.encoded import Decoder, EncodedSource
from tfmulti.data.formats.examples import parse_into, parse_numbers_into
from tfmulti.data.formats.features import Features, is_label, read_features, spec_of
from tfmulti.data.formats.gzip_faults import remember
from tfmulti.data.formats.record_index import HEADER, is_header
from tfmulti.data.formats.record_stream import stream
from tfmulti.data.formats.records import Records
from tfmulti.data.io.files import MOST_DESCRIPTION_BYTES, expanded, matching, read_bytes
from tfmulti.data.io.open_files import open_file
from tfmulti.data.options import parse_options
from tfmulti.errors import DataError

# A GZIP file begins with these bytes.
GZIP = b"\x1f\x8b"
# A stream is shuffled within a buffer of this many records.
BUFFER = 4096
# Files with these endings in a folder are not TFRecord files.
_NO_RECORDS = (".json", ".md", ".txt")
_FORM = (
    '{"features": {"image": {"type": "image", "shape": [224, 224, 3]}, "label": {"type": '
    '"int64"}}, "x": "image", "y": "label", "classes": 10}'
)
_DEFAULTS: dict[str, Any] = {
    "spec": "",
    "validation": "",
    "test": "",
    "classes": None,
    "buffer": BUFFER,
}


def load(options: str, seed: int) -> DataSet:
    """Returns the data of `PATTERN[,spec=FILE,validation=PATTERN,test=PATTERN,classes=N]`.

    A pattern is a file, a folder or a glob, on this machine or in a store that `tf.io.gfile` can
    open. A pattern for validation or test that has no `/` is looked for in the folder of the first
    pattern. The files of these parts are not trained on. `spec` is a JSON file
    (`formats.features`); by default it is `features.json` beside the records.

    GZIP files become a stream, which is shuffled within `buffer` records.

    Raises:
        DataError: there is no file or no spec, or one of them is wrong.
        ConfigError: an option is unknown, or a value has the wrong form.
    """
    pattern, _, rest = options.partition(",")
    chosen = parse_options(f"tfrecord:{pattern}", rest, _DEFAULTS)
    prefix = f"--dataset tfrecord:{pattern}"
    if not pattern:
        raise DataError("--dataset tfrecord: needs a file. Write --dataset tfrecord:PATTERN.")
    parts = _parts(prefix, pattern, chosen)
    features = _features(prefix, pattern, chosen["spec"])
    classes = _classes(prefix, features, chosen["classes"])
    leaves = {name: feature.leaf for name, feature in features.features.items()}
    parse = functools.partial(parse_into, features.features)
    parse_label = functools.partial(parse_numbers_into, features.features)
    decoder = Decoder(features.names, leaves, parse, classes, parse_label)
    x, y, *_ = decoder.specs
    spec = spec_of(x, y, classes)
    if _are_compressed(prefix, parts):
        make = functools.partial(stream, features=features, classes=classes)
        return _streamed(parts, make, decoder, spec, seed, chosen["buffer"])
    sources: dict[str, Any] = {
        name: EncodedSource(Records(paths), decoder) for name, paths in parts.items()
    }
    return DataSet(spec=spec, **sources)


def _parts(prefix: str, pattern: str, chosen: dict[str, Any]) -> dict[str, list[str]]:
    """Returns the files of each part; raises DataError if training has none or parts overlap."""
    parts = {"train": _record_files(prefix, pattern)}
    for part in ("validation", "test"):
        if chosen[part]:
            part_pattern = chosen[part]
            if "/" not in part_pattern:
                part_pattern = os.path.join(_folder_of(pattern, parts["train"]), part_pattern)
            parts[part] = _record_files(f"{prefix},{part}={chosen[part]}", part_pattern)
    others = {path for part in parts if part != "train" for path in parts[part]}
    train = [path for path in parts["train"] if path not in others]
    if not train:
        raise DataError(
            f"{prefix}: validation and test take all {len(others)} files. Leave one for training."
        )
    if "test" in parts and set(parts["test"]) & set(parts.get("validation", [])):
        raise DataError(
            f"{prefix}: validation={chosen['validation']} and test={chosen['test']} name the same "
            "files. Give each its own."
        )
    return parts | {"train": train}


def _record_files(prefix: str, pattern: str) -> list[str]:
    """Returns the TFRecord files that a pattern matches; raises DataError if there are none."""
    paths = [path for path in matching(prefix, pattern) if not path.endswith(_NO_RECORDS)]
    if not paths:
        raise DataError(
            f"{prefix}: no TFRecord file is there. Give a file, a folder of TFRecord files, or a "
            "glob such as 'data/train-*'."
        )
    return paths


def _folder_of(pattern: str, files: list[str]) -> str:
    """Returns the folder of a pattern's files; the pattern itself if it is a folder."""
    path = expanded(pattern)
    if files[0].startswith(path.rstrip("/") + "/"):
        return path
    return os.path.dirname(files[0])


def _features(prefix: str, pattern: str, spec: str) -> Features:
    """Returns the features that the spec describes; raises DataError if there is no spec."""
    name = spec or "features.json"
    folder = _folder_of(pattern, _record_files(prefix, pattern))
    candidates = [os.path.expanduser(spec)] if spec else []
    if "/" not in name:
        candidates.append(os.path.join(folder, name))
    for path in candidates:
        try:
            return read_features(path, read_bytes(path, MOST_DESCRIPTION_BYTES))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}. Give a readable file.") from None
    raise DataError(
        f"{prefix}: no {' or '.join(candidates)} says what the records hold. "
        f"Write such a file: {_FORM}, or give its path: spec=FILE."
    )


def _classes(prefix: str, features: Features, option: int | None) -> int | None:
    """Returns the number of classes; None if it is not needed or the target is not a label.

    Raises DataError if there is a number for another target, or if it is needed but missing.
    """
    classes = features.classes if option is None else option
    x, y = (
        features.features[name].leaf if isinstance(name, str) else None
        for name in (features.x, features.y)
    )
    has_labels = y is not None and is_label(y)
    if classes is not None and not has_labels:
        raise DataError(
            f"{prefix}: there are {classes} classes, but y is {features.y!r}, which is "
            "not a single label. Leave classes out, or make y one int64."
        )
    if classes is None and has_labels and spec_of(x, y, classes=2):
        raise DataError(
            f"{prefix}: the number of classes of the labels {features.y!r} is not known. Add "
            '"classes": N to the spec, or write classes=N.'
        )
    return classes


def _are_compressed(prefix: str, parts: dict[str, list[str]]) -> bool:
    """Returns whether the files are GZIP files.

    Raises:
        DataError: some files are GZIP files and others are not, or a file cannot be read.
    """
    kinds: dict[bool, str] = {}
    for path in (path for paths in parts.values() for path in paths):
        try:
            head = open_file(path).read_at(0, HEADER)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}. Give a readable file.") from None
        # A record of 35,615 bytes begins as a GZIP file does, so the header's checksum decides.
        if head:
            kinds.setdefault(head.startswith(GZIP) and not is_header(head), path)
    if len(kinds) > 1:
        raise DataError(
            f"{prefix}: {kinds[True]} is a GZIP file and {kinds[False]} is not. Give files of one "
            "kind; unpack them with gunzip to read in any order."
        )
    return True in kinds


def _streamed(
    parts: dict[str, list[str]],
    make: Callable[..., Any],
    decoder: Decoder,
    spec: DataSpec | None,
    seed: int,
    buffer: int,
) -> DataSet:
    """Returns data whose parts are streams, which `finish` makes for a batch size."""
    warning = (
        f"GZIP files cannot be read at random: every worker decompresses all of them, training "
        f"shuffles within {buffer:,} records alone (buffer=N), and a resumed run reads again up to "
        "its place. Unpack them with gunzip to read in any order."
        + ("" if "validation" in parts else " Without validation=PATTERN there is no validation.")
    )

    def finish(global_batch_size: int) -> DataSet:
        # Validation and test have the order of their files.
        shuffles = {"train": {"seed": seed, "buffer": buffer}}
        datasets = {
            name: make(paths, global_batch_size=global_batch_size, **shuffles.get(name, {}))
            for name, paths in parts.items()
        }
        for name, paths in parts.items():
            remember(datasets[name], paths, decoder)
        return DataSet(spec=spec, warning=warning, **datasets)

    return DataSet(None, spec, finish=finish)

"""TFRecord files of `tf.train.Example`, read at random by an index of their records."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from tfmulti.data.data_set import DataSet, DataSpec
from tfmulti.data.formats.encoded import Decoder, EncodedSource
from tfmulti.data.formats.examples import parse_into, parse_numbers_into
from tfmulti.data.formats.features import Features, is_label, read_features, spec_of
from tfmulti.data.formats.gzip_faults import remember
from tfmulti.data.formats.record_index import HEADER, is_header
from tfmulti.data.formats.record_stream import stream
from tfmulti.data.formats.records import Records
from tfmulti.data.io.files import expanded, matching, read_bytes
from tfmulti.data.io.open_files import open_file
from tfmulti.data.io.unpacked import GZIP, folder_of, unpack
from tfmulti.data.options import parse_options
from tfmulti.errors import DataError

BUFFER = 4096  # records that a stream is shuffled within
_NO_RECORDS = (".json", ".md", ".txt")  # what a folder may hold besides
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


def load(options: str, seed: int, *, skip_bad_records: int = 0) -> DataSet:
    """Returns the data of `PATTERN[,spec=FILE,validation=PATTERN,test=PATTERN,classes=N]`.

    A pattern is a file, a folder or one with `*`; local, or what `tf.io.gfile` reads. A mere
    name for validation and test is looked for in the folder of the first pattern, and what they
    name is not trained on. `spec` is a JSON file (`features`), or `features.json` beside the
    records.

    GZIP files become a stream, shuffled within `buffer` records. Where bad records may be
    skipped, a file that is damaged or cut off is no error: it has records that cannot be read,
    and GZIP files are unpacked (`unpacked`).

    Raises:
        DataError: no file or no spec is found, or one of them is wrong.
        ConfigError: an unknown option, or a value of the wrong form.
    """
    pattern, _, rest = options.partition(",")
    chosen = parse_options(f"tfrecord:{pattern}", rest, _DEFAULTS)
    place = f"--dataset tfrecord:{pattern}"
    if not pattern:
        raise DataError("--dataset tfrecord: needs a file. Write --dataset tfrecord:PATTERN.")
    parts = _parts(place, pattern, chosen)
    features = _features(place, pattern, chosen["spec"])
    classes = _classes(place, features, chosen["classes"])
    leaves = {name: feature.leaf for name, feature in features.features.items()}
    parse = functools.partial(_parse_into, features)
    parse_label = functools.partial(_parse_label, features)
    decoder = Decoder(features.names, leaves, parse, classes, parse_label)
    x, y, *_ = decoder.specs
    spec = spec_of(x, y, classes)
    packed = _are_compressed(place, parts)
    if packed and not skip_bad_records:
        make = functools.partial(stream, features=features, classes=classes)
        return _streamed(parts, make, decoder, spec, seed, chosen["buffer"])
    warning = None
    opened: Callable[[list[str]], Records] = functools.partial(
        Records, keep_damage=skip_bad_records > 0
    )
    if packed:
        warning = f"GZIP files are unpacked to {folder_of()}, to be read without what is damaged."
        opened = _unpacked
    sources: dict[str, Any] = {
        name: EncodedSource(opened(paths), decoder) for name, paths in parts.items()
    }
    return DataSet(spec=spec, warning=warning, **sources)


def _unpacked(paths: list[str]) -> Records:
    return Records(unpack(paths), keep_damage=True, packed=paths)


def _parse_into(features: Features, records: Sequence[bytes], out: Any) -> None:
    parse_into(records, features.features, out)


def _parse_label(features: Features, records: Sequence[bytes], out: Any) -> None:
    parse_numbers_into(records, features.features, out)


def _parts(place: str, pattern: str, chosen: dict[str, Any]) -> dict[str, list[str]]:
    """Returns the files of each part that there is."""
    parts = {"train": _found(place, pattern)}
    for part in ("validation", "test"):
        if chosen[part]:
            own = chosen[part]
            if "/" not in own:
                own = os.path.join(_folder_of(pattern, parts["train"]), own)
            parts[part] = _found(f"{place},{part}={chosen[part]}", own)
    others = {path for part in parts if part != "train" for path in parts[part]}
    train = [path for path in parts["train"] if path not in others]
    if not train:
        raise DataError(
            f"{place}: validation and test take all {len(others)} files. Leave one for training."
        )
    if "test" in parts and set(parts["test"]) & set(parts.get("validation", [])):
        raise DataError(
            f"{place}: validation={chosen['validation']} and test={chosen['test']} name the same "
            "files. Give each its own."
        )
    return parts | {"train": train}


def _found(place: str, pattern: str) -> list[str]:
    found = [path for path in matching(place, pattern) if not path.endswith(_NO_RECORDS)]
    if not found:
        raise DataError(
            f"{place}: no TFRecord file is there. Give a file, a folder of TFRecord files, or a "
            "glob such as 'data/train-*'."
        )
    return found


def _folder_of(pattern: str, files: list[str]) -> str:
    """Returns the folder of a pattern: itself, where it is one."""
    whole = expanded(pattern)
    if files[0].startswith(whole.rstrip("/") + "/"):
        return whole
    return os.path.dirname(files[0])


def _features(place: str, pattern: str, given: str) -> Features:
    name = given or "features.json"
    folder = _folder_of(pattern, _found(place, pattern))
    places = [os.path.expanduser(given)] if given else []
    if "/" not in name:
        places.append(os.path.join(folder, name))
    for path in places:
        try:
            return read_features(path, read_bytes(path))
        except FileNotFoundError:
            continue
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}. Give a readable file.") from None
    raise DataError(
        f"{place}: no {' or '.join(places)} says what the records hold. "
        f"Write such a file: {_FORM}, or give its path: spec=FILE."
    )


def _classes(place: str, features: Features, given: int | None) -> int | None:
    """Returns the number of classes; None where the target is no label."""
    classes = given if given is not None else features.classes
    x, y = ([features.features[n].leaf for n in _list(names)] for names in (features.x, features.y))
    labels = isinstance(features.y, str) and is_label(y[0])
    if classes is not None and not labels:
        raise DataError(
            f"{place}: there are {classes} classes, but y is {features.y!r}, no single label. "
            "Leave classes out, or make y one int64."
        )
    if classes is None and labels and isinstance(features.x, str) and spec_of(x[0], y[0], 2):
        raise DataError(
            f'{place}: the labels {features.y!r} are of how many classes? Add "classes": N to '
            "the spec, or write classes=N."
        )
    return classes


def _list(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _are_compressed(place: str, parts: dict[str, list[str]]) -> bool:
    """Returns whether the files are GZIP files.

    Raises:
        DataError: some are and some are not, or one cannot be read.
    """
    kinds: dict[bool, str] = {}
    for path in (path for paths in parts.values() for path in paths):
        try:
            head = open_file(path).read_at(0, HEADER)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror or error}. Give a readable file.") from None
        if head:  # a record of 35,615 bytes begins as a GZIP file does, but for its checksum
            kinds.setdefault(head.startswith(GZIP) and not is_header(head), path)
    if len(kinds) > 1:
        raise DataError(
            f"{place}: {kinds[True]} is a GZIP file and {kinds[False]} is not. Give files of one "
            "kind; gunzip them to read at random."
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
    warning = (
        f"GZIP files cannot be read at random: every worker decompresses all of them, training "
        f"shuffles within {buffer:,} records alone (buffer=N), and a resumed run reads again up to "
        "its place. gunzip them to read at random."
        + ("" if "validation" in parts else " Without validation=PATTERN there is no validation.")
    )

    def finish(global_batch_size: int) -> DataSet:
        orders = {"train": {"seed": seed, "buffer": buffer}}
        datasets = {
            name: make(paths, global_batch_size=global_batch_size, **orders.get(name, {}))
            for name, paths in parts.items()
        }
        for name, paths in parts.items():
            remember(datasets[name], paths, decoder)
        return DataSet(spec=spec, warning=warning, **datasets)

    return DataSet(None, spec, finish=finish)

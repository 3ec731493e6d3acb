"""Reads data sets that tensorflow-datasets has prepared, with random access to their files.

Nothing is downloaded, and no code of the data set runs, because its files describe their content.
tensorflow-datasets imports the modules that this description names. So the description is checked
first, and only the feature classes of tensorflow-datasets itself may stand in it.
"""

from __future__ import annotations

import importlib
import os
import posixpath
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tfmulti.config import json_values
from tfmulti.data.data_set import CLASSIFICATION, PARTS, DataSet
from tfmulti.data.formats.encoded import Decoder, EncodedSource
from tfmulti.data.formats.features import is_label, spec_of
from tfmulti.data.formats.pixels import check_pixels, decode_into
from tfmulti.data.formats.records import ByteStrings, Records
from tfmulti.data.io import files
from tfmulti.data.options import parse_options
from tfmulti.data.source import Leaf
from tfmulti.errors import DataError, UserError, did_you_mean

_DESCRIPTIONS = ("dataset_info.json", "features.json")
# The entries of features.json whose texts are the names of classes. Older versions wrote "type".
_CLASS_NAMES = ("pythonClassName", "python_class_name", "type")
# The entries whose texts are JSON themselves, which could name classes, too.
_INNER_JSON = ("json", "content")
# With more classes than this, names are dropped. A crafted description may declare any number of
# classes, and tensorflow-datasets makes a name for each of them.
_MOST_NAMES = 1 << 16
_OWN_FUNCTION = "Read it by a function of your own: --dataset package.module:function."
_DEFAULTS: dict[str, Any] = {
    "config": "",
    "version": "",
    "data_dir": "",
    "size": (),
    "classes": None,
    "x": "",
    "y": "",
    "train": "train",
    "validation": "",
    "test": "",
}


class DataSourceRecords(ByteStrings):
    """Encoded examples of a split that tensorflow-datasets reads from array_record files.

    Args:
        data_source: the split as a data source of tensorflow-datasets, which returns raw bytes.
        split: the name of the split.
        parts: the files of the split in their order, each a path and its number of records.
    """

    def __init__(self, data_source: Any, split: str, parts: Sequence[tuple[str, int]]) -> None:
        self._data_source, self._split = data_source, split
        self._paths = [path for path, _ in parts]
        self._ends = np.cumsum([records for _, records in parts])

    def __len__(self) -> int:
        return len(self._data_source)

    def read(self, numbers: np.ndarray) -> list[bytes]:
        try:
            return list(self._data_source.__getitems__(numbers.tolist()))
        except (RuntimeError, ValueError) as error:
            # array_record raises these if a file is damaged.
            raise DataError(" ".join(str(error).split())) from None

    def where(self, number: int) -> str:
        file, record = files.locate(self._ends, number)
        return f"{self._paths[file]}, record {record}"

    def identity(self) -> str:
        folder = os.path.dirname(self._paths[0])
        # Each version has a folder of its own, and its files do not change.
        return f"{folder} {self._split}"


class Parse:
    """Parses encoded examples of tensorflow-datasets into arrays, without TensorFlow.

    tensorflow-datasets leaves images encoded. Those that `pixels` can decode are decoded and
    resized here. tensorflow-datasets decodes the others after their size was checked.

    Args:
        tfds: the module `tensorflow_datasets`.
        features: the features of the data set.
        leaves: the form of each feature that is parsed.
    """

    def __init__(self, tfds: Any, features: Any, leaves: Mapping[str, Leaf]) -> None:
        self._tfds = tfds
        self._chosen = {name: features[name] for name in leaves}
        images = [n for n, f in self._chosen.items() if isinstance(f, tfds.features.Image)]
        self._decoders = {name: tfds.decode.SkipDecoding() for name in images}
        self._resized = {name for name in images if _is_image(tfds, features[name])}

    def __call__(self, records: Sequence[bytes], out: Mapping[str, np.ndarray]) -> None:
        """Writes the features of encoded examples into arrays, one row for each example.

        Args:
            records: the encoded examples.
            out: the arrays of the features to parse, by the names of the features.

        Raises:
            DataError: a record does not have the form of the data set, or an image is damaged.
        """
        features = self._tfds.features.FeaturesDict({name: self._chosen[name] for name in out})
        decoders = {name: skip for name, skip in self._decoders.items() if name in out}
        for row, record in enumerate(records):
            try:
                parsed = features.deserialize_example_np(record, decoders=decoders)
            except Exception as error:
                # protobuf and NumPy raise many types of exceptions.
                raise DataError(f"the record does not have its form ({error})") from None
            for name, rows in out.items():
                if name in self._resized:
                    decode_into(parsed[name], rows[row])
                elif name in decoders:
                    rows[row] = self._decoded(name, parsed[name])
                else:
                    rows[row] = parsed[name]

    def _decoded(self, name: str, data: bytes) -> np.ndarray:
        """Returns an image that `pixels` cannot decode, as tensorflow-datasets decodes it."""
        check_pixels(data)
        try:
            image: np.ndarray = self._chosen[name].decode_example_np(data)
        except Exception as error:
            # OpenCV and NumPy raise many types of exceptions.
            raise DataError(f"the image {name!r} cannot be read ({error})") from None
        return image


def load(options: str, seed: int) -> DataSet:
    """Returns the data of `NAME[,config=…,version=…,data_dir=PATH,size=HxW,…]`.

    `data_dir` is `$TFDS_DATA_DIR` by default, or `~/tensorflow_datasets` if that is not set. If
    several versions are prepared, the last one is read. `x` and `y` name the features of the input
    and of the target; by default these are the supervised keys of the data set. `train`,
    `validation` and `test` name the splits; by default they are the splits with these names. Images
    of varying size are resized to `size`. `classes` is the number of classes of a whole-number
    target, if the data set does not tell it.

    Raises:
        DataError: tensorflow-datasets is not installed, the data set is not prepared or is damaged,
            or it has no such split or feature.
        ConfigError: an option is unknown, or a value has the wrong form.
    """
    name, _, rest = options.partition(",")
    chosen = parse_options(f"tfds:{name}", rest, _DEFAULTS)
    prefix = f"--dataset tfds:{name}"
    if not name:
        raise DataError("--dataset tfds: needs a name. Write --dataset tfds:NAME.")
    tfds = _tfds(prefix)
    folder = _folder(tfds, prefix, name, chosen)
    try:
        _check_description(tfds, prefix, folder)
        return _of_builder(tfds, tfds.builder_from_directory(folder), prefix, chosen)
    except UserError:
        raise
    except Exception as error:
        # tensorflow-datasets raises many types of exceptions, many of them late.
        reason = files.reason_of(error)
        raise DataError(f"{prefix}: {folder} is damaged: {reason}. Prepare it anew.") from error


def _of_builder(tfds: Any, builder: Any, prefix: str, chosen: Mapping[str, Any]) -> DataSet:
    """Returns the data of a prepared data set."""
    features = builder.info.features
    x, y = _keys(prefix, builder.info, chosen)
    leaves = {key: _leaf(tfds, prefix, key, features[key], chosen["size"]) for key in (x, y)}
    classes = _classes(tfds, prefix, y, features[y], leaves[y], chosen["classes"])
    decoder = Decoder((x, y), leaves, Parse(tfds, features, leaves), classes)
    spec = spec_of(leaves[x], leaves[y], classes)
    if spec is not None and spec.task == CLASSIFICATION:
        spec = replace(spec, class_names=_class_names(features[y]))
    sources: dict[str, Any] = {
        part: EncodedSource(_records(tfds, builder, split), decoder)
        for part, split in _splits(prefix, builder, chosen).items()
    }
    return DataSet(spec=spec, **sources)


def _tfds(prefix: str) -> Any:
    """Returns the module `tensorflow_datasets`; raises DataError if it is not installed."""
    # tensorflow-datasets would import TensorFlow later, with TensorFlow's start-up messages.
    files.tensorflow()
    try:
        return importlib.import_module("tensorflow_datasets")
    except ImportError:
        raise DataError(
            f"{prefix} needs tensorflow-datasets, which is not installed. "
            "Install it: pip install 'tfmulti[tfds]'."
        ) from None


def _folder(tfds: Any, prefix: str, name: str, chosen: Mapping[str, Any]) -> Any:
    """Returns the folder of a prepared data set; raises DataError if there is none."""
    data_dir = chosen["data_dir"] or os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    path = tfds.core.Path(data_dir).expanduser()
    folder = path / name / chosen["config"]
    if not folder.exists() or not any(_is_prepared(f) for f in (folder, *_folders(folder))):
        configs = [f.name for f in _folders(path / name) if any(map(_is_prepared, _folders(f)))]
        if configs:
            raise DataError(
                f"{prefix}: it is prepared with several configs. Write config=NAME; "
                + did_you_mean(chosen["config"], configs)
            )
        raise DataError(_not_prepared(prefix, name, path, chosen))
    versions = {f.name: f for f in _folders(folder) if _is_prepared(f)}
    version = chosen["version"] or max(versions, key=_version_numbers)
    if version not in versions:
        raise DataError(
            f"{prefix}: version {version} is not prepared; {did_you_mean(version, versions)}"
        )
    return versions[version]


def _check_description(tfds: Any, prefix: str, folder: Any) -> None:
    """Checks the files that describe a data set, before tensorflow-datasets reads them.

    Raises:
        DataError: features.json names a class that tensorflow-datasets does not have.
        OSError: a file is not a regular file, is too large, or cannot be read.
        ValueError: features.json is not JSON.
    """
    # The names of classes stand in text files.
    texts = [file.name for file in folder.iterdir() if file.name.endswith(".txt")]
    contents = {
        name: files.read_bytes(os.fspath(folder / name), files.MOST_DESCRIPTION_BYTES)
        for name in (*_DESCRIPTIONS, *texts)
    }
    kinds = [kind for kind in vars(tfds.features).values() if isinstance(kind, type)]
    # The last name is an old one of the class Tensor.
    known = {f"{kind.__module__}.{kind.__name__}" for kind in kinds} | {
        "tensorflow_datasets.core.features.feature.Tensor"
    }
    _check_classes(prefix, json_values.parse(contents["features.json"].decode()), known)


def _check_classes(prefix: str, described: Any, known: set[str]) -> None:
    """Raises DataError if a part of features.json names a class that is not known."""
    inner = described.items() if isinstance(described, dict) else enumerate(described)
    for key, value in inner:
        if isinstance(value, (dict, list)):
            _check_classes(prefix, value, known)
        elif isinstance(value, str) and key in _INNER_JSON:
            raise DataError(
                f"{prefix}: features.json describes a feature by JSON in the text {key!r}, which "
                f"could name any class. {_OWN_FUNCTION}"
            )
        elif isinstance(value, str) and key in _CLASS_NAMES and value not in known:
            raise DataError(
                f"{prefix}: features.json names the class {value[:100]!r}, which is not part of "
                "tensorflow-datasets, and tfmulti does not run a data set's own code. "
                f"{_OWN_FUNCTION}"
            )


def _is_prepared(folder: Any) -> bool:
    """Returns whether a folder has the two files that describe a prepared data set."""
    return all((folder / name).exists() for name in _DESCRIPTIONS)


def _folders(folder: Any) -> list[Any]:
    """Returns the folders in a folder; none if the folder does not exist."""
    return [f for f in folder.iterdir() if f.is_dir()] if folder.exists() else []


def _version_numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers of a version such as `3.0.1`, by which versions are compared."""
    return tuple(int(part) if part.isdecimal() else -1 for part in version.split("."))


def _not_prepared(prefix: str, name: str, path: Any, chosen: Mapping[str, Any]) -> str:
    """Returns the message that no such data set is prepared, with the command for it."""
    name_and_config = posixpath.join(name, chosen["config"]) if chosen["config"] else name
    return (
        f'{prefix}: no {name_and_config} is prepared in {path}. Prepare it once: python -c "import '
        f"tensorflow_datasets as tfds; tfds.builder('{name_and_config}', data_dir='{path}')"
        '.download_and_prepare()", or give data_dir=PATH.'
    )


def _keys(prefix: str, info: Any, chosen: Mapping[str, Any]) -> tuple[str, str]:
    """Returns the names of the features that are input and target; raises DataError if unknown."""
    supervised = info.supervised_keys or ()
    plain = len(supervised) == 2 and all(isinstance(key, str) for key in supervised)
    keys = {"x": chosen["x"], "y": chosen["y"]}
    names = list(info.features) if hasattr(info.features, "keys") else []
    for key, default in zip(keys, supervised if plain else ("", ""), strict=True):
        keys[key] = keys[key] or default
        if not keys[key]:
            raise DataError(
                f"{prefix} does not say which feature is {key}. Write {key}=NAME; "
                f"known: {', '.join(names)}."
            )
        if keys[key] not in names:
            raise DataError(f"{prefix}: no feature {keys[key]!r}; {did_you_mean(keys[key], names)}")
    return keys["x"], keys["y"]


def _is_image(tfds: Any, feature: Any) -> bool:
    """Returns whether a feature is an image of bytes that `pixels` can decode."""
    if not isinstance(feature, tfds.features.Image) or feature.np_dtype != np.uint8:
        return False
    return feature.shape[-1] in (1, 3)


def _is_limited(tfds: Any, feature: Any) -> bool:
    """Returns whether the memory that decoding a feature takes is known before."""
    if isinstance(feature, tfds.features.Image):
        return True
    inner = feature
    while isinstance(inner, tfds.features.Sequence):
        inner = inner.feature
    # Only a Tensor has an encoding.
    is_packed = getattr(inner.to_json_content(), "encoding", "") == "zlib"
    decoded = (tfds.features.Image, tfds.features.Audio, tfds.features.Video)
    return not is_packed and not isinstance(inner, decoded)


def _leaf(tfds: Any, prefix: str, name: str, feature: Any, size: tuple[int, ...]) -> Leaf:
    """Returns the form of a feature in an example; raises DataError if it has no fixed form."""
    shape = getattr(feature, "shape", None)
    if not isinstance(shape, tuple):
        raise DataError(
            f"{prefix}: feature {name!r} has several parts. Name one with x= or y=. Otherwise: "
            f"{_OWN_FUNCTION}"
        )
    if not _is_limited(tfds, feature):
        raise DataError(
            f"{prefix}: feature {name!r} is a sound, a video, a sequence of images or a packed "
            f"tensor, whose size is not known before it is decoded. {_OWN_FUNCTION}"
        )
    if _is_image(tfds, feature):
        if size and len(size) != 2:
            raise DataError(f"{prefix}: size needs a height and a width. Write size=224x224.")
        if not size and None in shape:
            raise DataError(
                f"{prefix}: the images {name!r} vary in size. Say what they are resized to: "
                "size=HEIGHTxWIDTH, such as size=224x224."
            )
        return Leaf((*size, shape[-1]) if size else shape, "uint8")
    if None in shape:
        raise DataError(
            f"{prefix}: feature {name!r} varies in shape {shape}, and only images are resized. "
            f"{_OWN_FUNCTION}"
        )
    dtype = np.dtype(feature.np_dtype)
    return Leaf(shape, "str" if dtype.kind in "OSU" else dtype.name)


def _classes(
    tfds: Any, prefix: str, name: str, feature: Any, leaf: Leaf, chosen_classes: int | None
) -> int | None:
    """Returns the number of classes; None if it is not known or the target is not a label."""
    if isinstance(feature, tfds.features.ClassLabel):
        return int(feature.num_classes)
    if chosen_classes is not None and not is_label(leaf):
        raise DataError(
            f"{prefix}: classes={chosen_classes}, but {name!r} is not a label. Leave classes out."
        )
    return chosen_classes


def _class_names(feature: Any) -> tuple[str, ...] | None:
    """Returns the names of the classes; None if there are none or they are only numbers."""
    if getattr(feature, "num_classes", None) and feature.num_classes > _MOST_NAMES:
        return None
    names = tuple(getattr(feature, "names", None) or ())
    return None if names == tuple(map(str, range(len(names)))) else names


def _splits(prefix: str, builder: Any, chosen: Mapping[str, Any]) -> dict[str, str]:
    """Returns the name of the split of each part; raises DataError if it is missing or used twice.

    A part without an option gets the split with its own name, unless another part was given that
    split.
    """
    splits = builder.info.splits
    named = [chosen[part] for part in PARTS if chosen[part]]
    split_of: dict[str, str] = {}
    for part in PARTS:
        name = chosen[part] or (part if part in splits and part not in named else "")
        if name and name not in splits:
            raise DataError(f"{prefix}: no split {name!r}; {did_you_mean(name, splits)}")
        if name in split_of.values():
            raise DataError(
                f"{prefix}: the split {name!r} is used for two parts. Give each part its own split."
            )
        if name:
            split_of[part] = name
    return split_of


def _records(tfds: Any, builder: Any, split: str) -> ByteStrings:
    """Returns the encoded examples of a split, from TFRecord or from array_record files."""
    paths = [os.fspath(path) for path in builder.info.splits[split].filepaths]
    # The description gives the names of the files.
    for path in paths:
        if os.path.dirname(path) != os.path.dirname(os.path.join(builder.data_dir, "")):
            raise DataError(
                f"--dataset tfds:{builder.name}: the description names the file {path[:200]!r}, "
                "which is outside of the data set's folder. Prepare the data set again."
            )
    if builder.info.file_format.value == "tfrecord":
        return Records(paths)
    try:
        raw = builder.as_data_source(
            split, deserialize_method=tfds.decode.DeserializeMethod.RAW_BYTES
        )
    except (ImportError, NotImplementedError) as error:
        reason = " ".join(str(error).split()).split(". ")[0]
        raise DataError(
            f"--dataset tfds:{builder.name} is kept as {builder.info.file_format.value}, which "
            f"cannot be read here: {reason}. Install array_record, or prepare it as tfrecord."
        ) from None
    parts = builder.info.splits[split].file_instructions
    return DataSourceRecords(raw, split, [(os.fspath(part.filename), part.take) for part in parts])

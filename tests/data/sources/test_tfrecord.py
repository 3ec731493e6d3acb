"""Tests `--dataset tfrecord:…`: its files, the form of its examples, and the errors."""

from __future__ import annotations

import gzip
import os
import struct
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.records import write_features, write_records
from tfmulti.config.fit_config import FitConfig
from tfmulti.data.source import Leaf
from tfmulti.data.sources import tfrecord
from tfmulti.errors import ConfigError, DataError
from tfmulti.run.validation import load_data


def test_a_data_set_is_loaded_without_tensorflow(tmp_path: Path) -> None:
    write_features(tmp_path)
    for name, count in (("train-0", 20), ("train-1", 0), ("validation-0", 3), ("test-0", 4)):
        write_records(tmp_path / name, [b"x"] * count)
    data = tfrecord.load(f"{tmp_path},validation=validation-*,test={tmp_path}/test-*", 0)
    assert [len(part) for part in (data.train, data.validation, data.test)] == [20, 3, 4]
    assert data.spec is not None
    assert data.spec.describe() == "8×8×3, 3 classes"
    assert data.train.specs == (Leaf((8, 8, 3), "uint8"), Leaf((), "int64"))
    data = tfrecord.load(f"{tmp_path}/train-*,classes=5", 0)
    assert data.spec is not None
    assert (len(data.train), data.spec.outputs) == (20, 5)
    code = (
        "import sys\nfrom tfmulti.data.sources import tfrecord\ntfrecord.load(sys.argv[1], 0)\n"
        "sys.exit('tensorflow' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, f"{tmp_path}/train-*"]).returncode == 0


def features(**own: object) -> dict[str, object]:
    return {"features": own}


NUMBER = {"type": "float32"}


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (features(a={"type": "float32", "shape": [3]}, b=NUMBER), "3, 1 value"),
        (features(a={"type": "raw", "dtype": "uint8", "shape": [3]}, b=NUMBER), "3, 1 value"),
        (features(a={"type": "float32", "shape": [3]}, b=NUMBER, w=NUMBER), "3, 1 value"),
        (features(a={"type": "string"}, b=NUMBER), None),
        (features(a=NUMBER, b={"type": "float32", "shape": [2, 2]}), None),
        (features(a={"type": "int64", "shape": [3]}, b={"type": "int64"}), None),
    ],
)
def test_features_decide_the_form_of_the_data(
    tmp_path: Path, content: dict[str, object], kind: str | None
) -> None:
    write_records(tmp_path / "a", [b"x"])
    names = {"x": "a", "y": "b", "classes": None}
    if "w" in content["features"]:  # type: ignore[operator]
        names["weight"] = "w"
    write_features(tmp_path, **names, **content)
    spec = tfrecord.load(f"{tmp_path}", 0).spec
    assert (spec and spec.describe()) == kind


def test_several_inputs_are_a_dict(tmp_path: Path) -> None:
    write_records(tmp_path / "a", [b"x"])
    write_features(tmp_path, x=["image", "label"], y=["label"], classes=None)
    data = tfrecord.load(f"{tmp_path}", 0)
    assert data.spec is None
    assert sorted(data.train.specs[0]) == ["image", "label"]
    assert data.train.specs[1] == {"label": Leaf((), "int64")}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"y": "lable"}, "y is 'lable', which is not a feature; did you mean 'label'"),
        ({"x": None}, 'needs "x": the name of a feature, or a list of names. Known: image, label'),
        ({"x": []}, 'needs "x"'),
        ({"clases": 3}, "no entry 'clases'; did you mean 'classes'"),
        ({"classes": "3"}, "classes is '3', but it must be a number from 1"),
        ({"classes": None}, "labels 'label' is not known. Add \"classes\": N"),
        ({"y": "image"}, "there are 3 classes, but y is 'image', which is not a single label"),
        ({"weight": "w"}, "weight is 'w', which is not a feature"),
        ({"weight": "label"}, "the weight 'label' must be"),
        ({"features": {}}, 'needs "features"'),
        ({"pythonClassName": "FeaturesDict"}, "tensorflow-datasets. Use --dataset tfds:NAME"),
        (features(image=3), "feature 'image' is 3. Write"),
        (features(image={"type": "imag"}), "no type 'imag'; did you mean 'image'"),
        (features(image={"type": "image", "shape": [8, 8]}), r"shape \[8, 8\] cannot be read"),
        (features(image={"type": "image", "shape": [8, 8, 4]}), r"\[height, width, 3\], or 1"),
        (features(image={"type": "int64", "shape": [None]}), r"shape is \[null\].*varying"),
        (features(image={"type": "int64", "shap": [1]}), "no entry 'shap'; did you mean 'shape'"),
        (features(image={"type": "raw", "dtype": "unit8"}), "no dtype 'unit8'.*'uint8'"),
        (features(image={"type": "int64", "dtype": "int8"}), "dtype belongs to the type 'raw'"),
    ],
)
def test_mistakes_in_the_features(tmp_path: Path, content: dict[str, object], message: str) -> None:
    write_records(tmp_path / "a", [b"x"])
    write_features(tmp_path, **content)
    with pytest.raises(DataError, match=message):
        tfrecord.load(f"{tmp_path}/a", 0)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "features.json"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "needs a file"),
        ("{}/x*", r"no file .*/x\*\. Give"),
        ("{},validation=x*", r"validation=x\*: no file .*/x\*\. Give"),
        ("{}/a,spec=none.json", "no none.json or .*/none.json says what the records hold"),
        ("{}/a,spec={}", "directory"),
        ("{}/a,spec={}/a", "a is not JSON"),
        ("{}/a,validation=a", "take all 1 files. Leave one for training"),
        ("{},validation=a,test=a", "name the same files"),
        ("{},validaton=a", "no option 'validaton'; did you mean 'validation'"),
        ("{},test=", "test has no value. Give it one"),
        ("{},classes=two", "classes is 'two', but it must be a number"),
    ],
)
def test_mistakes_in_the_options(tmp_path: Path, options: str, message: str) -> None:
    write_records(tmp_path / "a", [b"x"])
    write_records(tmp_path / "b", [b"x"])
    write_features(tmp_path)
    with pytest.raises((DataError, ConfigError), match=message):
        tfrecord.load(options.replace("{}", str(tmp_path)), 0)


def test_missing_features_are_an_error(tmp_path: Path) -> None:
    write_records(tmp_path / "a", [b"x"])
    with pytest.raises(
        DataError, match=r'no .*/features.json says.*Write such a file: {"features"'
    ):
        tfrecord.load(f"{tmp_path}/a", 0)
    (tmp_path / "features.json").write_text("[]")
    with pytest.raises(DataError, match="does not hold a JSON object"):
        tfrecord.load(f"{tmp_path}/a", 0)


def test_features_are_a_small_file(tmp_path: Path) -> None:
    write_records(tmp_path / "a", [b"x"])
    (tmp_path / "features.json").touch()
    os.truncate(tmp_path / "features.json", (4 << 20) + 1)
    with pytest.raises(DataError, match=r"features\.json: it has more than 4,194,304 bytes\. Give"):
        tfrecord.load(f"{tmp_path}/a", 0)


def test_damaged_files_are_errors(tmp_path: Path) -> None:
    write_features(tmp_path)
    content = write_records(tmp_path / "train", [b"x"] * 5).read_bytes()
    (tmp_path / "train").write_bytes(content[:-1])
    (tmp_path / "val").write_bytes(content[:17] + b"damaged" + content[24:])
    options = f"{tmp_path},validation=val"
    with pytest.raises(DataError, match="train is cut off in record 4, after 4 whole ones"):
        tfrecord.load(options, 0)
    with pytest.raises(DataError, match="val, record 1: the checksum of its length is wrong"):
        tfrecord.load(f"{tmp_path}/val", 0)
    config = FitConfig(dataset=f"tfrecord:{options}", global_batch_size=2, skip_bad_records=1)
    with pytest.raises(DataError, match="train is cut off in record 4"):
        load_data(config)


def test_no_record_of_a_stream_can_be_skipped(tmp_path: Path) -> None:
    write_features(tmp_path)
    (tmp_path / "a.gz").write_bytes(gzip.compress(b"\0" * 40))
    config = FitConfig(dataset=f"tfrecord:{tmp_path}", global_batch_size=2, skip_bad_records=3)
    with pytest.raises(ConfigError, match=r"--skip_bad_records 3: GZIP files .* gunzip them"):
        load_data(config)


def test_gzip_files_are_a_stream_and_do_not_mix(tmp_path: Path) -> None:
    write_features(tmp_path)
    (tmp_path / "a.gz").write_bytes(b"\x1f\x8b\x08" + bytes(20))
    data = tfrecord.load(f"{tmp_path}/a.gz", 0)
    assert data.train is None
    assert data.finish is not None
    write_records(tmp_path / "b", [b"x"])
    with pytest.raises(DataError, match=r"a.gz is a GZIP file and .*/b is not"):
        tfrecord.load(f"{tmp_path}", 0)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("cache", "memory"),
        ("cache", "disk"),
        ("training_split", "train[:50%]"),
        ("validation_split", "train[50%:]"),
        ("test_split", "train[50%:]"),
        ("augment", "flip"),
        ("class_weight", "balanced"),
    ],
)
def test_gzip_files_refuse_transforms_with_random_access(
    tmp_path: Path, flag: str, value: object
) -> None:
    write_features(tmp_path)
    (tmp_path / "a.gz").write_bytes(b"\x1f\x8b\x08" + bytes(20))
    dataset = f"tfrecord:{tmp_path}/a.gz"
    config = FitConfig(dataset=dataset, global_batch_size=4)
    data = load_data(config)
    assert data is not None
    assert data.finish is not None
    with pytest.raises(ConfigError) as caught:
        load_data(replace(config, **{flag: value}))
    assert str(caught.value) == (
        f"--{flag} needs files that are read at random, but those of --dataset {dataset} are GZIP "
        f"files, which are streamed. gunzip them, or leave --{flag} out."
    )


def test_a_record_length_that_looks_like_gzip_is_read(tmp_path: Path) -> None:
    write_features(tmp_path)
    (length,) = struct.unpack("<H", b"\x1f\x8b")
    write_records(tmp_path / "a", [bytes(length)])
    assert (tmp_path / "a").read_bytes()[:2] == b"\x1f\x8b"
    assert len(tfrecord.load(f"{tmp_path}", 0).train) == 1

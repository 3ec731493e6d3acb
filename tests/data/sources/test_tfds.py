"""Tests data sets of tensorflow-datasets in both file formats, and the errors for others."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tensorflow_datasets import features

from tests.support.prepared import Made
from tests.support.processes import ONE_THREAD, run
from tfmulti.config.fit_config import FitConfig
from tfmulti.config.reading import ReadOptions
from tfmulti.data.batch_plan import BatchPlan
from tfmulti.data.data_set import DataSet
from tfmulti.data.formats import pixels
from tfmulti.data.formats.record_index import index_of
from tfmulti.data.source import Leaf
from tfmulti.data.sources import tfds
from tfmulti.data.transforms.labels import read_labels
from tfmulti.distribution.strategies import Placement
from tfmulti.errors import ConfigError, DataError
from tfmulti.run import validation
from tfmulti.training.input.prefetcher import prefetcher_of

pytestmark = pytest.mark.mirrored


class Tiny(Made):
    """Images that are filled with their number; train 20 and test 5."""

    form: ClassVar[dict[str, Any]] = {
        "image": features.Image(shape=(None, None, 3)),
        "label": features.ClassLabel(num_classes=4),
        "fixed": features.Image(shape=(6, 5, 1)),
        "name": features.Text(),
        "values": features.Tensor(shape=(2,), dtype=np.float32),
        "sound": features.Audio(),
        "count": np.int64,
        "kind": features.ClassLabel(names=["even", "odd"]),
    }

    def parts(self) -> dict[str, Iterator[dict[str, Any]]]:
        return {"train": map(numbered, range(20)), "test": map(numbered, range(20, 25))}


def numbered(i: int) -> dict[str, Any]:
    return {
        "image": np.full((8 + i % 3, 9, 3), i, np.uint8),
        "label": i % 4,
        "fixed": np.full((6, 5, 1), i, np.uint8),
        "name": f"{i}\0",
        "values": np.array([i, 0.5], np.float32),
        "sound": np.zeros(3, np.int64),
        "count": i,
        "kind": i % 2,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each kind of files."""
    root = tmp_path_factory.mktemp("tfds")
    for kind in ("tfrecord", "array_record"):
        Tiny(data_dir=str(root / kind), file_format=kind).download_and_prepare()
    return root


def read(data: DataSet) -> tuple[np.ndarray, np.ndarray]:
    """Returns all training examples in reverse order."""
    x, y = data.train.read(np.arange(20)[::-1])
    return x, y


@pytest.mark.parametrize("kind", ["tfrecord", "array_record"])
def test_images_and_labels(folder: Path, kind: str) -> None:
    data = tfds.load(f"tiny,data_dir={folder}/{kind},size=8x12", 0)
    assert (len(data.train), data.validation, len(data.test)) == (20, None, 5)
    assert data.spec is not None
    assert data.spec.describe() == "8×12×3, 4 classes"
    x, y = read(data)
    assert x.shape == (20, 8, 12, 3)
    numbers = x[:, 0, 0, 0]
    assert sorted(numbers.tolist()) == list(range(20))
    assert np.array_equal(x, np.broadcast_to(numbers[:, None, None, None], x.shape))
    assert np.array_equal(y, numbers % 4)
    assert "record 3" in data.train.where(3)
    assert set(data.test.read(np.arange(5))[0][:, 0, 0, 0]) == set(range(20, 25))


@pytest.mark.parametrize("kind", ["tfrecord", "array_record"])
def test_the_order_is_that_of_the_files(folder: Path, kind: str) -> None:
    forward = tfds.load(f"tiny,data_dir={folder}/{kind},x=fixed", 0).train
    x, _ = forward.read(np.arange(20))
    again, _ = forward.read(np.array([7, 2]))
    assert np.array_equal(again, x[[7, 2]])


def test_a_cut_off_file_is_an_error(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "tfrecord", tmp_path, dirs_exist_ok=True)
    (path,) = tmp_path.glob("tiny/1.0.0/tiny-train*")
    path.write_bytes(path.read_bytes()[:-1])
    dataset = f"tiny,data_dir={tmp_path},size=8x8"
    with pytest.raises(DataError, match="is cut off in record 19, after 19 whole ones"):
        tfds.load(dataset, 0)


def with_a_bad_record(folder: Path, kind: str, target: Path) -> str:
    """Copies a data set with a wrong byte in record 13, and returns the path of the file."""
    shutil.copytree(folder / kind, target)
    (path,) = target.glob("tiny/1.0.0/tiny-train*")
    content = bytearray(path.read_bytes())
    # The first chunk of an array_record file ends here, and each record is a chunk.
    at = 64
    for _ in range(13):
        at += 40 + int.from_bytes(content[at + 8 : at + 16], "little")
    if kind == "tfrecord":
        at = int(index_of(str(path))[13, 0])
    content[at + 60] ^= 1
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize("kind", ["tfrecord", "array_record"])
def test_an_unreadable_record_is_an_error_or_left_out(
    folder: Path, kind: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """By default it is an error that names file and record; --skip_bad_records leaves it out."""
    path = with_a_bad_record(folder, kind, tmp_path / "bad")
    dataset = f"tfds:tiny,data_dir={tmp_path}/bad,x=fixed"
    config = FitConfig(dataset=dataset, validation_fraction=0.0, global_batch_size=5)
    origin = f"{path}, record 13: "
    with pytest.raises(
        DataError, match=rf"^{origin}.*\. Repair or remove it, or give --skip_bad_reco"
    ):
        epochs_of(config, batches=1)
    with pytest.raises(DataError, match=rf"^{origin}"):
        validation.load_data(replace(config, class_weight="balanced"))
    all_epochs = epochs_of(
        replace(config, dataset=dataset.replace(f"{tmp_path}/bad", f"{folder}/{kind}"))
    )
    epochs = epochs_of(replace(config, skip_bad_records=1, class_weight="balanced"))
    assert [len(epoch) for epoch in epochs] == [19, 19]
    assert set(all_epochs[0]) - set(epochs[0]) == set(all_epochs[1]) - set(epochs[1])
    assert set(epochs[0]) < set(all_epochs[0]) == set(range(20))
    assert capfd.readouterr().err.count(f"left out {origin}") == 1


def epochs_of(config: FitConfig, batches: int = 4) -> list[list[int]]:
    """Returns the numbers of the examples that two epochs give, in batches of 20 / `batches`."""
    data = validation.load_data(config)
    assert data is not None
    plan = BatchPlan(len(data.train), 20 // batches, seed=1)
    here = Placement(0, 1, 1)
    reading = ReadOptions(0, config.skip_bad_records)
    epochs: list[list[int]] = [[], []]
    with contextlib.closing(prefetcher_of(data.train, plan, here, 0, reading)) as stream:
        for step in range(2 * batches):
            shards = stream.take()
            rows = int(shards.own_rows[0])
            epochs[step // batches] += shards.data[0][0].numpy()[:rows, 0, 0, 0].tolist()
    return epochs


def test_other_features(folder: Path) -> None:
    dataset = f"tiny,data_dir={folder}/tfrecord"
    x, y = read(tfds.load(f"{dataset},x=values,y=count,classes=20", 0))
    assert np.array_equal(x[:, 0], y)
    assert tfds.load(f"{dataset},x=fixed,y=values", 0).spec.describe() == "6×5×1, 2 values"  # type: ignore[union-attr]
    data = tfds.load(f"{dataset},x=name,y=count", 0)
    assert data.spec is None
    assert data.train.specs == (Leaf((), "str"), Leaf((), "int64"))
    x, y = read(data)
    assert x.tolist() == [b"%d\0" % n for n in y]


@pytest.mark.parametrize("kind", ["tfrecord", "array_record"])
def test_labels_are_read_alone_and_have_names(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tfds.load(f"tiny,data_dir={folder}/{kind},size=8x8,y=kind", 0)
    assert data.spec is not None
    assert data.spec.describe() == "8×8×3, 2 classes: even, odd"
    _, y = data.train.read(np.arange(20))

    def decode(*_: Any) -> None:
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(tfds, "decode_into", decode)
    monkeypatch.setattr(features.Image, "decode_example_np", decode)
    labels = read_labels(data.train)
    assert labels is not None
    assert labels.values.tolist() == y.tolist()
    with pytest.raises(AssertionError, match="an image was decoded"):
        data.train.read(np.arange(1))


def test_loading_prints_nothing(folder: Path, tmp_path: Path) -> None:
    """TensorFlow's start-up messages are hidden wherever it is imported."""
    load = f"tfds.load('tiny,data_dir={folder}/array_record,size=8x8', 0).train.where(0)"
    program = f"from tfmulti.data.sources import tfds; {load}"
    done = run(["-c", program], tmp_path / "logs", limit_s=100, env=ONE_THREAD)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_splits_have_names(folder: Path) -> None:
    dataset = f"tiny,data_dir={folder}/tfrecord,size=8x8"
    data = tfds.load(f"{dataset},validation=test", 0)
    assert (len(data.train), len(data.validation), data.test) == (20, 5, None)
    assert len(tfds.load(f"{dataset},train=test", 0).train) == 5


def test_the_last_version_and_the_config(folder: Path, tmp_path: Path) -> None:
    for name in ("a/1.9.0", "a/1.10.0", "b/cold/1.0.0", "b/warm/1.0.0"):
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.symlink_to(folder / "tfrecord" / "tiny" / "1.0.0")
    assert len(tfds.load(f"b,config=warm,data_dir={tmp_path},size=8x8", 0).train) == 20
    with pytest.raises(DataError, match=r"several configs. Write config=NAME; .*known: cold, warm"):
        tfds.load(f"b,data_dir={tmp_path}", 0)
    with pytest.raises(DataError, match=r"did you mean 'warm'"):
        tfds.load(f"b,config=wram,data_dir={tmp_path}", 0)
    data = tfds.load(f"a,data_dir={tmp_path},size=8x8", 0)
    assert "/a/1.10.0/" in data.train.where(0)
    data = tfds.load(f"a,version=1.9.0,data_dir={tmp_path},size=8x8", 0)
    assert "/a/1.9.0/" in data.train.where(0)
    with pytest.raises(DataError, match=r"version 2.0.0 is not prepared; .*Known: 1.10.0, 1.9.0"):
        tfds.load(f"a,version=2.0.0,data_dir={tmp_path}", 0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "needs a name"),
        ("mnist,data_dir={}", r"no mnist is prepared in .* Prepare it once: python -c .*'mnist'"),
        ("glue,config=cola,data_dir={}", "no glue/cola is prepared"),
        ("tiny,data_dir={}", "the images 'image' vary in size.*size=224x224"),
        ("tiny,data_dir={},size=8", "size needs a height and a width"),
        ("tiny,data_dir={},size=8xa", "size is '8xa'"),
        ("tiny,data_dir={},siz=8x8", "did you mean 'size'"),
        ("tiny,data_dir={},x=imag", "no feature 'imag'; did you mean 'image'"),
        (
            "tiny,data_dir={},x=sound",
            "'sound' is a sound, a video, .* whose size is not known before it is d",
        ),
        ("tiny,data_dir={},x=fixed,y=name,classes=3", "'name' is not a label. Leave classes out"),
        ("tiny,data_dir={},size=8x8,test=tset", "no split 'tset'; did you mean 'test'"),
        ("tiny,data_dir={},size=8x8,validation=train", "the split 'train' is used for two parts"),
    ],
)
def test_mistakes(folder: Path, options: str, message: str) -> None:
    with pytest.raises((DataError, ConfigError), match=message):
        tfds.load(options.replace("{}", str(folder / "tfrecord")), 0)


def test_a_damaged_data_set(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "tiny" / "1.0.0"
    broken.mkdir(parents=True)
    for name in ("dataset_info.json", "features.json"):
        (broken / name).write_text("{")
    with pytest.raises(DataError, match=r"tiny/1.0.0 is damaged: .*Prepare it anew\."):
        tfds.load(f"tiny,data_dir={tmp_path}", 0)


CRAFTED = [
    {"pythonClassName": "crafted.Class", "featuresDict": {"features": {}}},
    {"python_class_name": "crafted.Class", "featuresDict": {"features": {}}},
    {"type": "crafted.Class", "content": {}},
    {"featuresDict": {"features": {"type": {"pythonClassName": "crafted.Class", "text": {}}}}},
    {"jsonFeature": {"json": '{"a": {"type": "crafted.Class", "content": {}}}'}},
    {"type": f"{features.__name__}.features_dict.FeaturesDict", "content": "{}"},
]


@pytest.mark.parametrize("crafted", CRAFTED)
def test_no_module_of_a_data_set_is_imported(
    folder: Path, tmp_path: Path, crafted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "crafted.py").write_text("raise SystemExit('it was imported')")
    monkeypatch.syspath_prepend(tmp_path)
    described = copied(folder, tmp_path) / "features.json"
    description = json.loads(described.read_text())
    described.write_text(json.dumps(crafted if "type" in crafted else description | crafted))
    words = r"^--dataset tfds:tiny: .*(names the class 'crafted\.Class'|by JSON in the text)"
    with pytest.raises(DataError, match=words) as caught:
        tfds.load(f"tiny,data_dir={tmp_path},size=8x8", 0)
    # Preparing the data set again would give the same class.
    assert str(caught.value).endswith(tfds._OWN_FUNCTION)


@pytest.mark.parametrize("kind", ["tfrecord", "array_record"])
def test_the_files_of_a_data_set_are_in_its_folder(folder: Path, tmp_path: Path, kind: str) -> None:
    shutil.copytree(folder / kind, tmp_path, dirs_exist_ok=True)
    described = tmp_path / "tiny" / "1.0.0" / "dataset_info.json"
    described.write_text(described.read_text().replace('"{DATASET}-', '"../{DATASET}-'))
    with pytest.raises(DataError, match="is outside of the data set's folder"):
        tfds.load(f"tiny,data_dir={tmp_path},size=8x8", 0)


@pytest.mark.parametrize("name", ["dataset_info.json", "features.json", "kind.labels.txt"])
def test_descriptions_are_small_regular_files(folder: Path, tmp_path: Path, name: str) -> None:
    path = copied(folder, tmp_path) / name
    with path.open("ab") as file:
        # The file is sparse, so it takes no space on the disk.
        file.truncate(100 << 30)
    with pytest.raises(DataError, match="more than 4,194,304 bytes"):
        tfds.load(f"tiny,data_dir={tmp_path},size=8x8", 0)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(DataError, match="not a regular file"):
        tfds.load(f"tiny,data_dir={tmp_path},size=8x8", 0)


def copied(folder: Path, target: Path) -> Path:
    """Copies a data set, and returns the folder of its files."""
    shutil.copytree(folder / "tfrecord", target, dirs_exist_ok=True)
    return target / "tiny" / "1.0.0"


class Unusual(Made):
    """Features that tensorflow-datasets decodes by itself."""

    form: ClassVar[dict[str, Any]] = {
        "image": features.Image(shape=(8, 8, 4)),
        "label": features.ClassLabel(num_classes=4),
        "depth": features.Image(shape=(8, 8, 1), dtype=np.uint16),
        "packed": features.Tensor(shape=(3,), dtype=np.int64, encoding="zlib"),
        "images": features.Sequence(features.Image(shape=(8, 8, 3)), length=2),
    }

    def parts(self) -> dict[str, Iterator[dict[str, Any]]]:
        return {"train": map(unusual, range(3))}


def unusual(i: int) -> dict[str, Any]:
    return {
        "image": np.full((8, 8, 4), i, np.uint8),
        "label": i,
        "depth": np.full((8, 8, 1), 1000 * i, np.uint16),
        "packed": np.arange(3),
        "images": np.zeros((2, 8, 8, 3), np.uint8),
    }


def test_other_images_have_a_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Unusual(data_dir=str(tmp_path), file_format="tfrecord").download_and_prepare()
    dataset = f"unusual,data_dir={tmp_path}"
    for name, one in (("image", 1), ("depth", 1000)):
        x, y = tfds.load(f"{dataset},x={name}", 0).train.read(np.arange(3))
        assert np.array_equal(x[:, 0, 0, 0], one * y)
    for name in ("packed", "images"):
        with pytest.raises(DataError, match="whose size is not known before it is decoded"):
            tfds.load(f"{dataset},x={name}", 0)
    monkeypatch.setattr(pixels, "_most_pixels", 63)
    for name in ("image", "depth"):
        with pytest.raises(DataError, match="has more than 63 pixels"):
            tfds.load(f"{dataset},x={name}", 0).train.read(np.arange(3))


def test_a_missing_tensorflow_datasets_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    with pytest.raises(DataError, match=r"Install it: pip install 'tfmulti\[tfds\]'"):
        tfds.load("tiny", 0)

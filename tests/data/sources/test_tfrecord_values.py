"""Tests reading records that TensorFlow wrote: all types, file systems, and GZIP streams."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path
from typing import Any

import cv2
import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.support.processes import run
from tests.support.records import framed, write_features
from tests.support.sources import WorkerReplicas
from tfmulti import prepare
from tfmulti.config.fit_config import FitConfig
from tfmulti.config.reading import ReadOptions
from tfmulti.data.batch_plan import BatchPlan
from tfmulti.data.formats.examples import parse_into, parse_numbers_into
from tfmulti.data.formats.features import Feature
from tfmulti.data.formats.record_index import index_of, index_paths
from tfmulti.data.io.files import matching, stamp_of
from tfmulti.data.io.open_files import open_file
from tfmulti.data.loader import Loader
from tfmulti.data.sources import tfrecord
from tfmulti.data.transforms.labels import read_labels
from tfmulti.errors import DataError
from tfmulti.run import validation
from tfmulti.run.setup import set_up

pytestmark = pytest.mark.mirrored


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFMULTI_CACHE", str(tmp_path / "cache"))


def feature(values: Any) -> tf.train.Feature:
    if isinstance(values[0], bytes):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))
    if isinstance(values[0], float):
        return tf.train.Feature(float_list=tf.train.FloatList(value=values))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def example(**values: Any) -> bytes:
    features = {name: feature(value) for name, value in values.items()}
    content = tf.train.Features(feature=features)
    return tf.train.Example(features=content).SerializeToString()  # type: ignore[no-any-return]


def write(path: Any, examples: list[bytes], compression: str = "") -> str:
    with tf.io.TFRecordWriter(str(path), compression) as writer:
        for one in examples:
            writer.write(one)
    return str(path)


def image(i: int, shape: tuple[int, ...] = (8, 8, 3), ending: str = ".png") -> bytes:
    pixels = np.full(shape, i, np.uint8)
    return cv2.imencode(ending, pixels)[1].tobytes()  # type: ignore[no-any-return]


def images(count: int, first: int = 0) -> list[bytes]:
    """Examples of which the image is its number, and the label its number modulo 3."""
    return [example(image=[image(i)], label=[i % 3]) for i in range(first, first + count)]


def test_every_type_is_read(tmp_path: Path) -> None:
    raw = np.arange(6, dtype=np.int16).reshape(2, 3)
    write(
        tmp_path / "a",
        [
            example(
                image=[image(9 + i, (20, 30, 3), ".jpg" if i else ".png")],
                grey=[image(40, (4, 4))],
                raw=[(raw + i).astype("<i2").tobytes()],
                ids=[i, 1, 2**40],
                vector=[0.5, 1.5 + i],
                words=[b"a\0", b"b"],
                weight=[2.0 + i],
                label=[i],
            )
            for i in range(2)
        ],
    )
    types = {
        "image": {"type": "image", "shape": [8, 8, 3]},
        "grey": {"type": "image", "shape": [4, 4, 1]},
        "raw": {"type": "raw", "dtype": "int16", "shape": [2, 3]},
        "ids": {"type": "int64", "shape": [3]},
        "vector": {"type": "float32", "shape": [2]},
        "words": {"type": "bytes", "shape": [2]},
        "weight": {"type": "float32"},
        "label": {"type": "int64"},
        "absent": {"type": "int64"},
    }
    names = [name for name in types if name not in ("weight", "label", "absent")]
    write_features(tmp_path, features=types, x=names, y="label", weight="weight", classes=2)
    source = tfrecord.load(str(tmp_path), 0).train
    x, y, weight = source.read(np.array([1, 0]))
    assert (y.tolist(), weight.tolist()) == ([1, 0], [3.0, 2.0])
    assert x["image"].dtype == np.uint8
    assert np.abs(x["image"].astype(int) - np.reshape([10, 9], (2, 1, 1, 1))).max() <= 1
    assert np.array_equal(x["grey"], np.full((2, 4, 4, 1), 40))
    assert np.array_equal(x["raw"], np.stack([raw + 1, raw]))
    assert x["raw"].dtype == np.int16
    assert x["ids"].tolist() == [[1, 1, 2**40], [0, 1, 2**40]]
    assert x["vector"].tolist() == [[0.5, 2.5], [0.5, 1.5]]
    assert x["words"].tolist() == [[b"a\0", b"b"]] * 2


GOOD: dict[str, Any] = {"image": [image(1)], "label": [1]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"label": [1]}, "there is no feature 'image', but label."),
        ({"image": [image(1)], "lab": [1]}, "there is no feature 'label', but image, lab."),
        (GOOD | {"label": [1.0]}, "feature 'label' holds float32, but int64 was expected."),
        (GOOD | {"label": [1, 2]}, r"feature 'label' has 2 values, but 1 were expected for shape"),
        (GOOD | {"image": [b"a", b"b"]}, "feature 'image' has 2 values, but 1 were expected."),
        (GOOD | {"image": [image(1)[:-20]]}, "feature 'image': the image is cut off after"),
        (GOOD | {"image": [b"no image"]}, "feature 'image': it is not an image, or a damaged one"),
        (GOOD | {"label": [3]}, r"'label' is 3, out of range 0..2"),
        (GOOD | {"label": [-1]}, r"'label' is -1, out of range 0..2"),
        (None, "the record is not a tf.train.Example."),
    ],
)
def test_an_unreadable_record_is_an_error_or_left_out(
    tmp_path: Path, values: Any, message: str
) -> None:
    bad = b"\xff\xff" if values is None else example(**values)
    write(tmp_path / "a", [*images(2), bad, *images(1)])
    write_features(tmp_path)
    source = tfrecord.load(str(tmp_path), 0).train
    with pytest.raises(DataError, match=f"/a, record 2: {message}"):
        next(Loader(source, BatchPlan(4, 4), WorkerReplicas(), ReadOptions()).batches())
    if "image'" not in message:
        with pytest.raises(DataError, match=f"/a, record 2: {message}"):
            read_labels(source)
    batch = next(Loader(source, BatchPlan(4, 4), WorkerReplicas(), ReadOptions(0, 9)).batches())
    assert batch.data[0][1].tolist() == [0, 1, 0]


def test_raw_bytes_of_a_wrong_length_are_an_error(tmp_path: Path) -> None:
    write(tmp_path / "a", [example(a=[bytes(7)], b=[1.0])])
    types = {"a": {"type": "raw", "dtype": "float32", "shape": [2]}, "b": {"type": "float32"}}
    write_features(tmp_path, features=types, x="a", y="b", classes=None)
    with pytest.raises(ValueError, match=r"'a': there are 7 bytes, but float32 .*\(2,\) has 8"):
        tfrecord.load(str(tmp_path), 0).train.read(np.array([0]))


@pytest.mark.parametrize(
    ("described", "values"),
    [
        ({"type": "int64"}, [[0], [2], [1]]),
        ({"type": "int64", "shape": [1]}, [[0], [2], [1]]),
        ({"type": "raw", "dtype": "uint16"}, [[b"\0\0"], [b"\2\0"], [b"\1\0"]]),
    ],
)
def test_labels_are_read_without_the_images(
    tmp_path: Path, described: dict[str, Any], values: list[Any]
) -> None:
    write(tmp_path / "a", [example(image=[b"none"], label=label) for label in values])
    types = {"image": {"type": "image", "shape": [8, 8, 3]}, "label": described}
    write_features(tmp_path, features=types)
    train = tfrecord.load(str(tmp_path), 0).train
    labels = read_labels(train)
    assert labels is not None
    assert labels.values.tolist() == [0, 2, 1]
    with pytest.raises(ValueError, match="not an image"):
        train.read(np.array([0]))


def test_numbers_are_parsed_as_by_tensorflow() -> None:
    types = {"a": Feature("int64", (2, 1), "int64"), "b": Feature("float32", (2,), "float32")}
    records = [example(a=[i, -(2**40)], b=[0.1, i + 0.5]) for i in range(3)]
    by_tensorflow, by_numbers = (
        {"a": np.empty((3, 2, 1), np.int64), "b": np.empty((3, 2), np.float32)} for _ in "12"
    )
    parse_into(types, records, by_tensorflow)
    parse_numbers_into(types, records, by_numbers)
    assert np.array_equal(by_tensorflow["a"], by_numbers["a"])
    assert np.array_equal(by_tensorflow["b"], by_numbers["b"])


def test_classes_of_records_are_balanced(tmp_path: Path) -> None:
    """Class 0 twice, 1 four times, 2 once; the data of one more is damaged."""
    labels = [0, 1, 1, 2, 0, 1, 1]
    path = Path(write(tmp_path / "a", [example(image=[image(1)], label=[n]) for n in [*labels, 2]]))
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    write_features(tmp_path)
    config = FitConfig(
        dataset=f"tfrecord:{path}",
        global_batch_size=2,
        validation_fraction=0.0,
        class_weight="balanced",
        skip_bad_records=1,
    )
    data = validation.load_data(config)
    assert data is not None
    _, y, weights = data.train.read(np.arange(7))
    assert y.tolist() == labels
    assert weights.tolist() == pytest.approx([7 / (3 * labels.count(n)) for n in labels])
    write(path, [example(image=[image(1)], label=[n]) for n in (0, 1, 3)])
    with pytest.raises(DataError, match=r"a, record 2: 'label' is 3, out of range 0\.\.2"):
        validation.load_data(replace(config, skip_bad_records=0))


def test_files_in_file_systems_of_tensorflow(tmp_path: Path) -> None:
    """The index is beside the file in `ram://`, too."""
    folder = f"ram://{tmp_path.name}"
    for name, count in (("train-0", 30), ("train-1", 1), ("test-0", 4)):
        write(f"{folder}/{name}", images(count, first=7))
    tf.io.gfile.copy(str(write_features(tmp_path)), f"{folder}/features.json")
    data = tfrecord.load(f"{folder}/train-*,test=test-*", 0)
    assert (len(data.train), len(data.test)) == (31, 4)
    x, y = data.train.read(np.array([30, 29, 3]))
    assert x[:, 0, 0, 0].tolist() == [7, 36, 10]
    assert y.tolist() == [1, 0, 1]
    path = f"{folder}/train-0"
    assert tf.io.gfile.exists(index_paths(path)[0])
    assert not [p for p in tf.io.gfile.listdir(folder) if p.startswith(".partial")]
    assert matching("", folder) == [f"{folder}/{n}" for n in ("features.json", "test-0", *TRAIN)]
    # TensorFlow appends to an existing file of ram://.
    tf.io.gfile.remove(path)
    write(path, images(2))
    assert len(index_of(path)) == 2


TRAIN = ("train-0", "train-1")


def test_local_files_have_a_file_scheme(tmp_path: Path) -> None:
    path = write(tmp_path / "a", images(3))
    assert stamp_of(f"file://{path}").size == stamp_of(path).size
    assert np.array_equal(index_of(f"file://{path}"), index_of(path))
    content = Path(path).read_bytes()
    file = open_file(f"file://{path}")
    assert (file.read_at(5, 9), file.read_at(0, 3)) == (content[5:14], content[:3])
    assert file.read_at(len(content) - 2, 9) == content[-2:]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("ram://nothing/here", "no file ram://nothing/here. Give"),
        ("nofs://bucket/a", "nofs.*Give another path"),
    ],
)
def test_unknown_paths_are_errors(pattern: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        tfrecord.load(pattern, 0)
    with pytest.raises(DataError, match=f"{pattern}: "):
        index_of(pattern)


def compressed(folder: Path) -> str:
    """Three GZIP files of 20, 0 and 7 examples to train on, and one of 5 to test."""
    for i, (first, count) in enumerate([(0, 20), (20, 0), (20, 7)]):
        write(folder / f"train-{i}.gz", images(count, first), "GZIP")
    write(folder / "test.gz", images(5), "GZIP")
    write_features(folder)
    return f"{folder}/train-*,test=test.gz"


def order_of(dataset: tf.data.Dataset) -> list[int]:
    return [int(n) for x, _ in dataset for n in x[:, 0, 0, 0]]


def test_gzip_files_are_streamed(tmp_path: Path) -> None:
    options = compressed(tmp_path)
    data, again = (tfrecord.load(f"{options},buffer=10", 3).finish(8) for _ in range(2))
    assert [spec.shape.as_list() for spec in data.train.element_spec] == [[None, 8, 8, 3], [None]]
    assert [len(y) for _, y in data.train] == [8, 8, 8, 3]
    assert [y.numpy().tolist() for _, y in data.test] == [[0, 1, 2, 0, 1]]
    assert order_of(data.test) == [0, 1, 2, 3, 4]
    epochs = [order_of(again.train) for _ in range(3)]
    assert all(sorted(epoch) == list(range(27)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    third = tfrecord.load(f"{options},buffer=10", 3).finish(8)
    assert [order_of(third.train) for _ in range(3)] == epochs
    unmixed = tfrecord.load(f"{options},buffer=1", 3).finish(8)
    assert {order_of(unmixed.train)[0] for _ in range(9)} == {0, 20}  # the files' order
    other = tfrecord.load(f"{options},buffer=10", 4).finish(8)
    assert order_of(other.train) != epochs[0]


def test_a_stream_prints_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = FitConfig(
        dataset=f"tfrecord:{compressed(tmp_path)}",
        global_batch_size=8,
        strategy="one_device",
        dry_run=True,
    )
    setup = set_up(validation.check(config, env={}))
    assert isinstance(setup.data.train, tf.data.Dataset)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("warning    GZIP files cannot be read at random: every worker decomp")
    assert "within 4,096 records alone (buffer=N)" in line
    assert line.endswith("Without validation=PATTERN there is no validation.")


def test_a_stream_reads_what_random_access_reads(tmp_path: Path) -> None:
    """Sharp edges, both resized by half and enlarged: TensorFlow's kernels against OpenCV's."""
    pixels = np.zeros((24, 20, 3), np.uint8)
    pixels[5:17, 3:11] = [255, 100, 7]
    encoded = cv2.imencode(".png", pixels)[1].tobytes()
    raw = np.arange(3, dtype="<i2")
    one = example(small=[encoded], large=[encoded], raw=[raw.tobytes()], words=[b"a"], y=[0.5])
    write(tmp_path / "a", [one] * 2)
    write(tmp_path / "a.gz", [one] * 2, "GZIP")
    types = {
        "small": {"type": "image", "shape": [9, 7, 3]},
        "large": {"type": "image", "shape": [40, 30, 1]},
        "raw": {"type": "raw", "dtype": "int16", "shape": [3]},
        "words": {"type": "string"},
        "y": {"type": "float32"},
    }
    write_features(tmp_path, features=types, x=list(types), y="y", weight="y", classes=None)
    plain = tfrecord.load(f"{tmp_path}/a", 0).train.read(np.array([0, 1]))
    ((x, *rest),) = tfrecord.load(f"{tmp_path}/a.gz", 0).finish(2).train
    for name, values in plain[0].items():
        streamed = x[name].numpy()
        assert streamed.dtype == values.dtype
        if name in ("small", "large"):
            assert np.abs(streamed.astype(int) - values.astype(int)).max() <= 2, name
        else:
            assert streamed.tolist() == values.tolist()
    assert [part.numpy().tolist() for part in rest] == [[0.5, 0.5]] * 2


def flat_model() -> keras.Model:
    layers = [keras.Input((8, 8, 3)), keras.layers.Flatten(), keras.layers.Dense(3)]
    model = keras.Sequential(layers)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss)
    return prepare(model)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"label": [1]}, "a.gz, record 2: .*'image'.*gunzip the files for --skip_bad_records"),
        (GOOD | {"label": [3]}, r"a.gz, record 2: 'label' is 3, out of range 0\.\.2"),
        (GOOD | {"image": [b"none"]}, "a.gz, record 2: feature 'image': .*image"),
        (b"\x80", "a.gz, record 2: the record is not a tf.train.Example"),
        (None, r"a.gz, record 1\d\d: the file is cut off in it\. Repair"),
    ],
)
def test_a_stream_names_the_record_that_cannot_be_read(
    tmp_path: Path, values: Any, message: str
) -> None:
    write_features(tmp_path)
    more = [example(**values)] if isinstance(values, dict) else [values] if values else images(200)
    path = tmp_path / "a.gz"
    write(path, [*images(2), *more], "GZIP")
    if values is None:
        path.write_bytes(path.read_bytes()[:-300])
    data = tfrecord.load(f"{tmp_path}", 0).finish(2)
    with pytest.raises(DataError, match=message):
        flat_model().fit(data.train, verbose=0)


@pytest.mark.parametrize(
    ("offset", "message"),
    [
        (0, "record 1: the checksum of its length is wrong"),
        (20, "record 1: the checksum is wrong"),
        (-1, "record 1: the checksum is wrong"),
    ],
)
def test_a_stream_names_the_record_whose_checksum_is_wrong(
    tmp_path: Path, offset: int, message: str
) -> None:
    """The second file's second record."""
    write_features(tmp_path)
    first, second, third = (bytearray(framed(data)) for data in images(3))
    second[offset] ^= 1
    (tmp_path / "a.gz").write_bytes(gzip.compress(bytes(first + third)))
    (tmp_path / "b.gz").write_bytes(gzip.compress(bytes(first + second + third)))
    data = tfrecord.load(f"{tmp_path}", 0).finish(2)
    with pytest.raises(DataError, match=f"b.gz, {message}"):
        flat_model().fit(data.train, verbose=0)


def test_a_program_that_fails_while_it_reads_a_stream_ends(tmp_path: Path) -> None:
    """A Python function in the Dataset would keep the process from ending."""
    code = (
        "import sys\n"
        "from tfmulti.data.sources import tfrecord\n"
        "iterator = iter(tfrecord.load(sys.argv[1], 0).finish(4).train)\n"
        "next(iterator)\n"
        "raise RuntimeError('the user's')\n"
    )
    done = run(["-c", code, compressed(tmp_path)], tmp_path / "logs", limit_s=60)
    assert done.returncode == 1
    assert "the user's" in done.stderr

"""Tests that texts become tokens of the training texts' vocabulary."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.data.sources.test_folders import make_files
from tfmulti import make_strategy
from tfmulti.config.fit_config import FitConfig
from tfmulti.config.reading import ReadOptions
from tfmulti.config.run_directory import RunDir, write_text
from tfmulti.data.batch_plan import BatchPlan
from tfmulti.data.data_set import DataSet
from tfmulti.data.loader import Loader
from tfmulti.data.sources import text
from tfmulti.distribution.strategies import Placement
from tfmulti.errors import DataError
from tfmulti.run import train, validation
from tfmulti.run.setup import set_up, shared

pytestmark = pytest.mark.mirrored

TEXTS = {
    "train/a/1.txt": "The cat, the DOG: the end!",
    "train/a/2.txt": "cat Ünter the",
    "train/b/1.txt": "dog cat",
    "test/a/1.txt": "the the the the bird",
    "test/b/1.txt": "",
}


@pytest.fixture
def root(tmp_path: Path) -> str:
    folder = make_files(tmp_path, *TEXTS)
    for name, content in TEXTS.items():
        (tmp_path / name).write_text(content)
    return folder


def on_one_device(options: str) -> DataSet:
    return shared(text.load(options, 0), make_strategy("one_device"))


def tokens_of(part: Any) -> list[list[int]]:
    tokens, labels = part.read(np.arange(len(part)))
    assert (tokens.dtype, labels.dtype) == ("int32", "int32")
    return [row.tolist() for row in tokens]


def test_tokens_are_indices_in_the_vocabulary(root: str) -> None:
    """Padding is 0, and a word that only the test part has is 1. `tokens` words are read."""
    data = on_one_device(f"{root},tokens=4,vocabulary=5")
    assert data.vocabulary == ("the", "cat", "dog")
    assert tokens_of(data.train) == [[2, 3, 2, 4], [3, 1, 2, 0], [4, 3, 0, 0]]
    assert tokens_of(data.test) == [[2, 2, 2, 2], [0, 0, 0, 0]]
    assert data.spec is not None
    assert (data.spec.vocabulary_size, data.broadcast) == (5, None)


def test_a_small_vocabulary_is_not_padded(root: str) -> None:
    data = on_one_device(root)
    assert data.spec is not None
    assert data.vocabulary is not None
    assert sorted(data.vocabulary) == ["cat", "dog", "end", "the", "Ünter"]
    assert (data.spec.vocabulary_size, data.spec.input_shape) == (7, (200,))


def test_keras_reads_the_vocabulary_that_is_written(root: str, tmp_path: Path) -> None:
    data = on_one_device(f"{root},tokens=4")
    assert data.vocabulary is not None
    path = RunDir(tmp_path).vocabulary
    write_text(path, "".join(f"{word}\n" for word in data.vocabulary))
    layer = keras.layers.TextVectorization(output_sequence_length=4, vocabulary=str(path))
    tokens = layer(tf.constant([TEXTS[name] for name in sorted(TEXTS) if "train" in name]))
    assert tokens.numpy().tolist() == tokens_of(data.train)


def test_several_threads_make_tokens(root: str) -> None:
    data = on_one_device(f"{root},tokens=4")
    reader = Loader(data.train, BatchPlan(3, 3), Placement(0, 1, 1), ReadOptions(3))
    batches = reader.batches()
    for _ in range(5):
        assert next(batches).data[0][0].tolist() == tokens_of(data.train)
    batches.close()


def test_unreadable_files_are_reported_when_they_are_read(root: str) -> None:
    """The vocabulary comes from the other files. The file is named when its example is read."""
    Path(root, "train/a/2.txt").write_bytes(b"\xff")
    data = on_one_device(f"{root},tokens=4,vocabulary=5")
    assert data.vocabulary == ("the", "dog", "cat")
    reader = Loader(data.train, BatchPlan(3, 3), Placement(0, 1, 1), ReadOptions())
    with pytest.raises(DataError, match=r"train/a/2.txt: it is not UTF-8 text \(byte 0\)"):
        next(reader.batches())


def test_texts_without_words_are_an_error(root: str) -> None:
    for name in TEXTS:
        Path(root, name).write_text(" . ")
    with pytest.raises(DataError, match=f"text:{root}: the training texts hold no words.*a/1.txt"):
        on_one_device(root)


def test_texts_in_a_file_system_of_tensorflow() -> None:
    """`ram://` is used in place of stores such as `gs://`, because TensorFlow reads both."""
    for name in ("b/1", "a/deep/1", "a/2"):
        tf.io.gfile.makedirs(f"ram://texts/{name.rpartition('/')[0]}")
        with tf.io.gfile.GFile(f"ram://texts/{name}.txt", "w") as file:
            file.write(name)
    data = text.load("ram://texts", 0)
    texts, labels = data.train.read(np.arange(3))
    assert (texts.tolist(), labels.tolist()) == (["a/2", "a/deep/1", "b/1"], [0, 0, 1])
    with pytest.raises(DataError, match="ram://none does not exist"):
        text.load("ram://none", 0)


def test_the_run_directory_describes_the_inputs(root: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("n,c,y\n1,u,a\n2,v,b\n3,u,a\n4,u,b\n")
    for dataset, file, lines in (
        (f"text:{root}", RunDir(tmp_path / "text").vocabulary, ["the", "cat", "dog"]),
        (f"csv:{tmp_path}/t.csv,target=y", RunDir(tmp_path / "csv").features, ["n", "c=u", "c=v"]),
    ):
        config = FitConfig(
            dataset=dataset,
            run_dir=str(file.parent),
            strategy="one_device",
            global_batch_size=3,
            validation_fraction=0.0,
        )
        with contextlib.ExitStack() as at_end:
            train.make_run_dir(set_up(validation.check(config, env={})), at_end)
        assert file.read_text(encoding="utf-8").split("\n")[:3] == lines
        assert len(list(file.parent.glob("*.txt"))) == 1

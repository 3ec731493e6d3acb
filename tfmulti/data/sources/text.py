"""Texts with a class each, as sequences of tokens.

    --dataset text:FOLDER                                 a folder of .txt files for each class
    --dataset text:PATTERN,text=COLUMN,target=COLUMN      CSV or Parquet files (see `tables`)

`FOLDER` holds the class folders, or `train` with these, and `validation` (or `val`) and `test`
beside it. Options:

    tokens       how many tokens of a text are read; a shorter one is filled up with 0 (200)
    vocabulary   the most tokens there are, with 0 and 1, which is any other word (20000)
    text, target the columns of a table; validation, test: the files of those parts

Keras' `TextVectorization` makes the tokens: small letters, no punctuation, a word a token. The
vocabulary is that of the training texts, computed by the chief and given to all workers; the run
directory's vocabulary.txt holds it, as `TextVectorization(vocabulary=PATH)` reads it. Files are
read when their examples are needed.
"""

from __future__ import annotations

import functools
import importlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from tfmulti.data.arrays import ArraySource
from tfmulti.data.data_set import CLASSIFICATION, DataSet, DataSpec, FromChief
from tfmulti.data.formats.columns import (
    CSV,
    EXTENSIONS,
    PARQUET,
    TEXT,
    lost_of,
    read_tables,
    to_columns,
)
from tfmulti.data.io import files
from tfmulti.data.io.folders import find_classes, find_parts
from tfmulti.data.lost import check_lost
from tfmulti.data.options import parse_options
from tfmulti.data.source import Leaf, Source
from tfmulti.data.transforms.targets import Target, check_present
from tfmulti.errors import ConfigError, DataError, did_you_mean

_DEFAULTS: dict[str, Any] = {
    "tokens": 200,
    "vocabulary": 20000,
    "text": "",
    "target": "",
    "validation": "",
    "test": "",
}
_SPECIAL_TOKENS = 2  # padding, and a word that is not in the vocabulary
_AT_A_TIME = 256  # texts in memory while the vocabulary is computed


def load(options: str, seed: int, *, skip_bad_records: int = 0) -> DataSet:
    """Returns the data of `FOLDER[,…]` or `PATTERN,text=COLUMN,target=COLUMN[,…]`.

    Its parts are texts until `share` has made them tokens.

    Raises:
        ConfigError: an option is wrong.
        DataError: a file or a class is missing, a table cannot be read, or more of its rows than
            `skip_bad_records`.
    """
    path, _, rest = options.partition(",")
    place = f"--dataset text:{path}"
    if not path:
        raise DataError(f"{place} needs a folder. Write --dataset text:FOLDER.")
    chosen = parse_options(f"text:{path}", rest, _DEFAULTS)
    if chosen["vocabulary"] <= _SPECIAL_TOKENS:
        raise ConfigError(
            f"{place}: vocabulary is {chosen['vocabulary']}, but it must be above "
            f"{_SPECIAL_TOKENS}: 0 is padding and 1 any other word."
        )
    is_table = chosen["text"] or chosen["target"] or path.endswith((*EXTENSIONS[CSV], ".parquet"))
    if is_table:
        parts, names = _of_tables(place, path, chosen, skip_bad_records)
    else:
        parts, names = _of_folders(place, path, chosen)
    spec = DataSpec(
        (chosen["tokens"],),
        "int32",
        CLASSIFICATION,
        len(names),
        vocabulary_size=chosen["vocabulary"],
        class_names=names,
    )
    return DataSet(spec=spec, share=functools.partial(_shared, place), **parts)


class TextFiles(Source):
    """Text files, each read when it is asked for, and their labels: str and int32 [n]."""

    def __init__(self, paths: list[str], labels: np.ndarray) -> None:
        self.paths, self._labels = paths, labels

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def specs(self) -> Any:
        return Leaf((), "str"), Leaf((), "int32")

    def read(self, indices: np.ndarray, epoch: int = 0) -> Any:
        """Returns the texts and labels at `indices`.

        Raises:
            OSError: a file cannot be read.
            DataError: it is not UTF-8 text.
        """
        texts = np.empty(len(indices), object)
        for row, index in enumerate(indices):
            texts[row] = _decoded(files.read_bytes(self.paths[index], files.MOST_BYTES))
        return texts, self._labels[indices]

    def where(self, index: int) -> str:
        return self.paths[index]

    def labels(self) -> np.ndarray:
        return self._labels

    def identity(self) -> str:
        stamps = (f"{path} {files.stamp_of(path)}" for path in self.paths)
        return "\n".join([f"{zlib.crc32(self._labels.tobytes())}", *stamps])


class VectorizedSource(Source):
    """The texts of another source as tokens: int32 [n, tokens], and their labels.

    Args:
        vectorize: from texts [n] to tokens, such as `vectorizer` returns; called by several
            threads at once.
    """

    def __init__(
        self, source: Source, vectorize: Callable[[np.ndarray], np.ndarray], tokens: int
    ) -> None:
        self.source, self.vectorize, self.tokens = source, vectorize, tokens

    def __len__(self) -> int:
        return len(self.source)

    @property
    def specs(self) -> Any:
        return Leaf((self.tokens,), "int32"), self.source.specs[1]

    def read(self, indices: np.ndarray, epoch: int = 0) -> Any:
        texts, labels = self.source.read(indices, epoch)
        return self.vectorize(texts), labels

    def where(self, index: int) -> str:
        return self.source.where(index)

    def labels(self) -> np.ndarray | None:
        return self.source.labels()


def vectorizer(vocabulary: tuple[str, ...], tokens: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function from texts, str [n], to tokens, int32 [n, tokens]."""
    tf = importlib.import_module("tensorflow")
    layer = _layer(output_sequence_length=tokens, vocabulary=list(vocabulary))
    # One graph for any number of texts: half the time of the layer's single operations.
    run = tf.function(
        lambda texts: tf.cast(layer(texts), tf.int32),
        input_signature=[tf.TensorSpec([None], tf.string)],
        autograph=False,
    )

    def vectorize(texts: np.ndarray) -> np.ndarray:
        with tf.device("CPU:0"):
            found: np.ndarray = run(tf.constant(texts, tf.string)).numpy()
        return found

    return vectorize


def make_vocabulary(place: str, source: Source, size: int) -> tuple[str, ...]:
    """Returns the most frequent words of a source's texts, at most `size` with the special tokens.

    Raises:
        DataError: there is no word.
    """
    tf = importlib.import_module("tensorflow")
    layer = _layer(max_tokens=size)
    for texts in _texts_of(source):
        with tf.device("CPU:0"):
            layer.update_state(tf.constant(texts, tf.string))
    layer.finalize_state()
    words = tuple(str(word) for word in layer.get_vocabulary(include_special_tokens=False))
    if not words:
        raise DataError(
            f"{place}: the training texts hold no words, or cannot be read: the first is "
            f"{source.where(0)}. Give files of text in UTF-8."
        )
    return words


def _shared(place: str, data: DataSet, from_chief: FromChief) -> DataSet:
    """Returns the data as tokens, with the vocabulary of the chief's training texts."""
    assert data.spec is not None
    assert data.spec.vocabulary_size is not None
    tokens, most = data.spec.input_shape[0], data.spec.vocabulary_size
    words = from_chief(lambda: "\n".join(make_vocabulary(place, data.train, most)).encode())
    vocabulary = tuple(words.decode().split("\n"))
    vectorize = vectorizer(vocabulary, tokens)
    parts: dict[str, Any] = {
        name: part.changed(lambda source: VectorizedSource(source, vectorize, tokens))
        for name in ("train", "validation", "test")
        if (part := getattr(data, name)) is not None
    }
    spec = replace(data.spec, vocabulary_size=len(vocabulary) + _SPECIAL_TOKENS)
    return replace(data, spec=spec, vocabulary=vocabulary, **parts)


def _texts_of(source: Source) -> Iterator[np.ndarray]:
    """Yields the texts of a source that can be read.

    The others are the reader's: it names them, or leaves them out where that is asked for.
    """
    for start in range(0, len(source), _AT_A_TIME):
        indices = np.arange(start, min(start + _AT_A_TIME, len(source)))
        try:
            yield source.read(indices)[0]
        except (OSError, ValueError):
            for index in indices:
                try:
                    yield source.read(np.array([index]))[0]
                except (OSError, ValueError):
                    continue


def _layer(**options: Any) -> Any:
    return importlib.import_module("keras").layers.TextVectorization(output_mode="int", **options)


def _decoded(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"it is not UTF-8 text (byte {error.start})") from None


def _of_folders(
    place: str, path: str, chosen: dict[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the parts of a folder, and the names of the classes."""
    for option in ("validation", "test"):
        if chosen[option]:
            raise ConfigError(
                f"{place}: {option}={chosen[option]} is for tables. Put the class folders of that "
                f"part into {files.join(path, option)}, and those for training into "
                f"{files.join(path, 'train')}."
            )
    found = find_parts(place, files.expanded(path))
    train = find_classes(place, found["train"], (".txt",))
    parts: dict[str, Any] = {"train": TextFiles(train.paths, train.labels)}
    for part, folder in found.items():
        if part != "train":
            classes = find_classes(place, folder, (".txt",), train.names)
            parts[part] = TextFiles(classes.paths, classes.labels)
    return parts, train.names


def _of_tables(
    place: str, path: str, chosen: dict[str, Any], most_bad: int
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the parts of tables with `lost`, what was left out, and the names of the classes."""
    form = PARQUET if path.endswith(EXTENSIONS[PARQUET]) else CSV
    tables = {"train": read_tables(place, form, path)}
    names = tables["train"][0].rows.column_names
    for option in ("text", "target"):
        if not chosen[option]:
            raise ConfigError(f"{place} needs {option}=COLUMN. Known: {', '.join(names)}.")
        if chosen[option] not in names:
            raise ConfigError(
                f"{place}: {option}={chosen[option]}: no such column; "
                f"{did_you_mean(chosen[option], names)}"
            )
    for part in ("validation", "test"):
        if chosen[part]:
            tables[part] = read_tables(place, form, chosen[part], names)
    lost = lost_of(*tables.values())
    check_lost(lost, most_bad)
    text, target = chosen["text"], chosen["target"]
    labels = to_columns(place, tables["train"], [target])
    classes = Target.of(place, labels, target, CLASSIFICATION)
    parts: dict[str, Any] = {"lost": lost}
    for part, found in tables.items():
        texts = to_columns(place, found, [text], {text: TEXT})
        check_present(place, texts, text, "Remove such rows.")
        own = to_columns(place, found, [target], labels.kinds)
        parts[part] = ArraySource((texts.values[text], classes.of_rows(place, own)))
    return parts, tuple(classes.classes)

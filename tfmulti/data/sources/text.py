"""Texts with one class each, as sequences of tokens.

    --dataset text:FOLDER                                 a folder of .txt files for each class
    --dataset text:PATTERN,text=COLUMN,target=COLUMN      CSV or Parquet files (see `tables`)

`FOLDER` contains the class folders. Or it contains a folder `train` with the class folders, and
beside it `validation` (or `val`) and `test`. The options are:

    tokens       how many tokens of a text are read (default: 200); a shorter text is padded
    vocabulary   the most tokens of the vocabulary, with 0 for padding and 1 for any unknown word
                 (default: 20000)
    text         the column of the texts in a table
    target       the column of the classes in a table
    validation   the files of the validation part of a table
    test         the files of the test part of a table

Keras' `TextVectorization` makes the tokens. It takes small letters, removes punctuation, and makes
each word a token. The chief computes the vocabulary from the training texts, and all workers get
it. The file vocabulary.txt in the run directory has the form that
`TextVectorization(vocabulary=PATH)` reads. Text files are read when their examples are needed.
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
from tfmulti.data.bad_records import naming_the_first, read_around_faults
from tfmulti.data.data_set import CLASSIFICATION, DataSet, DataSpec, FromChief
from tfmulti.data.formats.columns import (
    CSV,
    TEXT,
    form_of,
    lost_of,
    read_parts,
    read_tables,
    to_columns,
)
from tfmulti.data.io import files
from tfmulti.data.io.folders import find_classes, find_parts
from tfmulti.data.options import parse_options
from tfmulti.data.source import Leaf, OverSource, Source
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
# One token is padding, and one is any word that the vocabulary lacks.
_SPECIAL_TOKENS = 2
# The number of texts that are in memory at a time while the vocabulary is computed.
_BLOCK = 256


def load(options: str, seed: int) -> DataSet:
    """Returns the data of `FOLDER[,…]` or `PATTERN,text=COLUMN,target=COLUMN[,…]`.

    The parts hold texts until `DataSet.broadcast` turns these into tokens.

    Raises:
        ConfigError: an option is wrong.
        DataError: a file or a class is missing, or a table cannot be read.
    """
    path, _, rest = options.partition(",")
    prefix = f"--dataset text:{path}"
    if not path:
        raise DataError(f"{prefix} needs a folder. Write --dataset text:FOLDER.")
    chosen = parse_options(f"text:{path}", rest, _DEFAULTS)
    if chosen["vocabulary"] <= _SPECIAL_TOKENS:
        raise ConfigError(
            f"{prefix}: vocabulary is {chosen['vocabulary']}, but it must be above "
            f"{_SPECIAL_TOKENS}: 0 is padding and 1 any other word."
        )
    is_table = chosen["text"] or chosen["target"] or form_of(path)
    if is_table:
        parts, names = _of_tables(prefix, path, chosen)
    else:
        parts, names = _of_folders(prefix, path, chosen)
    spec = DataSpec(
        (chosen["tokens"],),
        "int32",
        CLASSIFICATION,
        len(names),
        vocabulary_size=chosen["vocabulary"],
        class_names=names,
    )
    return DataSet(spec=spec, broadcast=functools.partial(_tokenized, prefix), **parts)


class TextFiles(Source):
    """Text files, each read when it is asked for, with their labels: str and int32 [n].

    Args:
        paths: the files.
        labels: the label of each file, int32 [files].
    """

    def __init__(self, paths: list[str], labels: np.ndarray) -> None:
        self.paths, self._labels = paths, labels

    def __len__(self) -> int:
        return len(self.paths)

    @property
    def specs(self) -> Any:
        return Leaf((), "str"), Leaf((), "int32")

    def read(self, indices: np.ndarray, epoch: int = 0) -> Any:
        """Returns the texts and the labels of the files at `indices`.

        Raises:
            OSError: a file cannot be read.
            DataError: a file is not UTF-8 text.
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
        return f"{zlib.crc32(self._labels.tobytes())}\n{files.identity_of(self.paths)}"


class VectorizedSource(OverSource):
    """The texts of another source as tokens, int32 [n, tokens], with their labels.

    Args:
        source: the texts and their labels.
        vectorize: turns texts [n] into tokens, as the function that `vectorizer` returns does.
            Several threads call it at once.
        tokens: the number of tokens of a text.
    """

    def __init__(
        self, source: Source, vectorize: Callable[[np.ndarray], np.ndarray], tokens: int
    ) -> None:
        super().__init__(source)
        self._vectorize, self._tokens = vectorize, tokens

    @property
    def specs(self) -> Any:
        return Leaf((self._tokens,), "int32"), self.below.specs[1]

    def read(self, indices: np.ndarray, epoch: int = 0) -> Any:
        texts, labels = self.below.read(indices, epoch)
        return self._vectorize(texts), labels


def vectorizer(vocabulary: tuple[str, ...], tokens: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a function that turns texts, str [n], into tokens, int32 [n, tokens].

    `vocabulary` has the words, most frequent first, without the tokens for padding and unknown
    words.
    """
    tf = importlib.import_module("tensorflow")
    layer = _layer(output_sequence_length=tokens, vocabulary=list(vocabulary))
    # One graph for any number of texts takes half the time of the layer's single operations.
    run = tf.function(
        lambda texts: tf.cast(layer(texts), tf.int32),
        input_signature=[tf.TensorSpec([None], tf.string)],
        autograph=False,
    )

    def vectorize(texts: np.ndarray) -> np.ndarray:
        with tf.device("CPU:0"):
            rows: np.ndarray = run(tf.constant(texts, tf.string)).numpy()
        return rows

    return vectorize


def make_vocabulary(prefix: str, source: Source, size: int) -> tuple[str, ...]:
    """Returns the words of a source's texts, most frequent first.

    The vocabulary has at most `size` tokens, with those for padding and unknown words. A text that
    cannot be read does not count.

    Raises:
        DataError: no text that can be read has a word.
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
            f"{prefix}: the training texts hold no words, or cannot be read: the first is "
            f"{source.where(0)}. Give files of text in UTF-8."
        )
    return words


def _tokenized(prefix: str, data: DataSet, from_chief: FromChief) -> DataSet:
    """Returns the data as tokens, whose vocabulary the chief makes; every worker calls it."""
    assert data.spec is not None
    assert data.spec.vocabulary_size is not None
    tokens, size = data.spec.input_shape[0], data.spec.vocabulary_size
    lines = from_chief(lambda: "\n".join(make_vocabulary(prefix, data.train, size)).encode())
    vocabulary = tuple(lines.decode().split("\n"))
    vectorize = vectorizer(vocabulary, tokens)
    parts: dict[str, Any] = {
        name: part.changed(lambda source: VectorizedSource(source, vectorize, tokens))
        for name, part in data.parts.items()
    }
    spec = replace(data.spec, vocabulary_size=len(vocabulary) + _SPECIAL_TOKENS)
    return replace(data, spec=spec, vocabulary=vocabulary, **parts)


def _texts_of(source: Source) -> Iterator[np.ndarray]:
    """Yields the texts of a source that can be read, a block at a time.

    The others are left to the loader, which names them, or leaves them out if that is allowed.
    """
    for start in range(0, len(source), _BLOCK):
        indices = np.arange(start, min(start + _BLOCK, len(source)))
        yield from read_around_faults(
            lambda rows: source.read(rows)[0], indices, lambda index, error: None
        )


def _layer(**options: Any) -> Any:
    """Returns a layer of Keras that turns texts into tokens."""
    return importlib.import_module("keras").layers.TextVectorization(output_mode="int", **options)


def _decoded(data: bytes) -> str:
    """Returns UTF-8 bytes as text, without a byte order mark; raises DataError for others."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"it is not UTF-8 text (byte {error.start})") from None


def _of_folders(
    prefix: str, path: str, chosen: dict[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the parts of a folder, and the names of the classes."""
    for option in ("validation", "test"):
        if chosen[option]:
            raise ConfigError(
                f"{prefix}: {option}={chosen[option]} is for tables. Put the class folders of that "
                f"part into {files.join(path, option)}, and those for training into "
                f"{files.join(path, 'train')}."
            )
    folders = find_parts(prefix, files.expanded(path))
    train = find_classes(prefix, folders.pop("train"), (".txt",))
    classes = {"train": train} | {
        part: find_classes(prefix, folder, (".txt",), train.names)
        for part, folder in folders.items()
    }
    return {part: TextFiles(c.paths, c.labels) for part, c in classes.items()}, train.names


def _of_tables(
    prefix: str, path: str, chosen: dict[str, Any]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Returns the parts of tables, with `lost` for rows left out, and the names of the classes."""
    form = form_of(path) or CSV
    train = read_tables(prefix, form, path)
    names = train[0].rows.column_names
    for option in ("text", "target"):
        if not chosen[option]:
            raise ConfigError(f"{prefix} needs {option}=COLUMN. Known: {', '.join(names)}.")
        if chosen[option] not in names:
            raise ConfigError(
                f"{prefix}: {option}={chosen[option]}: no such column; "
                f"{did_you_mean(chosen[option], names)}"
            )
    tables = read_parts(prefix, form, train, chosen)
    lost = lost_of(*tables.values())
    with naming_the_first(lost):
        text, target = chosen["text"], chosen["target"]
        labels = to_columns(prefix, train, [target])
        classes = Target.of(prefix, labels, target, CLASSIFICATION)
        parts: dict[str, Any] = {"lost": lost}
        for part, part_tables in tables.items():
            texts = to_columns(prefix, part_tables, [text], {text: TEXT})
            check_present(prefix, texts, text, "Remove such rows.")
            part_labels = to_columns(prefix, part_tables, [target], labels.kinds)
            parts[part] = ArraySource((texts.values[text], classes.of_rows(prefix, part_labels)))
    return parts, tuple(classes.classes)

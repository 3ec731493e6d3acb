"""Writes synthetic files in place of what public programs download and unpack."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

IMAGES = 40
_WORDS = """
    a the this that one dog cat child man woman bird horse film story scene actor runs jumps sits
    looks was is very not good bad old young red blue small large on in under with near house tree
    water street ball field and but while
"""


def offer_files(folder: Path) -> None:
    """Replaces functions that download, and writes unpacked archives to the working folder.

    Args:
        folder: a folder of this process, to which the functions write.
    """
    keras.utils.get_file = _get_file(folder)
    gdown = types.ModuleType("gdown")
    gdown.download = _download_images  # type: ignore[attr-defined]
    sys.modules["gdown"] = gdown
    _offer_series()
    _offer_tables()
    # Programs also look for downloads below the user's home.
    os.environ["HOME"] = str(Path("home").absolute())
    Path("home/.keras").mkdir(parents=True, exist_ok=True)
    for name, fill in _UNPACKED.items():
        _unpack(Path(name), fill)


def sentence(generator: np.random.Generator, words: int) -> str:
    """Returns a sentence of words drawn at random.

    Args:
        generator: draws the words.
        words: how many.
    """
    return " ".join(generator.choice(_WORDS.split(), words))


def _rng() -> np.random.Generator:
    return np.random.default_rng(3)


def _unpack(target: Path, fill: Callable[[Path], None]) -> None:
    """Writes a folder or file whole, while another worker may do the same."""
    if target.exists():
        return
    made = Path(tempfile.mkdtemp(dir="."))
    fill(made / "made")
    try:
        (made / "made").rename(target)
    except OSError:
        # The other worker was faster, and a folder that is not empty stays.
        assert target.exists()
    shutil.rmtree(made)


def _write_reviews(target: Path) -> None:
    generator = _rng()
    for part in ("train", "test"):
        for kind in ("pos", "neg"):
            folder = target / part / kind
            folder.mkdir(parents=True)
            for i in range(20):
                (folder / f"{i}.txt").write_text(sentence(generator, 12 + i) + ".")


def _write_images(target: Path) -> None:
    target.mkdir(parents=True)
    for i, image in enumerate(_rng().integers(0, 256, (IMAGES, 60, 50, 3)).astype("uint8")):
        (target / f"{i:03d}.jpg").write_bytes(tf.io.encode_jpeg(image).numpy())


def _write_dark_images(target: Path) -> None:
    generator = _rng()
    for name in ("our485/low", "our485/high", "eval15/low", "eval15/high"):
        (target / name).mkdir(parents=True)
        for i, image in enumerate(generator.integers(0, 256, (IMAGES, 64, 64, 3)).astype("uint8")):
            (target / name / f"{i:03d}.png").write_bytes(tf.io.encode_png(image).numpy())


def _write_payments(target: Path) -> None:
    generator = _rng()
    rows = [
        ",".join(f"{value:.4f}" for value in generator.standard_normal(30)) + f',"{i % 4 // 3}"\n'
        for i in range(400)
    ]
    target.write_text('"Time","V1","Class"\n' + "".join(rows))


def _write_captions(target: Path) -> None:
    generator = _rng()
    lines = [
        f"{i:03d}.jpg#{k}\t{sentence(generator, int(generator.integers(5, 15)))} .\n"
        for i in range(IMAGES)
        for k in range(5)
    ]
    target.write_text("".join(lines))


# The programs' own commands for the shell unpack these, and they are not run.
_UNPACKED: dict[str, Callable[[Path], None]] = {
    "aclImdb": _write_reviews,
    "creditcard.csv": _write_payments,
    "Flicker8k_Dataset": _write_images,
    "Flickr8k.token.txt": _write_captions,
    "home/.keras/left": _write_images,
    "home/.keras/right": _write_images,
    "lol_dataset": _write_dark_images,
}


def _download_images(url: str, output: str, **options: Any) -> str:
    with tempfile.TemporaryDirectory() as folder:
        _write_images(Path(folder) / "images")
        with zipfile.ZipFile(output, "w") as archive:
            for file in sorted(Path(folder, "images").iterdir()):
                archive.write(file, f"images/{file.name}")
    return output


def _write_ratings(folder: Path) -> None:
    target = folder / "ml-latest-small"
    target.mkdir(exist_ok=True)
    generator = _rng()
    rows = [
        f"{generator.integers(1, 20)},{generator.integers(1, 30)},"
        f"{generator.integers(1, 10) / 2},{i}"
        for i in range(400)
    ]
    head = "userId,movieId,rating,timestamp\n"
    (target / "ratings.csv").write_text(head + "\n".join(rows) + "\n")
    films = "".join(f"{i},Film {i},Drama\n" for i in range(1, 31))
    (target / "movies.csv").write_text("movieId,title,genres\n" + films)


def _write_sentence_pairs(folder: Path) -> None:
    target = folder / "spa-eng"
    target.mkdir(exist_ok=True)
    generator = _rng()
    pairs = [f"{sentence(generator, 5)}.\t¿{sentence(generator, 7)}?\n" for _ in range(200)]
    (target / "spa.txt").write_text("".join(pairs))


def _write_short_sentence_pairs(folder: Path) -> None:
    generator = _rng()
    pairs = [f"{sentence(generator, 2)}.\t{sentence(generator, 3)}!\tCC\n" for _ in range(120)]
    (folder / "fra.txt").write_text("".join(pairs))


def _write_reviews_beside(folder: Path) -> None:
    if not (folder / "aclImdb").exists():
        _write_reviews(folder / "aclImdb")


def _write_traffic(folder: Path) -> None:
    for name, rows in (("PeMSD7_W_228", 228), ("PeMSD7_V_228", 300)):
        np.savetxt(folder / f"{name}.csv", 60 * _rng().random((rows, 228)), "%.3f", ",")


def _write_frames(folder: Path) -> None:
    frames = _rng().integers(0, 256, (20, 50, 16, 16)).astype("uint8")
    np.save(folder / "mnist_test_seq.npy", frames)


# The names of the files without their last ending.
_ARCHIVES = {
    "aclImdb_v1.tar": _write_reviews_beside,
    "fra-eng": _write_short_sentence_pairs,
    "ml-latest-small": _write_ratings,
    "mnist_test_seq": _write_frames,
    "PeMSD7_Full": _write_traffic,
    "spa-eng": _write_sentence_pairs,
}


def _get_file(folder: Path) -> Callable[..., str]:
    def get_file(fname: Any = None, origin: Any = None, *args: Any, **options: Any) -> str:
        origin = str(origin or fname)
        name = Path(origin).name
        if write := _ARCHIVES.get(Path(origin).stem):
            write(folder)
            return str(folder / name)
        if name.endswith(".txt"):
            (folder / name).write_text("The quick brown fox jumps over the lazy dog. " * 200)
            return str(folder / name)
        raise RuntimeError(f"no synthetic data for {origin}")

    return get_file


def _offer_series() -> None:
    """Returns a table of two classes of series for `numpy.loadtxt` of an address."""
    original = np.loadtxt

    def loadtxt(source: Any, *args: Any, **options: Any) -> Any:
        if not str(source).startswith("http"):
            return original(source, *args, **options)
        table = _rng().standard_normal((120, 101))
        table[:, 0] = np.where(np.arange(120) % 2, 1, -1)
        return table

    np.loadtxt = loadtxt


def _offer_tables() -> None:
    """Makes `pandas.read_csv` return a synthetic table for an address.

    Without pandas it does nothing. The programs that need pandas cannot run then.
    """
    if importlib.util.find_spec("pandas") is None:
        return
    pandas = importlib.import_module("pandas")
    original = pandas.read_csv

    def read_csv(source: Any, *args: Any, **options: Any) -> Any:
        if not str(source).startswith("http"):
            return original(source, *args, **options)
        index = options.get("index_col")
        table = pandas.DataFrame(_series() if index else _patients())
        return table.set_index(index) if index else table

    pandas.read_csv = read_csv


def _series() -> dict[str, np.ndarray]:
    times = np.datetime64("2020-01-01") + np.timedelta64(5, "m") * np.arange(700)
    return {"timestamp": times, "value": 20 + _rng().standard_normal(700)}


def _patients() -> dict[str, np.ndarray]:
    generator, rows = _rng(), np.arange(300)
    columns = {name: generator.integers(0, end, len(rows)) for name, end in _PATIENTS.items()}
    thal = np.array(["normal", "fixed", "reversible"])[rows % 3]
    return {**columns, "thal": thal, "target": rows % 2}


# The columns of a table of patients, with the numbers below which their values are.
_PATIENTS = dict.fromkeys(("sex", "fbs", "exang"), 2) | {
    "age": 90,
    "ca": 4,
    "chol": 400,
    "cp": 4,
    "oldpeak": 6,
    "restecg": 3,
    "slope": 3,
    "thalach": 200,
    "trestbps": 200,
}

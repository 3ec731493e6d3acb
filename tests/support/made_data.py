"""Writes small data of every kind to the disk: one function for each kind, in `KINDS`.

Each function writes `EXAMPLES` different examples into a given folder, and returns the value of
`--dataset` for them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import cv2
import numpy as np

from benchmarks.input_data import example
from tests.support.records import write_features, write_records

# Not a multiple of the batch sizes in the tests.
EXAMPLES = 23


def pictures(count: int, height: int = 12, width: int = 16) -> np.ndarray:
    """Returns different smooth images, uint8 [count, height, width, 3]."""
    rng = np.random.default_rng(3)
    small = rng.integers(0, 255, (count, 4, 4, 3), dtype=np.uint8)
    return np.stack([cv2.resize(image, (width, height)) for image in small])


def npz(folder: Path) -> str:
    x = np.arange(EXAMPLES * 3, dtype=np.float32).reshape(EXAMPLES, 3)
    np.savez(folder / "a.npz", x=x, y=np.arange(EXAMPLES) % 4, weight=np.arange(EXAMPLES) / 10)
    return f"npz:{folder / 'a.npz'}"


def npy(folder: Path) -> str:
    np.save(folder / "x.npy", np.arange(EXAMPLES * 3, dtype=np.float64).reshape(EXAMPLES, 3))
    np.save(folder / "y.npy", np.arange(EXAMPLES) % 4)
    return f"npy:{folder}"


def images(folder: Path) -> str:
    for i, image in enumerate(pictures(EXAMPLES)):
        place = folder / f"class{i % 3}"
        place.mkdir(exist_ok=True)
        cv2.imwrite(str(place / f"{i}{'.png' if i % 2 else '.jpg'}"), image)
    return f"images:{folder},size=8x10"


def tfrecord(folder: Path) -> str:
    """Files of 1, 0, 15 and 7 records."""
    records = [example(encoded(image), i % 3) for i, image in enumerate(pictures(EXAMPLES, 8, 8))]
    start = 0
    for name, count in (("a", 1), ("b", 0), ("c", 15), ("d", 7)):
        write_records(folder / name, records[start : start + count])
        start += count
    write_features(folder)
    return f"tfrecord:{folder}"


def tfds(folder: Path) -> str:
    _builder()(data_dir=str(folder)).download_and_prepare()
    return f"tfds:contract,data_dir={folder}"


# tensorflow-datasets accepts a class name only once.
@functools.cache
def _builder() -> Any:
    from tensorflow_datasets import features

    from tests.support.prepared import Made

    class Contract(Made):
        form: ClassVar[dict[str, Any]] = {
            "image": features.Image(shape=(8, 8, 3)),
            "label": features.ClassLabel(num_classes=3),
        }

        def parts(self) -> dict[str, Iterator[dict[str, Any]]]:
            images = pictures(EXAMPLES, 8, 8)
            return {"train": ({"image": x, "label": i % 3} for i, x in enumerate(images))}

    return Contract


def csv(folder: Path) -> str:
    """Files of 1 and 22 rows."""
    rows = [f"{i},{'red' if i % 3 else 'blue'},{i % 2 + 0.5},{i * i}.5" for i in range(EXAMPLES)]
    for name, part in (("a", rows[:1]), ("b", rows[1:])):
        (folder / f"{name}.csv").write_text("\n".join(["number,color,half,size", *part]))
    return f"csv:{folder},target=size"


def parquet(folder: Path) -> str:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table(
        {"n": list(range(EXAMPLES)), "kind": ["ab"[i % 2] for i in range(EXAMPLES)]}
    )
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=4)
    return f"parquet:{folder / 'a.parquet'},target=kind"


def text(folder: Path) -> str:
    for i in range(EXAMPLES):
        place = folder / ("good" if i % 2 else "bad")
        place.mkdir(exist_ok=True)
        (place / f"{i}.txt").write_text(" ".join(["word"] * i + [f"own{i}"]))
    return f"text:{folder},tokens=30"


KINDS: dict[str, Callable[[Path], str]] = {
    "npz": npz,
    "npy": npy,
    "images": images,
    "tfrecord": tfrecord,
    "tfds": tfds,
    "csv": csv,
    "parquet": parquet,
    "text": text,
}


def encoded(image: np.ndarray) -> bytes:
    return bytes(cv2.imencode(".png", image[..., ::-1])[1])

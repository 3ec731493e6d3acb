"""Makes the data of `benchmarks.input`: arrays, and the same images as files and as TFRecords."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import cv2
import google_crc32c
import numpy as np

ROWS, SHAPE = 60_000, (28, 28, 1)
IMAGES, SIDE, CLASSES, FILES = 2_000, 256, 10, 4
TARGET = (224, 224)
BATCHES = {"arrays": 256, "images": 64, "tfrecord": 64}


def make(folder: Path) -> None:
    """Writes x.npy and y.npy, images/CLASS/N.jpg, and records/ with a features.json."""
    rng = np.random.default_rng(0)
    np.save(folder / "x.npy", rng.integers(0, 256, (ROWS, *SHAPE), dtype=np.uint8))
    np.save(folder / "y.npy", rng.integers(CLASSES, size=ROWS).astype(np.int32))
    encoded = [_photograph(rng) for _ in range(IMAGES)]
    for i, data in enumerate(encoded):
        class_folder = folder / "images" / f"class{i % CLASSES}"
        class_folder.mkdir(parents=True, exist_ok=True)
        (class_folder / f"{i:05}.jpg").write_bytes(data)
    records = folder / "records"
    records.mkdir()
    for file in range(FILES):
        with open(records / f"train-{file:05}", "wb") as out:
            for i in range(file, IMAGES, FILES):
                out.write(_framed(example(encoded[i], i % CLASSES)))
    features = {"image": {"type": "image", "shape": [*TARGET, 3]}, "label": {"type": "int64"}}
    spec = {"features": features, "x": "image", "y": "label", "classes": CLASSES}
    (records / "features.json").write_text(json.dumps(spec))


def arrays_of(task: str, folder: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the arrays that `make` has written; None for other tasks than `arrays`."""
    if task != "arrays":
        return None
    return np.load(f"{folder}/x.npy"), np.load(f"{folder}/y.npy")


def _photograph(rng: np.random.Generator) -> bytes:
    """Returns a JPEG of about 30 KB: smooth shapes with some noise, as photographs have."""
    small = rng.integers(0, 256, (16, 16, 3)).astype(np.uint8)
    image = cv2.resize(small, (SIDE, SIDE), interpolation=cv2.INTER_CUBIC).astype(np.float32)
    image += rng.normal(0, 12, image.shape)
    quality = [cv2.IMWRITE_JPEG_QUALITY, 90]
    return bytes(cv2.imencode(".jpg", np.clip(image, 0, 255).astype(np.uint8), quality)[1])


def example(image: bytes, label: int) -> bytes:
    """Returns a tf.train.Example in the form of protocol buffers."""
    features = [
        _entry("image", _field(1, _field(1, image))),
        _entry("label", _field(3, _field(1, bytes([label])))),
    ]
    return _field(1, b"".join(features))


def _entry(name: str, feature: bytes) -> bytes:
    return _field(1, _field(1, name.encode()) + _field(2, feature))


def _field(number: int, content: bytes) -> bytes:
    length, size = b"", len(content)
    while True:
        size, low = size >> 7, size & 0x7F
        length += bytes([low | (0x80 if size else 0)])
        if not size:
            return bytes([number << 3 | 2]) + length + content


def _framed(data: bytes) -> bytes:
    def checksum(content: bytes) -> bytes:
        value = google_crc32c.value(content)
        return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)

    length = struct.pack("<Q", len(data))
    return length + checksum(length) + data + checksum(data)

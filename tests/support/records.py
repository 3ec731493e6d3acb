"""Writes TFRecord files without importing TensorFlow."""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfmulti.data.formats.record_index import checksum


def framed(data: bytes) -> bytes:
    """Returns a record with its length and checksums."""
    length = struct.pack("<Q", len(data))
    sums = struct.pack("<I", checksum(length)), struct.pack("<I", checksum(data))
    return length + sums[0] + data + sums[1]


def write_records(path: Path, records: Sequence[bytes]) -> Path:
    path.write_bytes(b"".join(map(framed, records)))
    return path


def write_features(folder: Path, **content: Any) -> Path:
    """Writes a features.json, by default for an image and a label."""
    features = {"image": {"type": "image", "shape": [8, 8, 3]}, "label": {"type": "int64"}}
    whole = {"features": features, "x": "image", "y": "label", "classes": 3} | content
    path = folder / "features.json"
    path.write_text(json.dumps({k: v for k, v in whole.items() if v is not None}))
    return path

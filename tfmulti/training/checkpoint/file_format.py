"""Checkpoints: a run's position as one file, whole or absent.

A record is what a run needs to go on as if it had never stopped: a tree of plain values
(where it is, seeds, callbacks' states) and arrays (weights, slots, metrics in progress). Each
is one `.npz` file: the arrays as NumPy writes them, and `record.json`, which has the tree and
the SHA-256 of every array. Beside zip's own checksums that tells a damaged file from a whole one.
"""

from __future__ import annotations

import hashlib
import io
import json
import operator
import re
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tfmulti.config.run_directory import replacing
from tfmulti.errors import TfmultiError
from tfmulti.training.checkpoint import serialization

FORMAT = 3
_TREE = "record.json"
_NAME = re.compile(r"step-(\d{9,})\.npz")


class DamagedCheckpoint(TfmultiError):
    """A checkpoint's file is not as it was written."""


@dataclass(frozen=True)
class Record:
    """A position in a run.

    `step` counts the optimizer steps since the run began. `tree` holds plain values (`plain`).
    """

    step: int
    tree: dict[str, Any]


def to_bytes(record: Record) -> bytes:
    """Returns the file of a record."""
    arrays: list[np.ndarray] = []
    tree = serialization.to_json(record.tree, arrays)
    named = [serialization.to_npy(array) for array in arrays]
    blobs = [blob for _, blob in named]
    head = {
        "format": FORMAT,
        "step": record.step,
        "tree": tree,
        "types": [name for name, _ in named],
        "sha256": [hashlib.sha256(blob).hexdigest() for blob in blobs],
    }
    text = json.dumps(head)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        sealed = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "text": text}
        archive.writestr(_TREE, json.dumps(sealed))
        for number, blob in enumerate(blobs):
            archive.writestr(f"{number}.npy", blob)
    return file.getvalue()


def from_bytes(data: bytes) -> Record:
    """Returns the record that a file holds.

    Raises:
        DamagedCheckpoint: it is cut off, a bit has changed, or a part is missing.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            # All together take no more memory than the file has bytes.
            entries = archive.infolist()
            is_packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
            if is_packed or sum(entry.file_size for entry in entries) > len(data):
                raise DamagedCheckpoint("a part of it is compressed, or larger than the file")
            sealed = json.loads(archive.read(_TREE))
            text = sealed["text"]
            if hashlib.sha256(text.encode()).hexdigest() != sealed["sha256"]:
                raise DamagedCheckpoint("its description has changed since it was written")
            head = json.loads(text)
            if head["format"] != FORMAT:
                raise DamagedCheckpoint(
                    f"it has format {head['format']}, but this version reads {FORMAT}"
                )
            arrays = []
            for number, (name, digest) in enumerate(
                zip(head["types"], head["sha256"], strict=True)
            ):
                blob = archive.read(f"{number}.npy")
                if hashlib.sha256(blob).hexdigest() != digest:
                    raise DamagedCheckpoint(f"array {number} has changed since it was written")
                arrays.append(serialization.from_npy(name, blob))
            tree = serialization.from_json(head["tree"], arrays)
            record = Record(operator.index(head["step"]), {**tree})
    except DamagedCheckpoint:
        raise
    except Exception as error:  # zip and npy have many ways to be broken
        raise DamagedCheckpoint(f"it is cut off or damaged ({error})") from None
    return record


class Checkpoints:
    """The newest checkpoints of a run in one folder. Only the chief reads and writes it.

    Args:
        keep: how many stay. An older one goes when a newer one was written and read again.
        check: called before anything is written or removed; it raises where that must not be.
    """

    def __init__(
        self, folder: Path, keep: int = 2, check: Callable[[], None] = lambda: None
    ) -> None:
        self.folder, self._keep, self._check = folder, keep, check
        self._damaged: set[Path] = set()  # that were read

    def files(self) -> list[Path]:
        """Returns the files of all checkpoints, the newest first."""
        if not self.folder.is_dir():
            return []
        named = (path for path in self.folder.iterdir() if _NAME.fullmatch(path.name))
        found = [path for path in named if path.is_file()]  # no named pipe, nor a device
        return sorted(found, key=_step_of, reverse=True)

    def write(self, record: Record) -> Path:
        """Writes a record, reads it again, and removes older ones beyond `keep`.

        Of those that are newer only what was read and found damaged is removed: the run went on
        from before it. Any other is another's.

        Raises:
            Exception: what `check` raises; nothing more was written or removed.
            OSError: the disk is full, or the folder cannot be written; what was there stays.
            DamagedCheckpoint: what is read is not what was written; what was there stays.
        """
        data = to_bytes(record)
        self._check()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step-{record.step:09d}.npz"
        with replacing(path) as partial:
            partial.write_bytes(data)
            if partial.read_bytes() != data:
                raise DamagedCheckpoint(f"{path} does not hold what was written to it")
            self._check()
        self._damaged.discard(path)
        others = [old for old in self.files() if old not in self._damaged]
        older = [old for old in others if _step_of(old) <= record.step]
        for old in [*older[self._keep :], *self._damaged]:
            self._check()
            old.unlink(missing_ok=True)
        self._damaged.clear()
        return path

    def newest(self) -> tuple[Record | None, list[str]]:
        """Returns the newest whole record, and what is wrong with those newer than it."""
        wrong: list[str] = []
        for path in self.files():
            try:
                return from_bytes(path.read_bytes()), wrong
            except DamagedCheckpoint as error:
                self._damaged.add(path)
                wrong.append(f"{path}: {error}")
            except OSError as error:
                wrong.append(f"{path}: {error}")
        return None, wrong


def _step_of(path: Path) -> int:
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])

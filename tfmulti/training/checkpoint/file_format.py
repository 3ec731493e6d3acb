"""Writes and reads checkpoints: the position of a run as one file, which is whole or absent.

A record holds what a run needs to continue as if it had never stopped. It is a tree of plain values
(position, seeds, states of callbacks) and arrays (weights, slots, metrics of the current epoch).

A record becomes one `.npz` file. It holds the arrays as NumPy writes them, and `record.json`, which
has the tree and the SHA-256 of every array. These digests and zip's own checksums show whether a
file is damaged. `DamagedCheckpointError` holds the reason, from which `callback.Checkpoint` makes
its message.
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

from tfmulti.config.limited_reading import read_small
from tfmulti.config.run_directory import replacing
from tfmulti.data.io.files import memory_bytes
from tfmulti.errors import TfmultiError
from tfmulti.training.checkpoint import serialization

# A file of another format is not read.
FORMAT = 3
_TREE = "record.json"
_NAME = re.compile(r"step-(\d{9,})\.npz")


class DamagedCheckpointError(TfmultiError):
    """Raised if the file of a checkpoint is not as it was written."""


@dataclass(frozen=True)
class Record:
    """A position in a run.

    Attributes:
        step: the steps since the run began.
        tree: plain values and arrays by name (`serialization`).
    """

    step: int
    tree: dict[str, Any]


def to_bytes(record: Record) -> bytes:
    """Returns the content of the file of a record."""
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
        DamagedCheckpointError: the file is cut off, a bit has changed, a part is missing, or the
            file has another format.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            # Only entries that are not compressed are read. So a small file cannot take more
            # memory than it has bytes.
            entries = archive.infolist()
            is_packed = any(entry.compress_type != zipfile.ZIP_STORED for entry in entries)
            if is_packed or sum(entry.file_size for entry in entries) > len(data):
                raise DamagedCheckpointError("a part of it is compressed, or larger than the file")
            sealed = json.loads(archive.read(_TREE))
            text = sealed["text"]
            if hashlib.sha256(text.encode()).hexdigest() != sealed["sha256"]:
                raise DamagedCheckpointError("its description has changed since it was written")
            head = json.loads(text)
            if head["format"] != FORMAT:
                raise DamagedCheckpointError(
                    f"it has format {head['format']}, but this version reads {FORMAT}"
                )
            arrays = []
            for number, (name, digest) in enumerate(
                zip(head["types"], head["sha256"], strict=True)
            ):
                blob = archive.read(f"{number}.npy")
                if hashlib.sha256(blob).hexdigest() != digest:
                    raise DamagedCheckpointError(f"array {number} has changed since it was written")
                arrays.append(serialization.from_npy(name, blob))
            tree = serialization.from_json(head["tree"], arrays)
            record = Record(operator.index(head["step"]), {**tree})
    except DamagedCheckpointError:
        raise
    except Exception as error:
        # A damaged zip or npy file raises errors of many types.
        raise DamagedCheckpointError(f"it is cut off or damaged ({error})") from None
    return record


class Checkpoints:
    """The newest checkpoints of a run in one folder. Only the chief reads and writes them.

    This object removes three kinds of files: those that it has written, those that it has read and
    found damaged, and the record that `newest` returned with all older ones. So the checkpoints of
    many restarts do not add up. A process that lost its connection cannot remove what another
    process has written since.

    Args:
        folder: the folder; it is made when the first checkpoint is written.
        keep: how many checkpoints stay. An older one is removed after a newer one was written and
            read again.
        check: a function that is called before anything is written or removed. It raises an error
            if this process must not do that.

    Attributes:
        folder: the folder.
    """

    def __init__(self, folder: Path, keep: int, check: Callable[[], None] = lambda: None) -> None:
        self.folder, self._keep, self._check = folder, keep, check
        # The files that `newest` has read and found damaged.
        self._damaged: set[Path] = set()
        # The whole files that this object may remove.
        self._removable: set[Path] = set()

    def files(self) -> list[Path]:
        """Returns the files of all checkpoints, the newest first."""
        if not self.folder.is_dir():
            return []
        named = (path for path in self.folder.iterdir() if _NAME.fullmatch(path.name))
        # Reading a named pipe or a device of that name might never end.
        files = [path for path in named if path.is_file()]
        return sorted(files, key=_step_of, reverse=True)

    def write(self, record: Record) -> Path:
        """Writes a record, reads it again, removes older ones beyond `keep`, and returns the path.

        Damaged files that `newest` has found are removed, too, even if they are newer, because the
        run went on from an older checkpoint. Files that another process has written since stay.

        Raises:
            Exception: `check` raised it; nothing was written or removed after that.
            OSError: the disk is full, or the folder cannot be written. All earlier files stay.
            DamagedCheckpointError: the file does not hold what was written to it. All earlier files
                stay.
        """
        data = to_bytes(record)
        self._check()
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"step-{record.step:09d}.npz"
        with replacing(path) as partial:
            partial.write_bytes(data)
            if partial.read_bytes() != data:
                raise DamagedCheckpointError(f"{path} does not hold what was written to it")
            self._check()
        self._damaged.discard(path)
        self._removable.add(path)
        removable = sorted(self._removable, key=_step_of, reverse=True)
        older = [file for file in removable if _step_of(file) <= record.step]
        for file in [*older[self._keep :], *self._damaged]:
            self._check()
            file.unlink(missing_ok=True)
            self._removable.discard(file)
        self._damaged.clear()
        return path

    def newest(self) -> tuple[Record | None, list[str]]:
        """Returns the newest whole record, or None, and the problems of newer files."""
        problems: list[str] = []
        files = self.files()
        for number, path in enumerate(files):
            try:
                # A file that is larger than the memory is sparse, or no checkpoint of this machine.
                record = from_bytes(read_small(path, memory_bytes()))
                self._removable.update(files[number:])
                return record, problems
            except (DamagedCheckpointError, OSError) as error:
                if isinstance(error, DamagedCheckpointError):
                    self._damaged.add(path)
                problems.append(f"{path}: {error}")
        return None, problems


def _step_of(path: Path) -> int:
    """Returns the step in the name of a checkpoint's file."""
    match = _NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])

"""Where a tf.data iterator is, as a value that can be put into another of the same Dataset."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

MOST_BYTES = 1 << 26  # 64 MB: of a larger one (a long shuffle buffer) a backup would take too long

Position = dict[str, np.ndarray]  # bytes: what TensorFlow writes of it: file name -> content


def position_of(iterator: Any) -> Position | None:
    """Returns where an iterator is, what it holds in buffers included.

    None where TensorFlow cannot tell (a generator, random numbers that are no function of a
    seed) or where it is too large: then the data must be read again up to there.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            tf.train.Checkpoint(iterator=iterator).write(f"{folder}/position")
        except (tf.errors.OpError, ValueError, TypeError):
            return None
        files = sorted(Path(folder).iterdir())
        if sum(file.stat().st_size for file in files) > MOST_BYTES:
            return None
        return {file.name: np.frombuffer(file.read_bytes(), np.uint8) for file in files}


def set_position(iterator: Any, position: Position) -> bool:
    """Puts a new iterator where another one was; returns whether it could be."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in position.items():
            Path(folder, name).write_bytes(content.tobytes())
        try:
            found = tf.train.Checkpoint(iterator=iterator).read(f"{folder}/position")
            found.assert_existing_objects_matched()
        except (tf.errors.OpError, ValueError, TypeError, AssertionError):
            return False
    return True

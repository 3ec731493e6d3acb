"""Keras' TensorBoard callback, for metrics of any shape and runs that resume. On the chief."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from tensorboard.compat.proto import event_pb2

from tfmulti.config.run_directory import remove, replacing
from tfmulti.keras_patches.model_structure import flush_tensorboard


class TensorBoard(keras.callbacks.TensorBoard):
    """Writes scalar metrics; vectors (an F1 score a class), at which Keras' fails, are left out.

    A run that resumes trains the epoch of its checkpoint again: what the stopped process wrote of
    that epoch and later ones is taken out of its files, so that each scalar is there once.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder), write_graph=False)
        found = sorted(folder.rglob("*tfevents*")) if folder.is_dir() else []
        for path in found:
            if path.name.startswith(".partial-"):
                remove(path)  # a process was killed while it rewrote one
        self._earlier = [path for path in found if not path.name.startswith(".partial-")]
        self._begun_epoch = 0

    def get_state(self) -> dict[str, Any]:
        """Returns nothing; writes what it has to the disk, since a checkpoint is made."""
        flush_tensorboard(self)
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Does nothing; see `get_state`."""

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._begun_epoch = epoch
        super().on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._take_out_what_comes_again()
        super().on_train_batch_begin(batch, logs)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._take_out_what_comes_again(-1)  # also what this evaluation has written before
        super().on_test_begin(logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_end(epoch, _scalars(logs))

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        super().on_test_end(_scalars(logs))

    def _take_out_what_comes_again(self, more: int = 0) -> None:
        if self._earlier:
            step = int(keras.ops.convert_to_numpy(self.model.optimizer.iterations)) + more
            for path in self._earlier:
                keep_before(path, self._begun_epoch, step)
            self._earlier = []


def keep_before(path: Path, epoch: int, step: int) -> None:
    """Rewrites an event file without the scalars of an epoch and after, or of steps after `step`.

    Keras writes evaluations by the optimizer's step, all else by epoch. A last record that is
    cut off, as a killed process leaves it, goes too.
    """
    with replacing(path) as partial, tf.io.TFRecordWriter(str(partial)) as writer:
        try:
            for record in tf.data.TFRecordDataset(str(path)):
                event = event_pb2.Event.FromString(record.numpy())
                tags = [value.tag for value in event.summary.value]
                by_step = any(tag.startswith("evaluation_") for tag in tags)
                if not tags or (event.step <= step if by_step else event.step < epoch):
                    writer.write(record.numpy())
        except tf.errors.DataLossError:
            pass  # the end of what was whole


def _scalars(logs: dict[str, Any] | None) -> dict[str, Any]:
    return {name: value for name, value in (logs or {}).items() if not isinstance(value, list)}

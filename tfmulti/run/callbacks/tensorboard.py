"""Extends Keras' TensorBoard callback to vector metrics and to runs that resume.

Runs on the chief.
"""

from __future__ import annotations

import contextlib
import numbers
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
from tensorboard.compat.proto import event_pb2
from tensorboard.plugins.hparams import api as hparams

from tfmulti.config.run_directory import check_guards, remove, replacing
from tfmulti.keras_patches.model_structure import flush_tensorboard


class TensorBoard(keras.callbacks.TensorBoard):
    """Writes the scalar metrics for TensorBoard.

    Metrics that are vectors, such as an F1 score for each class, are left out, because Keras'
    callback fails with them.

    A run that resumes trains the epoch of its checkpoint again. The callback removes the events of
    that epoch and of later ones from the files of the stopped process, so that each scalar is there
    once.

    Args:
        folder: the folder for the event files.
        parameters: the hyper-parameters of the run, for TensorBoard's HPARAMS tab and, as a text,
            for its TEXT tab. The values are texts, numbers or bools.

    Source: TensorBoard's tutorial "Hyperparameter Tuning with the HParams Dashboard".
    """

    def __init__(self, folder: Path, parameters: dict[str, Any] | None = None) -> None:
        super().__init__(str(folder), write_graph=False)
        self._earlier: list[Path] = []
        for path in sorted(folder.rglob("*tfevents*")):
            if path.name.startswith(".partial-"):
                # A process was killed while it rewrote an event file.
                remove(path)
            else:
                self._earlier.append(path)
        self._begun_epoch = 0
        self._folder, self._parameters = folder, parameters or {}

    def get_state(self) -> dict[str, Any]:
        """Returns nothing, and writes all events to the disk before the checkpoint is made."""
        flush_tensorboard(self)
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Does nothing, because `get_state` returns nothing."""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Writes the hyper-parameters, and calls Keras' callback."""
        check_guards(self._folder)
        super().on_train_begin(logs)
        if not self._parameters:
            return
        # TensorBoard finds the metrics of a session in the folders below it.
        writer = tf.summary.create_file_writer(str(self._folder))
        rows = [f"| {name} | {value} |" for name, value in self._parameters.items()]
        with writer.as_default(step=0):
            hparams.hparams(self._parameters)
            tf.summary.text("configuration", "\n".join(["| flag | value |", "|---|---|", *rows]))
        writer.close()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the epoch, and calls Keras' callback."""
        self._begun_epoch = epoch
        super().on_epoch_begin(epoch, logs)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Removes events that will be written again, and calls Keras' callback."""
        self._remove_repeated_events()
        super().on_train_batch_begin(batch, logs)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Removes events that will be written again, and calls Keras' callback."""
        # The events of this step are those of this evaluation, which will be written again.
        self._remove_repeated_events(-1)
        super().on_test_begin(logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the scalar metrics of the step."""
        super().on_train_batch_end(batch, _scalars(logs))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Writes the scalar metrics of the epoch."""
        check_guards(self._folder)
        super().on_epoch_end(epoch, _scalars(logs))

    def on_test_end(self, logs: dict[str, Any] | None = None) -> None:
        """Writes the scalar metrics of the evaluation."""
        check_guards(self._folder)
        super().on_test_end(_scalars(logs))

    def _remove_repeated_events(self, more: int = 0) -> None:
        """Removes, once, the earlier events after the optimizer's step plus `more`."""
        if self._earlier:
            step = int(keras.ops.convert_to_numpy(self.model.optimizer.iterations)) + more
            for path in self._earlier:
                keep_before(path, self._begun_epoch, step)
            self._earlier = []


def keep_before(path: Path, epoch: int, step: int) -> None:
    """Rewrites an event file with only the scalars from before an epoch, or up to a step.

    Keras writes the scalars of evaluations by the step of the optimizer, and all others by epoch. A
    killed process may leave a last record that is cut off. It is removed too.

    Args:
        path: the event file.
        epoch: the first epoch whose scalars are removed.
        step: the last step of the optimizer whose evaluation is kept.
    """
    # A DataLossError says that the last record is cut off.
    with (
        replacing(path) as partial,
        tf.io.TFRecordWriter(str(partial)) as writer,
        contextlib.suppress(tf.errors.DataLossError),
    ):
        for record in tf.data.TFRecordDataset(str(path)):
            event = event_pb2.Event.FromString(record.numpy())
            tags = [value.tag for value in event.summary.value]
            by_step = any(tag.startswith("evaluation_") for tag in tags)
            if not tags or (event.step <= step if by_step else event.step < epoch):
                writer.write(record.numpy())


def _scalars(logs: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the metrics that are one number."""
    return {name: value for name, value in (logs or {}).items() if isinstance(value, numbers.Real)}

"""The callback `Checkpoint`: a run that was stopped continues as if it had never stopped.

    model = prepare(build())
    model.fit(x, y, epochs=90, callbacks=[Checkpoint("runs/a/checkpoints")])

Every worker gives the callback to `fit`. `fit` asks it when a checkpoint is due and where to begin.
Only the chief reads and writes checkpoints. The other workers check that they see the folder,
because any of them may be the chief after a restart.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import keras

from tfmulti.config.console import speaker
from tfmulti.config.training_options import CHECKPOINT_EVERY_S, KEEP_CHECKPOINTS, RESUME
from tfmulti.errors import ConfigError, ResumeError
from tfmulti.launch.heartbeat import heartbeat, saved_before
from tfmulti.training.checkpoint.file_format import Checkpoints, Record
from tfmulti.training.checkpoint.owner import NotOwnerError, ownership_of


def callbacks_in(callbacks: Any) -> list[keras.callbacks.Callback]:
    """Returns the callbacks of what `fit` takes: one callback, several, a CallbackList or None."""
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    several = callbacks if isinstance(callbacks, Collection) else [callbacks]
    return [callback for callback in several if callback is not None]


class Checkpoint(keras.callbacks.Callback):
    """Keeps the newest checkpoints of a run in a folder, and resumes from the newest whole one.

    A resumed run has the same numbers as a run that was never stopped. A checkpoint holds the
    weights, the optimizer, the metrics of the current epoch, the position in the data, and the
    states of random generators and callbacks. The state of a callback, such as EarlyStopping or a
    callback of your own, is its attributes with plain values, or what its `get_state()` returns.

    A `tf.data.Dataset` continues at its position at once, on any number of workers. TensorFlow
    cannot save the position of a generator, or of random numbers without a seed. Such data is read
    again up to the position, and must give the same batches again.

    Args:
        folder: the folder of this run's checkpoints, which every worker must see. A worker that is
            never the chief may be given None. It then need not see the folder.
        every_steps: makes a checkpoint each time that this number of steps has ended. None makes
            checkpoints by time only.
        every_s: makes a checkpoint when the last one is this number of seconds old. None makes
            checkpoints by steps only.
        keep: how many checkpoints stay in the folder.
        resume: `auto` resumes if there is a checkpoint, `must` fails if there is none, and `never`
            refuses a folder that has one.
        clock: a function that returns seconds.

    Attributes:
        resume: the argument `resume`.
        every_steps: the argument `every_steps`.
        every_epoch: whether a checkpoint is made after each epoch, too. A subclass may set it to
            True on all workers.

    Raises:
        ConfigError: an argument is out of its range.
        ResumeError: `fit` raises it if there is no checkpoint to resume from, or if the newest one
            is not of this run.
        RunDirError: `fit` raises it if a worker does not see the chief's folder.
    """

    every_epoch = False

    def __init__(
        self,
        folder: str | Path | None,
        *,
        every_steps: int | None = None,
        every_s: float | None = CHECKPOINT_EVERY_S,
        keep: int = KEEP_CHECKPOINTS,
        resume: str = "auto",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        for name, value in (("every_steps", every_steps), ("every_s", every_s), ("keep", keep)):
            if value is not None and value <= 0:
                raise ConfigError(f"Checkpoint({name}={value}) must be above 0.")
        if resume not in RESUME:
            raise ConfigError(f"Checkpoint(resume={resume!r}) must be one of {', '.join(RESUME)}.")
        self.resume = resume
        self._needs_no_folder = folder is None
        path = Path(folder or "no folder")
        self._ownership = ownership_of(path)
        self._checkpoints = Checkpoints(path, keep, self._ownership.check)
        self._owns = False
        self.every_steps, self._every_s, self._clock = every_steps, every_s, clock
        self._last = clock()
        self._writer: threading.Thread | None = None

    def get_state(self) -> dict[str, Any]:
        """Returns an empty state, since this callback's attributes belong to the process."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Does nothing; see `get_state`.

        Args:
            state: what `get_state` returned.
        """

    def release(self) -> None:
        """Waits until the last checkpoint is written, and gives the folder back."""
        self.finish()
        if self._owns:
            self._ownership.release()
            self._owns = False

    def wants(self, step: int, count: int) -> bool:
        """Returns whether a checkpoint is due after the next execution.

        Args:
            step: the steps so far.
            count: the steps of the next execution.
        """
        # If the disk is slower than the interval, checkpoints are left out.
        if self._writer is not None and self._writer.is_alive():
            return False
        by_steps = self.every_steps is not None and (
            (step + count) // self.every_steps > step // self.every_steps
        )
        by_time = self._every_s is not None and self._clock() - self._last >= self._every_s
        return by_steps or by_time

    def newest(self) -> Record | None:
        """Returns the record to resume from, or None to begin anew. Only the chief calls it.

        The call takes the folder for this process, until `release`.

        Raises:
            ConfigError: the chief was given no folder.
            ResumeError: another process owns the folder, or the folder does not fit `resume`. It is
                also raised if no checkpoint is whole, if a setting has changed, or if this machine
                does not see the checkpoint that the job has made.
        """
        if self._needs_no_folder:
            raise ConfigError("Checkpoint(folder=None) on the chief, which writes. Give a folder.")
        folder = self._checkpoints.folder
        if not self._owns:
            self._ownership.take()
            self._owns = True
        if self.resume == "never":
            if self._checkpoints.files():
                raise ResumeError(
                    f"{folder} holds checkpoints of a run, and resume is 'never'. Give a new "
                    "folder, or resume='auto' to go on with that run."
                )
            return None
        record, problems = self._checkpoints.newest()
        for problem in problems:
            older = f"going on from step {record.step}" if record else "no older one is whole"
            say(f"the checkpoint {problem}; {older}.")
        if record is None and (self.resume == "must" or problems):
            raise ResumeError(
                f"there is no whole checkpoint in {folder} to resume from. Give the folder of a "
                "run that has one, or begin a new run in a new folder."
            )
        saved_step = saved_before(str(folder.absolute()))
        if saved_step > (record.step if record else -1) and not problems:
            raise ResumeError(
                f"this job made a checkpoint at step {saved_step} in {folder}, which "
                f"{socket.gethostname()} does not see. Put the folder where all machines see it, "
                "such as on NFS."
            )
        if record is not None:
            speaker(True)("resumed", f"after step {record.step}, from {folder}")
        return record

    @property
    def folder(self) -> Path:
        """Returns the folder of the checkpoints."""
        return self._checkpoints.folder

    def token(self) -> str:
        """Returns the text in the folder by which other workers recognise it.

        Only the chief calls it. The text is empty if the disk was too full to write it.
        """
        return self._ownership.token if self._ownership.is_written() else ""

    def sees(self, token: str) -> bool:
        """Returns whether this worker sees the chief's folder, or need not see it.

        Args:
            token: what `token` returned on the chief.
        """
        return self._needs_no_folder or not token or self._ownership.is_written(token)

    def write(self, record: Record, *, wait: bool) -> None:
        """Writes a record in a thread. Only the chief calls it.

        Args:
            record: the record.
            wait: whether to return only when the record is written.
        """
        self.finish()
        self._last = self._clock()
        self._writer = threading.Thread(
            target=self._write, args=(record,), name="tfmulti-checkpoint", daemon=True
        )
        self._writer.start()
        if wait:
            self.finish()

    def kept(self, epoch: int, step: int, logs: Mapping[str, Any]) -> None:
        """Does nothing. A subclass may override it. Every worker calls it after each checkpoint.

        The chief may still be writing the file; `finish` waits for it.

        Args:
            epoch: the number of whole epochs before the checkpoint.
            step: the steps of the next epoch before it.
            logs: the logs of these steps, or of the last epoch if there are none.
        """

    def finish(self) -> None:
        """Waits until the checkpoint that the thread writes is written."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _write(self, record: Record) -> None:
        """Writes a record, and tells the launcher of it; runs in the writing thread."""
        try:
            path = self._checkpoints.write(record)
            heartbeat().saved(record.step, str(path.parent.absolute()))
        except NotOwnerError as error:
            self._ownership.end(error)
        # An error of a checkpoint must not end the run.
        except Exception as error:
            say(
                f"no checkpoint at step {record.step}: {error}. Training continues; the older ones "
                "stay."
            )


# The name before version 0.2 stays valid.
Backup = Checkpoint


def say(message: str) -> None:
    """Prints a sentence on stderr."""
    print(f"tfmulti: {message}", file=sys.stderr, flush=True)

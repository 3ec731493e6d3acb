"""Checkpoint: a run that was stopped, however, goes on as if it had not been.

    model = prepare(build())
    model.fit(x, y, epochs=90, callbacks=[Checkpoint("runs/a/checkpoints")])

Every worker gives it to `fit`, which asks it when a checkpoint is due, and where to begin. The
chief reads and writes the folder.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import keras

from tfmulti.errors import ConfigError, ResumeError
from tfmulti.launch.heartbeat import heartbeat, saved_before
from tfmulti.training.checkpoint.file_format import Checkpoints, Record
from tfmulti.training.checkpoint.owner import NotOwner, ownership_of

RESUME = ("auto", "never", "must")


class Checkpoint(keras.callbacks.Callback):
    """Keeps the newest positions of a run in a folder, and resumes from the newest whole one.

    The numbers that follow are those of a run that was never stopped: weights, optimizer,
    metrics of the epoch in progress, order of the data, masks, and what callbacks know
    (EarlyStopping, ReduceLROnPlateau, a callback of your own: its attributes of plain values,
    or what its `get_state()` returns). A `tf.data.Dataset` goes on
    at once, on any number of workers; what TensorFlow cannot save (a generator, numbers without a
    seed) must give the same batches again and is read anew up to the position.

    Args:
        folder: of this run's checkpoints.
        every_steps: a checkpoint after each so many steps; None: by time alone.
        every_s: and when the last one is so many seconds old; None: by steps alone.
        keep: how many stay.
        resume: `auto` resumes where there is a checkpoint, `must` fails where there is none, and
            `never` refuses a folder that has one.
        settings: what must not change between a stop and the resumption, by name.
        clock: returns seconds.

    Raises:
        ConfigError: an argument is out of its range.
        ResumeError: at `fit`: no checkpoint to resume from, or not of this run.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        every_steps: int | None = None,
        every_s: float | None = 60.0,
        keep: int = 2,
        resume: str = "auto",
        settings: Mapping[str, Any] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__()
        for name, value in (("every_steps", every_steps), ("every_s", every_s), ("keep", keep)):
            if value is not None and value <= 0:
                raise ConfigError(f"Checkpoint({name}={value}) must be above 0.")
        if resume not in RESUME:
            raise ConfigError(f"Checkpoint(resume={resume!r}) must be one of {', '.join(RESUME)}.")
        self.resume = resume
        self.settings: dict[str, Any] = json.loads(json.dumps(dict(settings or {})))
        self._ownership = ownership_of(Path(folder))
        self._checkpoints = Checkpoints(Path(folder), keep, self._ownership.check)
        self._owns = False
        self.every_steps, self._every_s, self._clock = every_steps, every_s, clock
        self._last = clock()
        self._writer: threading.Thread | None = None

    def get_state(self) -> dict[str, Any]:
        """Returns nothing: what it counts is the process', not the run's."""
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        """Does nothing; see `get_state`."""

    def release(self) -> None:
        """Gives the folder back, once what is being written is there."""
        self.finish()
        if self._owns:
            self._ownership.release()
            self._owns = False

    def wants(self, step: int, count: int) -> bool:
        """Whether a checkpoint is due after the next `count` steps, `step` being those so far."""
        if self._writer is not None and self._writer.is_alive():
            return False  # the disk is slower than the interval
        by_steps = self.every_steps is not None and (
            (step + count) // self.every_steps > step // self.every_steps
        )
        by_time = self._every_s is not None and self._clock() - self._last >= self._every_s
        return by_steps or by_time

    def newest(self) -> Record | None:
        """Returns the record to resume from, or None to begin anew. Runs on the chief.

        The folder is this process' from here to the end of training.

        Raises:
            ResumeError: the folder and `resume` contradict each other, or it is another's.
        """
        folder = self._checkpoints.folder
        if not self._owns:
            self._ownership.take()
            self._owns = True
        if self.resume == "never":
            if self._checkpoints.files():
                raise ResumeError(
                    f"{folder} holds checkpoints of a run, and resume is 'never'. Give a new "
                    "folder, "
                    "or resume='auto' to go on with that run."
                )
            return None
        record, wrong = self._checkpoints.newest()
        for words in wrong:
            older = f"going on from step {record.step}" if record else "no older one is whole"
            say(f"the checkpoint {words}; {older}.")
        if record is None and (self.resume == "must" or wrong):
            raise ResumeError(
                f"there is no whole checkpoint in {folder} to resume from. Give the folder of a "
                "run "
                "that has one, or begin a new run in a new folder."
            )
        saved = saved_before(str(folder.absolute()))
        if saved > (record.step if record else -1) and not wrong:
            raise ResumeError(
                f"this job made a checkpoint at step {saved} in {folder}, which "
                f"{socket.gethostname()} does not see. Put the folder where all machines see it, "
                "such as on NFS."
            )
        if record is not None:
            settings = record.tree.get("settings")
            if not isinstance(settings, Mapping):
                raise ResumeError(
                    f"the newest checkpoint in {folder} is not as this version writes it "
                    "(settings). "
                    "Begin a new run in a new folder, or remove that checkpoint."
                )
            self._check_settings(settings)
        return record

    def _check_settings(self, saved: Mapping[str, Any]) -> None:
        for name in dict.fromkeys([*saved, *self.settings]):
            if saved.get(name) != self.settings.get(name):
                raise ResumeError(
                    f"saved {name}={saved.get(name)!r}, this run {name}={self.settings.get(name)!r}"
                    f". Use {name} as it was, or begin a new run in a new folder."
                )

    def keep(self, record: Record, *, wait: bool) -> None:
        """Writes a record in the background, or before it returns. Runs on the chief."""
        self.finish()
        self._last = self._clock()
        self._writer = threading.Thread(
            target=self._write, args=(record,), name="tfmulti-checkpoint", daemon=True
        )
        self._writer.start()
        if wait:
            self.finish()

    def finish(self) -> None:
        """Waits until what is being written is there."""
        if self._writer is not None:
            self._writer.join()
            self._writer = None

    def _write(self, record: Record) -> None:
        try:
            path = self._checkpoints.write(record)
            heartbeat().saved(record.step, str(path.parent.absolute()))
        except NotOwner as error:
            self._ownership.end(error)
        except Exception as error:  # no fault of a checkpoint ends the run
            say(
                f"no checkpoint at step {record.step}: {error}. Training goes on; the older ones "
                "stay."
            )


Backup = Checkpoint  # the name before version 0.2


def say(words: str) -> None:
    print(f"tfmulti: {words}", file=sys.stderr, flush=True)

"""Knows the files in the folder of a run, and writes each of them whole or not at all.

A file is first written under a partial name and then renamed. After a crash or a power cut the
file is therefore complete, or it is as it was before. `training.checkpoint.owner` decides which
process may write to the folder.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from tfmulti.errors import RunDirError


class RunDir:
    """The folder of one run. Only the chief writes to it.

    Args:
        path: the folder, which need not exist.

    Attributes:
        config: the resolved configuration of the run, by which the run starts again.
        history: the metrics of each epoch.
        report: the report of the run.
        report_page: the report as a page for a browser.
        curves: the plot of the metrics.
        tensorboard: the folder for TensorBoard's files.
        model: the trained model.
        features: the names of the values into which the columns of a table were encoded.
        vocabulary: the words of a text data set.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.history = self.path / "history.csv"
        self.report = self.path / "report.json"
        self.report_page = self.path / "report.html"
        self.curves = self.path / "curves.png"
        self.tensorboard = self.path / "tensorboard"
        self.model = self.path / "model.keras"
        self.features = self.path / "features.txt"
        self.vocabulary = self.path / "vocabulary.txt"

    @property
    def checkpoints(self) -> Path:
        """The folder for checkpoints."""
        # Older versions called the folder "backups".
        older = self.path / "backups"
        return older if older.is_dir() else self.path / "checkpoints"

    def holds_run(self) -> bool:
        """Returns whether a run was started in this folder."""
        return self.config.is_file()

    def check_unused(self) -> None:
        """Checks that a new run can be written to this folder, without writing.

        Raises:
            RunDirError: the folder holds a run, is a file, or cannot be written.
        """
        try:
            if self.path.exists() and not self.path.is_dir():
                raise RunDirError(f"--run_dir {self.path} is a file. Give a folder.")
            for artifact in (self.config, self.history, self.report, self.model, self.checkpoints):
                if artifact.exists():
                    raise RunDirError(
                        f"--run_dir {self.path} holds another run ({artifact.name} is there). "
                        "Give a new --run_dir, or remove that folder."
                    )
            check_writable("run_dir", self.path)
        except PermissionError as error:
            raise RunDirError(f"--run_dir {self.path}: {error.strerror}.") from None

    def create(self) -> None:
        """Makes the folder.

        Raises:
            RunDirError: the folder cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirError(
                f"--run_dir {self.path} cannot be made: {error.strerror}. Give another folder."
            ) from None


def check_writable(flag: str, path: Path) -> None:
    """Checks that a folder can be made and written, without writing.

    Args:
        flag: the name of the flag that gave the folder, for the message.
        path: the folder, which need not exist.

    Raises:
        RunDirError: the folder, or its nearest parent that exists, is a file or is not writable.
    """
    parent = path
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        problem = "not writable" if parent.is_dir() else "a file"
        raise RunDirError(f"--{flag} {path}: {parent} is {problem}. Give another folder.")


def check_new(flag: str, path: Path) -> None:
    """Checks that a folder does not exist or is empty, and can be written, without writing.

    Args:
        flag: the name of the flag that gave the folder, for the message.
        path: the folder.

    Raises:
        RunDirError: the folder holds files, is a file, or cannot be written.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise RunDirError(f"--{flag} {path} exists and is not an empty folder. Give a new folder.")
    check_writable(flag, path)


# The folder of the runs without `--run_dir`.
_DEFAULT_ROOT = "runs"
# A name that `default_run_dir` makes of a dataset, a model and a time.
_DEFAULT_NAME = re.compile(r"\w[\w.@+-]*-\d{8}-\d{6}(-\d+)?")


def default_run_dir_named(name: str) -> Path | None:
    """Returns the folder of that name which another worker has made, or None for any other name.

    >>> default_run_dir_named("digits-cnn-20260131-235959")
    PosixPath('runs/digits-cnn-20260131-235959')
    >>> default_run_dir_named("../elsewhere-cnn-20260131-235959")
    """
    return Path(_DEFAULT_ROOT, name) if _DEFAULT_NAME.fullmatch(name) else None


def default_run_dir(dataset: str, model: str, now: datetime, root: str = _DEFAULT_ROOT) -> RunDir:
    """Returns a new folder for a run without `--run_dir`, with a name that is not in use.

    Args:
        dataset: the value of `--dataset`.
        model: the value of `--model`.
        now: the time of the start, which is part of the name.
        root: the folder above it.
    """
    words = [dataset.partition(":")[0], model.rpartition(":")[2], now.strftime("%Y%m%d-%H%M%S")]
    name = "-".join(word.rpartition(".")[2] for word in words)
    path, count = Path(root) / name, 1
    while path.exists():
        count += 1
        path = Path(root) / f"{name}-{count}"
    return RunDir(path)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a partial path to write to, and renames it to `path` if the block succeeds.

    The partial name keeps the ending, because Keras and matplotlib choose the format by it. If the
    block fails, the partial file or folder is removed and `path` stays as it was.
    """
    partial = path.with_name(f".partial-{secrets.token_hex(4)}-{path.name}")
    try:
        yield partial
        if partial.is_file():
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
        check_guards(path)
        if partial.is_dir() and path.is_dir():
            shutil.rmtree(path)
        os.replace(partial, path)
        _sync_folder(path.parent)
    finally:
        _delete(partial)


def _delete(path: Path) -> None:
    """Removes a file, or a folder with all that is in it, if there is one."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Writes the names in a folder to the disk, so that a renamed file survives a power cut."""
    # Not every file system can do this for a folder.
    with contextlib.suppress(OSError):
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


_guards: dict[Path, Callable[[], None]] = {}


@contextlib.contextmanager
def guarded(folder: Path, check: Callable[[], None]) -> Iterator[None]:
    """Calls a check before each file in a folder is replaced or removed, while the block runs.

    Args:
        folder: the folder, with all folders in it.
        check: a function that raises an exception if this process must not write to the folder.
    """
    _guards[folder.absolute()] = check
    try:
        yield
    finally:
        del _guards[folder.absolute()]


def check_guards(path: Path) -> None:
    """Calls the checks of all guarded folders that contain a path."""
    for folder, check in list(_guards.items()):
        if path.absolute().is_relative_to(folder):
            check()


def remove(path: Path) -> None:
    """Removes a file if it exists."""
    check_guards(path)
    path.unlink(missing_ok=True)


def remove_partial(folder: Path) -> None:
    """Removes the partial files that a killed process has left in a folder.

    No other process may write to the folder at this time.
    """
    for partial in folder.glob(".partial-*"):
        _delete(partial)


def write_text(path: Path, text: str) -> None:
    """Writes a text file as a whole, or leaves it as it was."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")

"""Every file that a run leaves, its place and its form; each is whole or absent."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from tfmulti.errors import RunDirError


class RunDir:
    """The folder of one run. Only the chief writes to it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def config(self) -> Path:
        return self.path / "config.json"

    @property
    def history(self) -> Path:
        return self.path / "history.csv"

    @property
    def report(self) -> Path:
        return self.path / "report.json"

    @property
    def curves(self) -> Path:
        return self.path / "curves.png"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def model(self) -> Path:
        return self.path / "model.keras"

    @property
    def features(self) -> Path:
        return self.path / "features.txt"

    @property
    def vocabulary(self) -> Path:
        return self.path / "vocabulary.txt"

    @property
    def checkpoints(self) -> Path:
        older = self.path / "backups"  # the name before version 0.2
        return older if older.is_dir() else self.path / "checkpoints"

    def holds_run(self) -> bool:
        """Whether a run was begun here."""
        return self.config.is_file()

    def check_unused(self) -> None:
        """Checks that a new run can be written here, without writing.

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
            self.check_writable()
        except PermissionError as error:
            raise RunDirError(f"--run_dir {self.path}: {error.strerror}.") from None

    def check_writable(self) -> None:
        """Raises RunDirError where the folder cannot be written."""
        check_writable("run_dir", self.path)

    def create(self) -> None:
        """Makes the folder.

        Raises:
            RunDirError: it cannot be made.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunDirError(
                f"--run_dir {self.path} cannot be made: {error.strerror}. Give another folder."
            ) from None


def check_writable(flag: str, path: Path) -> None:
    """Checks that a folder can be made and written, without writing.

    Raises:
        RunDirError: its nearest existing parent is no folder or not writable.
    """
    parent = path
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        what = "not writable" if parent.is_dir() else "a file"
        raise RunDirError(f"--{flag} {path}: {parent} is {what}. Give another folder.")


def default_run_dir(dataset: str, model: str, now: datetime, root: str = "runs") -> RunDir:
    """Returns a folder of its own for a run that was given none."""
    words = [dataset.partition(":")[0], model.rpartition(":")[2], now.strftime("%Y%m%d-%H%M%S")]
    name = "-".join(word.rpartition(".")[2] for word in words)
    path, count = Path(root) / name, 1
    while path.exists():
        count += 1
        path = Path(root) / f"{name}-{count}"
    return RunDir(path)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a path beside `path` to write to, and puts it in its place when all went well.

    The ending is kept, since Keras and matplotlib choose the format by it.
    """
    partial = path.with_name(f".partial-{secrets.token_hex(4)}-{path.name}")
    try:
        yield partial
        if partial.is_file():
            with open(partial, "rb") as file:
                os.fsync(file.fileno())
        _check_guards(path)
        if partial.is_dir() and path.is_dir():
            shutil.rmtree(path)
        os.replace(partial, path)
        _sync_folder(path.parent)
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Has the disk keep the names in a folder, too: after a power cut a file is whole or absent."""
    with contextlib.suppress(OSError):  # not every file system can
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


_guards: dict[Path, Callable[[], None]] = {}


@contextlib.contextmanager
def guarded(folder: Path, check: Callable[[], None]) -> Iterator[None]:
    """Inside, `check` is called before a file in a folder is replaced or removed.

    It raises where that must not be.
    """
    _guards[folder.absolute()] = check
    try:
        yield
    finally:
        del _guards[folder.absolute()]


def _check_guards(path: Path) -> None:
    for folder, check in list(_guards.items()):
        if path.absolute().is_relative_to(folder):
            check()


def remove(path: Path) -> None:
    """Removes a file, if it is there."""
    _check_guards(path)
    path.unlink(missing_ok=True)


def remove_partial(folder: Path) -> None:
    """Removes what a process that was killed has left half written. Nobody else writes here."""
    for partial in folder.glob(".partial-*"):
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Writes a text file: whole, or as it was."""
    with replacing(path) as partial:
        partial.write_text(text, encoding="utf-8")

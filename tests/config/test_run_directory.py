"""Tests the run directory: its files are complete or absent, and it belongs to one run."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path

import pytest

from tfmulti.config.run_directory import RunDir, default_run_dir, replacing, write_text
from tfmulti.errors import RunDirError

NOW = datetime(2026, 1, 2, 3, 4, 5)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    write_text(file, "old")

    def write_badly() -> None:
        with replacing(file) as partial:
            partial.write_text("half")
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_badly()
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_replacing_keeps_the_ending_and_takes_folders(tmp_path: Path) -> None:
    target = tmp_path / "model.keras"
    with replacing(target) as partial:
        assert partial.suffix == ".keras"
        partial.mkdir()
        (partial / "x").write_text("1")
    assert (target / "x").read_text() == "1"


@pytest.mark.parametrize("name", ["config.json", "history.csv", "report.json", "model.keras"])
def test_a_folder_with_a_run_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    with pytest.raises(RunDirError, match=f"another run \\({name} is there"):
        RunDir(tmp_path).check_unused()


def test_a_folder_with_logs_alone_is_taken(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    RunDir(tmp_path).check_unused()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    with pytest.raises(RunDirError, match="is a file"):
        RunDir(tmp_path / "f").check_unused()
    with pytest.raises(RunDirError, match="is a file"):
        RunDir(tmp_path / "f" / "below").check_unused()
    with pytest.raises(RunDirError, match="cannot be made"):
        RunDir(tmp_path / "f" / "below").create()


def test_default_folders_are_different(tmp_path: Path) -> None:
    first = default_run_dir("npz:/a/b.npz", "pkg.mod:build", NOW, str(tmp_path))
    assert first.path.name == "npz-build-20260102-030405"
    first.create()
    assert default_run_dir("npz:c", "build", NOW, str(tmp_path)).path.name.endswith("030405-2")


def test_default_folder_of_a_users_data(tmp_path: Path) -> None:
    made = default_run_dir("pkg.mod:load", "cnn", NOW, str(tmp_path))
    assert made.path.name == "mod-cnn-20260102-030405"


def test_after_a_power_cut_a_file_is_whole_or_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes are synchronised with the disk before the rename, and the folder after it."""
    done: list[str] = []
    sync, replace = os.fsync, os.replace

    def synced(number: int) -> None:
        done.append(os.path.basename(os.readlink(f"/proc/self/fd/{number}")))
        sync(number)

    def replaced(old: Path, new: Path) -> None:
        done.append("rename")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    with replacing(tmp_path / "file") as partial:
        partial.write_text("whole")
    assert done == [partial.name, "rename", tmp_path.name]

"""Tests folders as classes, and files that match patterns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfmulti.data.io import files, folders
from tfmulti.errors import DataError

PLACE = "--dataset text:here"
TEXT = (".txt",)


def make_files(root: Path, *names: str) -> str:
    """Makes files, and folders for names that end in a slash. Returns the root."""
    for name in names:
        path = root / name
        (path if name.endswith("/") else path.parent).mkdir(parents=True, exist_ok=True)
        if not name.endswith("/"):
            path.write_text(name)
    return str(root)


def test_classes_are_the_sorted_folders(tmp_path: Path) -> None:
    root = make_files(tmp_path, "b/2.txt", "b/10.txt", "a/x.TXT", "a/deep/y.txt", "c d/z.txt")
    make_files(tmp_path, "a/other.csv", "a/.hidden.txt", ".hidden/h.txt", "readme.txt")
    classes = folders.find_classes(PLACE, root, TEXT)
    assert classes.names == ("a", "b", "c d")
    expected = ["a/deep/y.txt", "a/x.TXT", "b/10.txt", "b/2.txt", "c d/z.txt"]
    assert classes.paths == [f"{root}/{name}" for name in expected]
    assert (classes.labels.tolist(), classes.labels.dtype) == ([0, 0, 1, 1, 2], "int32")


def test_another_part_has_the_labels_of_the_training_part(tmp_path: Path) -> None:
    root = make_files(tmp_path, "c/1.txt", "b/1.txt")
    assert folders.find_classes(PLACE, root, TEXT, ("a", "b", "c")).labels.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        (["a/1.txt", "b/1.txt"], {"train": ""}),
        (["train/a/1.txt", "val/a/1.txt"], {"train": "train", "validation": "val"}),
        (
            ["train/a/1", "validation/a/1", "test/a/1", "notes.md"],
            {"train": "train", "validation": "validation", "test": "test"},
        ),
        # Here `train` is the name of a class.
        (["train/1.txt", "car/1.txt"], {"train": ""}),
    ],
)
def test_parts(tmp_path: Path, names: list[str], parts: dict[str, str]) -> None:
    root = make_files(tmp_path, *names)
    expected = {part: f"{root}/{name}".rstrip("/") for part, name in parts.items()}
    assert folders.find_parts(PLACE, root) == expected


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["test/a/1", "val/a/1"], "has test and val, but no train folder. Add .*/train"),
        (["train/a/1", "vall/a/1"], "'vall' beside train, .*did you mean 'val'"),
        (["train/a/1", "val/a/1", "validation/a/1"], "both val and validation"),
    ],
)
def test_mistakes_in_parts(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(DataError, match=f"{PLACE}: .*{message}"):
        folders.find_parts(PLACE, make_files(tmp_path, *names))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["1.txt", "2.txt"], "has no class folders, but at least two"),
        (["a/1.txt"], r"has one class folder \(a\), but at least two .*\(.txt\)"),
        (["a/1.txt", "b/"], "class folder .*/b holds no file that ends in .txt. Add some"),
        (["a/1.txt", "b/1.csv"], "class folder .*/b holds no file"),
    ],
)
def test_mistakes_in_classes(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(DataError, match=f"{PLACE}: .*{message}"):
        folders.find_classes(PLACE, make_files(tmp_path, *names), TEXT)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["catt/1.txt"], "the class 'catt', which .* does not have; did you mean 'cat'"),
        (["1.txt"], "has no class folders. Give it those of the training part: cat, dog"),
    ],
)
def test_mistakes_in_other_parts(tmp_path: Path, names: list[str], message: str) -> None:
    with pytest.raises(DataError, match=f"{PLACE}: .*{message}"):
        folders.find_classes(PLACE, make_files(tmp_path, *names), TEXT, ("cat", "dog"))


def test_a_missing_folder_and_a_file_are_errors(tmp_path: Path) -> None:
    root = make_files(tmp_path, "file")
    with pytest.raises(DataError, match="none does not exist"):
        folders.find_parts(PLACE, f"{root}/none")
    with pytest.raises(DataError, match="file is a file"):
        folders.find_parts(PLACE, f"{root}/file")


def test_an_unreadable_folder_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise PermissionError(13, "Permission denied")

    # Root may read any folder, so the refusal is simulated.
    monkeypatch.setattr("os.scandir", refuse)
    with pytest.raises(DataError, match="Permission denied"):
        folders.find_parts(PLACE, str(tmp_path))


def test_patterns_match_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_files(tmp_path, "b.csv", "a.CSV", "c.txt", ".d.csv", "deep/e.csv")

    def matches(pattern: str) -> list[str]:
        return [p.removeprefix(f"{root}/") for p in files.matching(PLACE, pattern, (".csv",))]

    assert matches(root) == ["a.CSV", "b.csv"]
    assert matches(f"{root}/c.txt") == ["c.txt"]
    assert matches(f"{root}/*") == ["a.CSV", "b.csv", "c.txt"]
    assert matches(f"{root}/**/*.csv") == ["b.csv", "deep/e.csv"]
    monkeypatch.setenv("HOME", root)
    assert matches("~/b.csv") == ["b.csv"]
    # Hidden files and folders are left out.
    every = files.matching(PLACE, root)
    assert [Path(p).name for p in every] == ["a.CSV", "b.csv", "c.txt"]
    assert [Path(p).name for p in files.matching(PLACE, f"{root}/d*/*")] == ["e.csv"]


def test_a_pattern_matches_no_folder(tmp_path: Path) -> None:
    root = make_files(tmp_path, "data/", "data-1")
    assert files.matching(PLACE, f"{root}/d*") == [f"{root}/data-1"]


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("no*.csv", "no file .*/no\\*.csv"),
        ("empty", "empty holds no file that ends in .csv. Give"),
    ],
)
def test_a_pattern_without_files_is_an_error(tmp_path: Path, pattern: str, message: str) -> None:
    root = make_files(tmp_path, "empty/")
    with pytest.raises(DataError, match=f"{PLACE}: .*{message}"):
        files.matching(PLACE, f"{root}/{pattern}", (".csv",))


def test_an_empty_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"{PLACE}: the folder .* holds no file. Give a file"):
        files.matching(PLACE, make_files(tmp_path, "sub/"))

"""Folders as classes: `FOLDER/CLASS/FILE`, or `FOLDER/train/CLASS/FILE` with other parts beside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfmulti.data.io import files
from tfmulti.errors import DataError, did_you_mean

PARTS = {"train": "train", "validation": "validation", "val": "validation", "test": "test"}


class Classes(NamedTuple):
    """The files of class folders, class by class, each class in the order of its paths.

    Attributes:
        names: the names of the classes, sorted.
        paths: the files.
        labels: for each file the index of its class in `names`, int32 [files].
    """

    names: tuple[str, ...]
    paths: list[str]
    labels: np.ndarray


def find_parts(prefix: str, path: str) -> dict[str, str]:
    """Returns the folder of each part: `train`, and `validation` and `test` if they exist.

    A folder has parts if it contains a folder `train` that contains folders. `validation` may be
    called `val`. Any other folder is the training part itself. Messages begin with `prefix`.

    Raises:
        DataError: there is no such folder, only the folder `train` is missing, a folder beside
            `train` is not a part, or there are both `val` and `validation`.
    """
    names, _ = files.in_folder(prefix, path)
    if "train" not in names:
        if names and set(names) <= set(PARTS):
            raise DataError(
                f"{prefix}: {path} has {' and '.join(names)}, but no train folder. Add "
                f"{files.join(path, 'train')}, with a folder for each class."
            )
        return {"train": path}
    if not files.in_folder(prefix, files.join(path, "train"))[0]:
        # This folder `train` contains no class folders, so it is a class of that name.
        return {"train": path}
    parts: dict[str, str] = {}
    for name in names:
        if name not in PARTS:
            raise DataError(
                f"{prefix}: {path} has a folder {name!r} beside train, but no part has this name; "
                f"{did_you_mean(name, PARTS)} Rename it or move it away."
            )
        if PARTS[name] in parts:
            raise DataError(f"{prefix}: {path} has both val and validation. Keep one of them.")
        parts[PARTS[name]] = files.join(path, name)
    return parts


def find_classes(
    prefix: str, path: str, extensions: tuple[str, ...], names: Sequence[str] | None = None
) -> Classes:
    """Returns the files in the class folders of `path` and in the folders below them.

    Args:
        prefix: the start of messages, such as `--dataset text:FOLDER`.
        path: the folder that contains the class folders.
        extensions: the endings of the files that count, in lower case, such as `.txt`. A file may
            have them in upper case. Hidden files do not count.
        names: the classes of the training part, when another part is read. That part may lack some
            of them.

    Raises:
        DataError: there are fewer than two classes, a class has no such file, or a class is not in
            `names`.
    """
    folders, _ = files.in_folder(prefix, path)
    if names is None:
        names = _class_names(prefix, path, folders, extensions)
    if not folders:
        raise DataError(
            f"{prefix}: {path} has no class folders. Give it those of the training part: "
            f"{', '.join(names)}."
        )
    for name in folders:
        if name not in names:
            raise DataError(
                f"{prefix}: {path} has the class {name!r}, which the training part does not have; "
                f"{did_you_mean(name, names)} Give all parts the same class folders."
            )
    paths: list[str] = []
    labels: list[int] = []
    for name in folders:
        class_paths = sorted(_files_of(prefix, files.join(path, name), extensions))
        paths += class_paths
        labels += [names.index(name)] * len(class_paths)
    return Classes(tuple(names), paths, np.array(labels, np.int32))


def _class_names(
    prefix: str, path: str, folders: list[str], extensions: tuple[str, ...]
) -> tuple[str, ...]:
    """Returns the names of the classes; raises DataError if they are fewer than two."""
    if len(folders) < 2:
        problem = f"one class folder ({folders[0]})" if folders else "no class folders"
        raise DataError(
            f"{prefix}: {path} has {problem}, but at least two are needed. Put the files "
            f"({', '.join(extensions)}) of each class into a folder with its name."
        )
    return tuple(folders)


def _files_of(prefix: str, folder: str, extensions: tuple[str, ...]) -> list[str]:
    """Returns the files of a class folder; raises DataError if there are none."""
    paths = [p for p in files.below(prefix, folder) if p.lower().endswith(extensions)]
    if not paths:
        raise DataError(
            f"{prefix}: the class folder {folder} holds no file that ends in "
            f"{' or '.join(extensions)}. Add some, or remove the folder."
        )
    return paths

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


def find_parts(place: str, path: str) -> dict[str, str]:
    """Returns the folder of each part: `train`, and `validation` and `test` if they exist.

    A folder has parts if it contains a folder `train` that contains folders. `validation` may be
    called `val`. Any other folder is the training part itself. Messages begin with `place`, such as
    `--dataset text:FOLDER`.

    Raises:
        DataError: there is no such folder, only the folder `train` is missing, a folder beside
            `train` is not a part, or there are both `val` and `validation`.
    """
    names, _ = files.in_folder(place, path)
    if "train" not in names:
        if names and set(names) <= set(PARTS):
            raise DataError(
                f"{place}: {path} has {' and '.join(names)}, but no train folder. Add "
                f"{files.join(path, 'train')}, with a folder for each class."
            )
        return {"train": path}
    if not files.in_folder(place, files.join(path, "train"))[0]:
        # This folder `train` contains no class folders, so it is a class of that name.
        return {"train": path}
    parts: dict[str, str] = {}
    for name in names:
        if name not in PARTS:
            raise DataError(
                f"{place}: {path} has a folder {name!r} beside train, but no part has this name; "
                f"{did_you_mean(name, PARTS)} Rename it or move it away."
            )
        if PARTS[name] in parts:
            raise DataError(f"{place}: {path} has both val and validation. Keep one of them.")
        parts[PARTS[name]] = files.join(path, name)
    return parts


def find_classes(
    place: str, path: str, extensions: tuple[str, ...], names: Sequence[str] | None = None
) -> Classes:
    """Returns the files in the class folders of `path` and in the folders below them.

    Args:
        place: the start of messages, such as `--dataset text:FOLDER`.
        path: the folder that contains the class folders.
        extensions: the endings of the files that count, in lower case, such as `.txt`. A file may
            have them in upper case. Hidden files do not count.
        names: the classes of the training part, when another part is read. That part may lack some
            of them.

    Raises:
        DataError: there are fewer than two classes, a class has no such file, or a class is not in
            `names`.
    """
    found, _ = files.in_folder(place, path)
    if names is None:
        names = _checked(place, path, found, extensions)
    if not found:
        raise DataError(
            f"{place}: {path} has no class folders. Give it those of the training part: "
            f"{', '.join(names)}."
        )
    for name in found:
        if name not in names:
            raise DataError(
                f"{place}: {path} has the class {name!r}, which the training part does not have; "
                f"{did_you_mean(name, names)} Give all parts the same class folders."
            )
    paths: list[str] = []
    labels: list[int] = []
    for name in found:
        own = sorted(_files_of(place, files.join(path, name), extensions))
        paths += own
        labels += [names.index(name)] * len(own)
    return Classes(tuple(names), paths, np.array(labels, np.int32))


def _checked(
    place: str, path: str, found: list[str], extensions: tuple[str, ...]
) -> tuple[str, ...]:
    """Returns the names of the classes; raises DataError if they are fewer than two."""
    if len(found) < 2:
        words = f"one class folder ({found[0]})" if found else "no class folders"
        raise DataError(
            f"{place}: {path} has {words}, but at least two are needed. Put the files "
            f"({', '.join(extensions)}) of each class into a folder with its name."
        )
    return tuple(found)


def _files_of(place: str, folder: str, extensions: tuple[str, ...]) -> list[str]:
    """Returns the files of a class folder; raises DataError if there are none."""
    found = [p for p in files.below(place, folder) if p.lower().endswith(extensions)]
    if not found:
        raise DataError(
            f"{place}: the class folder {folder} holds no file that ends in "
            f"{' or '.join(extensions)}. Add some, or remove the folder."
        )
    return found

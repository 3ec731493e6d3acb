"""A folder of .npy files, which are mapped into memory, so that they may be larger than the memory.

Files in a store such as `gs://` cannot be mapped. They are read into memory as a whole.
"""

from __future__ import annotations

import dataclasses
import math
import os

import numpy as np

from tfmulti.data.data_set import DataSet
from tfmulti.data.formats.npy_format import array_of, read_head
from tfmulti.data.io import files
from tfmulti.data.lost import Lost
from tfmulti.data.options import parse_options
from tfmulti.data.sources.named_arrays import NAMES, data_of
from tfmulti.errors import DataError, did_you_mean

_ENDING = ".npy"


def load(options: str, seed: int) -> DataSet:
    """Returns the data of `FOLDER[,classes=N]`, whose rows of `x` are read when they are needed.

    The folder holds `x.npy` and `y.npy` (or `x_train.npy`, …), with the names of `named_arrays`.
    The values of a mapped `x` are not checked in advance, since that would read all of them. A
    folder with a scheme (`gs://…`) is read as a whole and checked.

    If a file is cut off, its missing rows count as lost, and so do these rows of the other files of
    its part.

    Raises:
        DataError: there is no such folder, a file is damaged or holds Python objects, or the arrays
            do not make a data set (`named_arrays.data_of`).
    """
    path, _, rest = options.partition(",")
    place = f"npy:{path}"
    chosen = parse_options(place, rest, {"classes": None})
    if not path:
        raise DataError("--dataset npy: needs a folder. Write --dataset npy:FOLDER.")
    folder = files.expanded(path)
    _, names = files.in_folder(f"--dataset {place}", folder)
    endings = [ending for endings in NAMES.values() for ending in endings]
    known = {f"{name}{ending}" for name in ("x", "y", "weight") for ending in endings}
    arrays, rows = {}, {}
    for file in (name for name in names if name.endswith(_ENDING)):
        name = file.removesuffix(_ENDING)
        if name not in known:
            raise DataError(
                f"--dataset {place}: {file} has no part in it; "
                f"{did_you_mean(name, known)} Rename it or move it away."
            )
        arrays[name], rows[name] = _array(place, folder, file)
    lost = tuple(each for endings in NAMES.values() for each in _cut(place, arrays, rows, endings))
    return dataclasses.replace(data_of(arrays, place, chosen["classes"]), lost=lost)


def _cut(
    place: str, arrays: dict[str, np.ndarray], rows: dict[str, int], endings: tuple[str, ...]
) -> list[Lost]:
    """Returns the rows that a cut-off array of a part lacks, and leaves them out of all its arrays.

    Args:
        place: the data set as in `--dataset`, for messages.
        arrays: the arrays of the folder by their names; those of the part are shortened.
        rows: for each array how many rows its header declares.
        endings: the endings of the names of the part's arrays.
    """
    part = [f"{name}{end}" for end in endings for name in ("x", "y", "weight")]
    part = [name for name in part if name in arrays]
    short = [name for name in part if len(arrays[name]) < rows[name]]
    if not short or len({rows[name] for name in part}) > 1:
        # If the declared lengths differ, no rows are lost: `data_of` raises an error.
        return []
    first = min(short, key=lambda name: len(arrays[name]))
    left, whole = len(arrays[first]), rows[first]
    for name in part:
        arrays[name] = arrays[name][:left]
    words = f"--dataset {place}: {first}{_ENDING} is cut off in row {left} of {whole}."
    return [Lost(words, whole - left)]


def _array(place: str, folder: str, name: str) -> tuple[np.ndarray, int]:
    """Returns the array of a file, and how many rows its header declares."""
    path = files.join(folder, name)
    try:
        if not files.is_remote(path):
            return _mapped(path)
        array = array_of(files.read_bytes(path))
        return array, len(array) if array.ndim else 0
    except (OSError, ValueError) as error:
        pickled = any(words in str(error) for words in ("allow_pickle", "Python objects"))
        words = "holds Python objects" if pickled else "is damaged or cut off"
        raise DataError(
            f"--dataset {place}: {name} {words} ({' '.join(str(error).split())}). "
            "Write it anew with np.save(path, array)."
        ) from None


def _mapped(path: str) -> tuple[np.ndarray, int]:
    """Returns the whole rows of a file, mapped into memory, and how many rows its header declares.

    Raises:
        ValueError, OSError: the file is damaged, or is cut off before the end of its first row.
    """
    with files.open_regular(path) as file:
        head = read_head(file)
    if head.dtype.hasobject:
        raise ValueError("it holds Python objects")
    rows = head.shape[0] if head.shape else 0
    row_bytes = head.dtype.itemsize * math.prod(head.shape[1:])
    # In this order each row follows the one before it, so the rows before the cut are whole.
    if rows and row_bytes and (not head.by_columns or len(head.shape) == 1):
        left = (os.path.getsize(path) - head.start) // row_bytes
        if 0 < left < rows:
            return np.memmap(path, head.dtype, "r", head.start, (left, *head.shape[1:])), rows
    array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    return array, rows

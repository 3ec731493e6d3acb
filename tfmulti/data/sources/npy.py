"""A folder of .npy files, which are mapped into memory, so that they may be larger than the memory.

Files in a store such as `gs://` cannot be mapped. They are read into memory as a whole.
"""

from __future__ import annotations

import numpy as np

from tfmulti.config.limited_reading import open_regular
from tfmulti.data.data_set import DataSet
from tfmulti.data.formats.npy_format import array_of, read_head
from tfmulti.data.io import files
from tfmulti.data.options import parse_options
from tfmulti.data.sources.named_arrays import NAMES, data_of
from tfmulti.errors import DataError, did_you_mean

_ENDING = ".npy"


def load(options: str, seed: int) -> DataSet:
    """Returns the data of `FOLDER[,classes=N]`, whose rows of `x` are read when they are needed.

    The folder holds `x.npy` and `y.npy` (or `x_train.npy`, …), with the names of `named_arrays`.
    The values of a mapped `x` are not checked in advance, since that would read all of them. A
    folder with a scheme (`gs://…`) is read as a whole and checked.

    Raises:
        DataError: there is no such folder, a file is damaged or holds Python objects, or the arrays
            do not make a data set (`named_arrays.data_of`).
    """
    path, _, rest = options.partition(",")
    dataset = f"npy:{path}"
    chosen = parse_options(dataset, rest, {"classes": None})
    if not path:
        raise DataError("--dataset npy: needs a folder. Write --dataset npy:FOLDER.")
    folder = files.expanded(path)
    _, names = files.in_folder(f"--dataset {dataset}", folder)
    endings = [ending for endings in NAMES.values() for ending in endings]
    known = {f"{name}{ending}" for name in ("x", "y", "weight") for ending in endings}
    arrays = {}
    for file in (name for name in names if name.endswith(_ENDING)):
        name = file.removesuffix(_ENDING)
        if name not in known:
            raise DataError(
                f"--dataset {dataset}: {file} has no part in it; "
                f"{did_you_mean(name, known)} Rename it or move it away."
            )
        arrays[name] = _array(dataset, folder, file)
    return data_of(arrays, dataset, chosen["classes"])


def _array(dataset: str, folder: str, name: str) -> np.ndarray:
    """Returns the array of a file; raises DataError if it is damaged."""
    path = files.join(folder, name)
    try:
        if not files.is_remote(path):
            return _mapped(path)
        return array_of(files.read_bytes(path))
    except (OSError, ValueError) as error:
        pickled = any(problem in str(error) for problem in ("allow_pickle", "Python objects"))
        problem = "holds Python objects" if pickled else "is damaged or cut off"
        raise DataError(
            f"--dataset {dataset}: {name} {problem} ({' '.join(str(error).split())}). "
            "Write it anew with np.save(path, array)."
        ) from None


def _mapped(path: str) -> np.ndarray:
    """Returns the array of a file, mapped into memory.

    Raises:
        ValueError, OSError: the file is damaged or cut off, or holds Python objects.
    """
    with open_regular(path) as file:
        head = read_head(file)
    if head.dtype.hasobject:
        raise ValueError("it holds Python objects")
    array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    return array

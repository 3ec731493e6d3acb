"""A folder of .npy files, mapped into memory: they may be larger than it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tfmulti.errors import DataError, did_you_mean
from tfmulti.sources.data import Data
from tfmulti.sources.named_arrays import NAMES, data_of
from tfmulti.sources.options import parse_options


def load(options: str, seed: int) -> Data:
    """Returns the data of `FOLDER[,classes=N]`, read row by row when it is needed.

    The folder holds `x.npy` and `y.npy` (or `x_train.npy`, …), under the names that an npz
    file has. What a row holds is not checked beforehand, since that would read all of them.

    Raises:
        DataError: there is no such folder, a file is damaged or pickled, or the arrays differ
            in length or hold labels that are no labels.
    """
    path, _, rest = options.partition(",")
    place = f"npy:{path}"
    chosen = parse_options(place, rest, {"classes": None})
    folder = Path(path).expanduser()
    if not folder.is_dir():
        words = "is a file" if folder.exists() else "does not exist"
        raise DataError(f"--dataset {place} {words}. Give a folder that holds x.npy and y.npy.")
    endings = [ending for endings in NAMES.values() for ending in endings]
    known = {f"{name}{ending}" for name in ("x", "y", "weight") for ending in endings}
    arrays = {}
    for file in sorted(folder.glob("*.npy")):
        if file.stem not in known:
            raise DataError(
                f"--dataset {place}: {file.name} has no part in it; "
                f"{did_you_mean(file.stem, known)} Rename it or move it away."
            )
        arrays[file.stem] = _mapped(place, file)
    return data_of(arrays, place, chosen["classes"])


def _mapped(place: str, file: Path) -> np.ndarray:
    try:
        array: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
        return array
    except (OSError, ValueError, EOFError) as error:
        words = "holds Python objects" if "allow_pickle" in str(error) else "is damaged or cut off"
        raise DataError(
            f"--dataset {place}: {file.name} {words} ({' '.join(str(error).split())}). "
            "Write it anew with np.save(path, array)."
        ) from None

"""Arrays of an .npz file of the user, on this machine or in a store such as `gs://`."""

from __future__ import annotations

import io
import zipfile
import zlib
from typing import IO

import numpy as np

from tfmulti.config.limited_reading import open_regular
from tfmulti.data.data_set import DataSet
from tfmulti.data.formats.npy_format import read_head
from tfmulti.data.io import files
from tfmulti.data.options import parse_options
from tfmulti.data.sources.named_arrays import data_of
from tfmulti.errors import DataError


def load(options: str, seed: int) -> DataSet:
    """Returns the data of `PATH[,classes=N]`; nothing in the file is unpickled.

    The arrays have the names of `named_arrays`. The whole file is read into memory.

    Raises:
        DataError: the file is missing, damaged or holds Python objects, or its arrays do not make a
            data set (`named_arrays.data_of`).
    """
    path, _, rest = options.partition(",")
    dataset = f"npz:{path}"
    chosen = parse_options(dataset, rest, {"classes": None})
    return data_of(_read(path), dataset, chosen["classes"])


def _read(path: str) -> dict[str, np.ndarray]:
    """Returns the arrays of a file by their names; raises DataError if it cannot be read."""
    prefix = f"--dataset npz:{path}"
    if not path:
        raise DataError("--dataset npz: needs a file. Write --dataset npz:PATH.")
    try:
        with _opened(path) as file:
            if not file.seek(0, io.SEEK_END):
                raise DataError(f"{prefix}: the file is empty. Write it anew.")
            if not zipfile.is_zipfile(file):
                raise DataError(
                    f"{prefix} is not an .npz file, or a truncated one. Save with "
                    "np.savez(path, x=…, y=…)."
                )
            file.seek(0)
            _check_declared(prefix, file)
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise DataError(f"{prefix}: no such file. Give the path of an .npz file.") from None
    except OSError as error:
        raise DataError(f"{prefix}: {error.strerror or error}. Give a readable file.") from None
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        if "allow_pickle" in str(error):
            raise DataError(
                f"{prefix} holds pickled Python objects, which can run code when they are read, so "
                "they are not. Save numeric arrays."
            ) from None
        raise DataError(f"{prefix} is damaged or truncated ({error}). Write it anew.") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        # zipfile raises RuntimeError if an array is marked as encrypted, or as packed in an unknown
        # way.
        raise DataError(f"{prefix} is damaged or truncated ({error}). Write it anew.") from None


def _check_declared(prefix: str, file: IO[bytes]) -> None:
    """Checks the sizes that the arrays declare, before memory is taken for them.

    Raises:
        DataError: an array has fewer bytes than it declares, or all arrays together have more bytes
            than one file may take in memory.
    """
    most = files.most_unpacked()
    total = 0
    with zipfile.ZipFile(file) as archive:
        for entry in archive.infolist():
            total += entry.file_size
            if not entry.filename.endswith(".npy"):
                continue
            with archive.open(entry) as array:
                declared = read_head(array).declared_bytes
            if declared > entry.file_size:
                raise DataError(
                    f"{prefix}: the array {entry.filename[:100]!r} declares {declared:,} bytes, "
                    f"but has {entry.file_size:,}. Write it anew with np.savez(path, x=…, y=…)."
                )
    if total > most:
        raise DataError(
            f"{prefix} holds {total:,} bytes, but {most:,} is the limit (by default the memory). "
            "Save each array by np.save, and use --dataset npy:FOLDER, which reads what it needs. "
            "Or allow more by --max_file_gigabytes."
        )


def _opened(path: str) -> IO[bytes]:
    """Returns the file, open for reading; a remote file is read into memory."""
    if files.is_remote(path):
        return io.BytesIO(files.read_bytes(path))
    return open_regular(files.expanded(path))

"""A user's arrays from an .npz file, here or on `gs://` and the like."""

from __future__ import annotations

import io
import zipfile
import zlib
from typing import IO

import numpy as np

from tfmulti.data.data_set import DataSet
from tfmulti.data.formats.npy_format import read_head
from tfmulti.data.io import files
from tfmulti.data.options import parse_options
from tfmulti.data.sources.named_arrays import data_of
from tfmulti.errors import DataError

# What is compressed, or stands before its index at the end, is lost as a whole.
_NOT_SKIPPED = "which --skip_bad_records cannot mend: how many examples are lost is not known."


def load(options: str, seed: int) -> DataSet:
    """Returns the data of `PATH[,classes=N]`, read without unpickling anything.

    The arrays' names are those of `named_arrays`. All of the file is read into memory.

    Raises:
        DataError: the file is missing, damaged or pickled, lacks an array, or the arrays
            differ in length or hold labels that are no labels.
    """
    path, _, rest = options.partition(",")
    place = f"npz:{path}"
    chosen = parse_options(place, rest, {"classes": None})
    return data_of(_read(path), place, chosen["classes"])


def _read(path: str) -> dict[str, np.ndarray]:
    place = f"--dataset npz:{path}"
    if not path:
        raise DataError("--dataset npz: needs a file. Write --dataset npz:PATH.")
    try:
        with _opened(path) as file:
            if not file.seek(0, io.SEEK_END):
                raise DataError(f"{place}: the file is empty. Write it anew.")
            if not zipfile.is_zipfile(file):
                raise DataError(
                    f"{place} is no .npz file, or a truncated one, {_NOT_SKIPPED} Save with "
                    "np.savez(path, x=…, y=…)."
                )
            file.seek(0)
            _check_declared(place, file)
            file.seek(0)
            with np.load(file, allow_pickle=False) as archive:
                return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise DataError(f"{place}: no such file. Give the path of an .npz file.") from None
    except OSError as error:
        raise DataError(f"{place}: {error.strerror or error}. Give a readable file.") from None
    except ValueError as error:
        if isinstance(error, DataError):
            raise
        if "allow_pickle" in str(error):
            raise DataError(
                f"{place} holds pickled Python objects, which can run code when they are read, so "
                "they are not. Save numeric arrays."
            ) from None
        raise DataError(
            f"{place} is damaged or truncated ({error}), {_NOT_SKIPPED} Write it anew."
        ) from None
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError) as error:
        # RuntimeError: a part says that it is encrypted, or packed in an unknown way.
        raise DataError(
            f"{place} is damaged or truncated ({error}), {_NOT_SKIPPED} Write it anew."
        ) from None


def _check_declared(place: str, file: IO[bytes]) -> None:
    """Checks what arrays declare to be before memory is taken for them.

    Raises:
        DataError: one has not the bytes that it declares, or all are more than this machine has.
    """
    most = files.memory_bytes()
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
                    f"{place}: the array {entry.filename[:100]!r} declares {declared:,} bytes, but "
                    f"has {entry.file_size:,}. Write it anew with np.savez(path, x=…, y=…)."
                )
    if total > most:
        raise DataError(
            f"{place} holds {total:,} bytes, but this machine has {most:,} of memory. Save each "
            "array by np.save, and use --dataset npy:FOLDER, which reads what it needs."
        )


def _opened(path: str) -> IO[bytes]:
    if files.is_remote(path):
        return io.BytesIO(files.read_bytes(path))
    return files.open_regular(files.expanded(path))

"""Folders of images (jpeg, png, bmp and webp), with one folder for each class."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np

from tfmulti.data.data_set import CLASSIFICATION, DataSet, DataSpec
from tfmulti.data.formats import pixels
from tfmulti.data.io import files
from tfmulti.data.io.folders import Classes, find_classes, find_parts
from tfmulti.data.options import parse_options
from tfmulti.data.source import Leaf, Source
from tfmulti.errors import ConfigError

EXTENSIONS = (".jpg", ".jpeg", ".png", ".bmp", ".webp")


def load(options: str, seed: int) -> DataSet:
    """Returns the images of `FOLDER[,size=HEIGHTxWIDTH,channels=3]`, uint8, and their classes.

    The training part is `FOLDER/train/CLASS/FILE`, with `validation` (or `val`) and `test` beside
    `train`. In a folder without parts it is `FOLDER/CLASS/FILE`. Classes are numbered in the order
    of their names. Images are resized (`pixels.resize_into`) without keeping their proportions.

    Raises:
        DataError: there are no such folders, or OpenCV is not installed.
        ConfigError: an option is wrong.
    """
    path, _, rest = options.partition(",")
    prefix = f"--dataset images:{path}"
    chosen = parse_options(f"images:{path}", rest, {"size": (224, 224), "channels": 3})
    size, channels = chosen["size"], chosen["channels"]
    if len(size) != 2:
        raise ConfigError(f"{prefix}: size must be HEIGHTxWIDTH, such as size=224x224.")
    if channels not in (1, 3):
        raise ConfigError(
            f"{prefix}: channels is {channels}, but it must be 1 (grey) or 3 (colours)."
        )
    # This raises DataError if OpenCV is not installed, before any folder is read.
    pixels.opencv()
    folders = find_parts(prefix, path)
    train = find_classes(prefix, folders.pop("train"), EXTENSIONS)
    shape = (size[0], size[1], channels)
    others: dict[str, Any] = {
        part: ImageFolder(find_classes(prefix, folder, EXTENSIONS, train.names), shape)
        for part, folder in folders.items()
    }
    spec = DataSpec(
        shape,
        "uint8",
        CLASSIFICATION,
        len(train.names),
        input_scale=1 / 255,
        class_names=train.names,
    )
    return DataSet(ImageFolder(train, shape), spec, **others)


class ImageFolder(Source):
    """The images of class folders, uint8 [height, width, channels], and their labels, int32.

    Args:
        classes: the files and their labels.
        shape: the height, the width and the channels to which images are decoded.
    """

    def __init__(self, classes: Classes, shape: tuple[int, int, int]) -> None:
        self._classes, self._shape = classes, shape

    def __len__(self) -> int:
        return len(self._classes.paths)

    @property
    def specs(self) -> Any:
        return Leaf(self._shape, "uint8"), Leaf((), "int32")

    def read(self, indices: np.ndarray, epoch: int = 0) -> Any:
        out = np.empty((len(indices), *self._shape), np.uint8), np.empty(len(indices), np.int32)
        self.read_into(indices, epoch, out)
        return out

    def read_into(self, indices: np.ndarray, epoch: int, out: Any) -> None:
        images, labels = out
        for row, index in enumerate(indices.tolist()):
            data = files.read_bytes(self._classes.paths[index], files.MOST_BYTES)
            pixels.decode_into(data, images[row])
        labels[...] = self._classes.labels[indices]

    def where(self, index: int) -> str:
        return self._classes.paths[index]

    def labels(self) -> np.ndarray:
        return self._classes.labels

    def identity(self) -> str:
        # A cache stores the labels with the images.
        labels = zlib.crc32(self._classes.labels.tobytes())
        return f"{self._shape} {labels}\n{files.identity_of(self._classes.paths)}"

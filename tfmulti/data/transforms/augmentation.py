"""Random changes of the training images; each example changes anew in each epoch.

The random numbers depend on (seed, epoch, example) alone. So an image looks the same whichever
worker reads it, with any number of threads, and in a run that was resumed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tfmulti.data.formats import pixels
from tfmulti.data.hashing import key_of, uniform
from tfmulti.data.source import Leaf, OverSource, Source
from tfmulti.errors import ConfigError, did_you_mean

# A function that changes an image in place, by `_DRAWS` random numbers in [0, 1).
Change = Callable[[np.ndarray, np.ndarray], None]

_DRAWS = 4


def flip(image: np.ndarray, draws: np.ndarray) -> None:
    """Mirrors an image from left to right, with a probability of one half."""
    if draws[0] < 0.5:
        image[...] = image[:, ::-1].copy()


def shift(image: np.ndarray, draws: np.ndarray) -> None:
    """Moves an image by up to an eighth of its size along each axis; edges are mirrored."""
    height, width = image.shape[:2]
    most_y, most_x = max(1, height // 8), max(1, width // 8)
    top, left = int(draws[0] * (2 * most_y + 1)), int(draws[1] * (2 * most_x + 1))
    edges = ((most_y, most_y), (most_x, most_x), (0, 0))
    image[...] = np.pad(image, edges, "symmetric")[top : top + height, left : left + width]


def crop(image: np.ndarray, draws: np.ndarray) -> None:
    """Replaces an image by a random part of it, which is enlarged to the size of the image.

    The part has 35 to 100 % of the area, and its proportions change by a factor from 3:4 to 4:3.
    Source: Szegedy et al., Going deeper with convolutions, 2014 (arXiv:1409.4842), where the part
    has at least 8 % of the area.
    """
    height, width = image.shape[:2]
    area, form = 0.35 + 0.65 * draws[0], (4 / 3) ** (2 * draws[1] - 1)
    rows = min(height, max(1, round(height * (area / form) ** 0.5)))
    columns = min(width, max(1, round(width * (area * form) ** 0.5)))
    top, left = int(draws[2] * (height - rows + 1)), int(draws[3] * (width - columns + 1))
    pixels.resize_into(image[top : top + rows, left : left + columns].copy(), image)


def rotate(image: np.ndarray, draws: np.ndarray) -> None:
    """Turns an image by up to 15 degrees in either direction; edges are mirrored."""
    cv2 = pixels.opencv()
    height, width = image.shape[:2]
    matrix = cv2.getRotationMatrix2D((width / 2 - 0.5, height / 2 - 0.5), 30 * draws[0] - 15, 1)
    turned = cv2.warpAffine(image, matrix, (width, height), borderMode=cv2.BORDER_REFLECT)
    image[...] = turned.reshape(image.shape)


def brightness(image: np.ndarray, draws: np.ndarray) -> None:
    """Multiplies an image by a factor from 0.7 to 1.3."""
    _scale(image, 0.7 + 0.6 * draws[0], 0.0)


def contrast(image: np.ndarray, draws: np.ndarray) -> None:
    """Multiplies the distance of each pixel from the mean of the image by 0.7 to 1.3."""
    factor = 0.7 + 0.6 * draws[0]
    _scale(image, factor, (1 - factor) * float(image.mean()))


def _scale(image: np.ndarray, factor: float, offset: float) -> None:
    """Multiplies an image and adds an offset, in place; uint8 is rounded and limited."""
    changed = image * np.float32(factor) + np.float32(offset)
    image[...] = np.clip(np.rint(changed), 0, 255) if image.dtype == np.uint8 else changed


# The changes are made in this order: first those that move pixels, then those of their values.
CHANGES: dict[str, Change] = {
    "flip": flip,
    "shift": shift,
    "rotate": rotate,
    "crop": crop,
    "brightness": brightness,
    "contrast": contrast,
}


def parse_changes(text: str) -> tuple[str, ...]:
    """Returns the changes of a text such as `flip,crop`, in the order in which they are made.

    Raises:
        ConfigError: there is no such change.
    """
    names = [name for name in text.replace("+", ",").split(",") if name]
    for name in names:
        if name not in CHANGES:
            raise ConfigError(f"no change {name!r} for --augment; {did_you_mean(name, CHANGES)}")
    return tuple(name for name in CHANGES if name in names)


class Augmented(OverSource):
    """A source whose first leaf, images [n, height, width, channels], is changed at random.

    Args:
        source: the examples without the changes.
        changes: the names of the changes, from `CHANGES`.
        seed: the seed of the random numbers.
    """

    def __init__(self, source: Source, changes: tuple[str, ...], seed: int) -> None:
        super().__init__(source)
        self._changes, self._seed = changes, seed

    def read(self, indices: np.ndarray, epoch: int = 0) -> Any:
        x, *rest = self.below.read(indices, epoch)
        # The source below may keep this array, so a copy is changed.
        x = np.array(x)
        self._change(x, indices, epoch)
        return (x, *rest)

    def read_into(self, indices: np.ndarray, epoch: int, out: Any) -> None:
        self.below.read_into(indices, epoch, out)
        self._change(out[0], indices, epoch)

    def changed(self, change: Callable[[Source], Source]) -> Source:
        return Augmented(self.below.changed(change), self._changes, self._seed)

    def _change(self, images: np.ndarray, indices: np.ndarray, epoch: int) -> None:
        """Changes the images of the examples at `indices` in place."""
        for name in self._changes:
            # Each change has a key of its own, so the others keep their numbers if one is added.
            draws = uniform(key_of(self._seed, epoch, list(CHANGES).index(name)), indices, _DRAWS)
            for image, image_draws in zip(images, draws, strict=True):
                CHANGES[name](image, image_draws)


def takes(specs: Any) -> bool:
    """Returns whether examples of this form can be changed: tuples that begin with an image."""
    first = specs[0] if isinstance(specs, tuple) and not isinstance(specs, Leaf) else None
    return (
        isinstance(first, Leaf)
        and len(first.shape) == 3
        and first.shape[-1] in (1, 3)
        and first.dtype in ("uint8", "float32")
    )

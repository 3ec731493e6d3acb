"""Small data of every kind, made on the disk: one function a kind, in `KINDS`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np

EXAMPLES = 23  # no multiple of the batches that tests take


def pictures(count: int, height: int = 12, width: int = 16) -> np.ndarray:
    """Returns smooth images, uint8 [count, height, width, 3], each unlike the others."""
    rng = np.random.default_rng(3)
    small = rng.integers(0, 255, (count, 4, 4, 3), dtype=np.uint8)
    return np.stack([cv2.resize(image, (width, height)) for image in small])


def npz(folder: Path) -> str:
    x = np.arange(EXAMPLES * 3, dtype=np.float32).reshape(EXAMPLES, 3)
    np.savez(folder / "a.npz", x=x, y=np.arange(EXAMPLES) % 4, weight=np.arange(EXAMPLES) / 10)
    return f"npz:{folder / 'a.npz'}"


def npy(folder: Path) -> str:
    np.save(folder / "x.npy", np.arange(EXAMPLES * 3, dtype=np.float64).reshape(EXAMPLES, 3))
    np.save(folder / "y.npy", np.arange(EXAMPLES) % 4)
    return f"npy:{folder}"


def images(folder: Path) -> str:
    for i, image in enumerate(pictures(EXAMPLES)):
        place = folder / f"class{i % 3}"
        place.mkdir(exist_ok=True)
        cv2.imwrite(str(place / f"{i}{'.png' if i % 2 else '.jpg'}"), image)
    return f"images:{folder},size=8x10"


KINDS: dict[str, Callable[[Path], str]] = {"npz": npz, "npy": npy, "images": images}

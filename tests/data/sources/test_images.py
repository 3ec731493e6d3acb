"""Tests folders of images, decoding, and augmentation by example and epoch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from tfmulti.config.fit_config import FitConfig
from tfmulti.data.arrays import ArraySource
from tfmulti.data.data_set import DataSet
from tfmulti.data.formats import pixels
from tfmulti.data.source import Leaf
from tfmulti.data.sources import images
from tfmulti.data.transforms.augmentation import CHANGES, Augmented, parse_changes, takes
from tfmulti.errors import ConfigError, DataError
from tfmulti.run.data_stages import prepared


def picture(seed: int, height: int = 40, width: int = 60) -> np.ndarray:
    small = np.random.default_rng(seed).integers(0, 255, (5, 6, 3), dtype=np.uint8)
    return np.asarray(cv2.resize(small, (width, height)))


def encoded(image: np.ndarray, ending: str = ".png") -> bytes:
    rgb = image[..., ::-1] if image.shape[-1] == 3 else image
    return bytes(cv2.imencode(ending, rgb)[1])


def make_folder(
    folder: Path, per_class: int = 3, classes: str = "ab", ending: str = ".png"
) -> Path:
    for c, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(per_class):
            (folder / name / f"{i}{ending}").write_bytes(encoded(picture(10 * c + i), ending))
    return folder


@pytest.mark.parametrize("ending", [".png", ".jpg", ".bmp", ".webp"])
def test_images_are_decoded(ending: str) -> None:
    image = picture(1)
    decoded = pixels.decode(encoded(image, ending))
    exact = ending in (".png", ".bmp")
    assert decoded.shape == image.shape
    assert np.abs(decoded.astype(int) - image).max() <= (0 if exact else 60)
    assert np.abs(decoded.astype(int) - image).mean() <= (0 if exact else 8)


def test_grey_and_colours() -> None:
    grey = picture(1)[..., :1]
    assert np.array_equal(pixels.decode(encoded(grey), 1), grey)
    assert np.array_equal(pixels.decode(encoded(grey), 3), np.repeat(grey, 3, -1))
    assert pixels.decode(encoded(picture(1)), 1).shape == (40, 60, 1)
    clear = np.dstack([picture(1), np.full((40, 60), 100, np.uint8)])
    assert pixels.decode(bytes(cv2.imencode(".png", clear)[1])).shape == (40, 60, 3)
    deep = (picture(1).astype(np.uint16) * 257)[..., ::-1]
    assert np.array_equal(pixels.decode(bytes(cv2.imencode(".png", deep)[1])), picture(1))


def test_resizing() -> None:
    image = np.zeros((8, 8, 1), np.uint8)
    image[:, 4:] = 200
    half, twice = np.empty((4, 4, 1), np.uint8), np.empty((16, 16, 1), np.uint8)
    pixels.resize_into(image, half)
    assert half[0, :, 0].tolist() == [0, 0, 200, 200]
    pixels.resize_into(image, twice)
    # These values follow from half-pixel centers.
    assert twice[5, [0, 6, 7, 8, 15], 0].tolist() == [0, 0, 50, 150, 200]


@pytest.mark.parametrize("ending", [".png", ".jpg"])
@pytest.mark.parametrize("keep", [0, 3, 0.3, 0.9, -1])
def test_cut_off_images_are_errors(ending: str, keep: float) -> None:
    content = encoded(picture(1), ending)
    at = int(len(content) * keep) if 0 < keep < 1 else int(keep)
    with pytest.raises(ValueError, match=r"cut off after|is empty|not an image"):
        pixels.decode(content[:at])


def test_a_thumbnail_does_not_hide_that_a_jpeg_is_cut_off() -> None:
    content, inner = encoded(picture(1), ".jpg"), encoded(picture(2, 8, 8), ".jpg")
    block = b"\xff\xe1" + (len(inner) + 2).to_bytes(2, "big") + inner
    with_thumbnail = content[:2] + block + content[2:]
    assert np.array_equal(pixels.decode(with_thumbnail), pixels.decode(content))
    with pytest.raises(ValueError, match="cut off"):
        pixels.decode(with_thumbnail[:-100])


def test_each_folder_is_a_class(tmp_path: Path) -> None:
    data = images.load(f"{make_folder(tmp_path)},size=20x30", 0)
    assert data.spec is not None
    assert (data.spec.input_shape, data.spec.outputs, data.spec.input_dtype) == (
        (20, 30, 3),
        2,
        "uint8",
    )
    x, y = data.train.read(np.array([4, 0]))
    assert y.tolist() == [1, 0]
    expected = np.empty((20, 30, 3), np.uint8)
    pixels.resize_into(picture(11), expected)
    assert np.array_equal(x[0], expected)
    assert data.train.where(4) == str(tmp_path / "b" / "1.png")
    assert data.train.labels().tolist() == [0, 0, 0, 1, 1, 1]


def test_parts_have_the_classes_of_training(tmp_path: Path) -> None:
    make_folder(tmp_path / "train", classes="abc")
    make_folder(tmp_path / "val", 2, classes="bc")
    data = images.load(str(tmp_path), 0)
    assert data.validation.labels().tolist() == [1, 1, 2, 2]
    assert data.test is None


def test_the_identity_of_a_folder_of_images(tmp_path: Path) -> None:
    before = images.load(str(make_folder(tmp_path)), 0).train.identity()
    assert before == images.load(str(tmp_path), 0).train.identity()
    assert before != images.load(f"{tmp_path},size=9x9", 0).train.identity()
    (tmp_path / "a" / "0.png").write_bytes(encoded(picture(99)))
    assert before != images.load(str(tmp_path), 0).train.identity()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (",size=20", "size must be HEIGHTxWIDTH"),
        (",channels=2", r"channels is 2, but it must be 1 \(grey\) or 3"),
        (",sise=20x20", "did you mean 'size'"),
    ],
)
def test_mistakes_in_options(options: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        images.load(f"{make_folder(tmp_path)}{options}", 0)


def test_a_missing_opencv_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cv2", None)
    with pytest.raises(DataError, match=r"needs OpenCV, .*pip install 'tfmulti\[images\]'"):
        images.load(str(make_folder(tmp_path)), 0)


def noise(rows: int = 6, dtype: str = "uint8") -> ArraySource:
    x = np.stack([picture(i, 24, 32) for i in range(rows)]).astype(dtype)
    return ArraySource((x, np.arange(rows)))


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
@pytest.mark.parametrize("change", list(CHANGES))
def test_an_example_looks_the_same_however_it_is_read(change: str, dtype: str) -> None:
    source = Augmented(noise(dtype=dtype), (change,), seed=3)
    everything = source.read(np.arange(6), epoch=2)[0]
    out = np.empty((2, 24, 32, 3), dtype), np.empty(2, np.int64)
    source.read_into(np.array([5, 1]), 2, out)
    assert np.array_equal(out[0], everything[[5, 1]])
    assert out[1].tolist() == [5, 1]
    changed = [
        not np.array_equal(a, b)
        for a, b in zip(everything, noise(dtype=dtype).data[0], strict=True)
    ]
    assert any(changed)
    other = Augmented(noise(dtype=dtype), (change,), seed=4).read(np.arange(6), epoch=2)[0]
    again = source.read(np.arange(6), epoch=3)[0]
    assert not np.array_equal(everything, again)
    assert not np.array_equal(everything, other)


def test_augmentations_change_images_as_described() -> None:
    image = picture(1, 24, 32)
    flipped = image.copy()
    CHANGES["flip"](flipped, np.array([0.4, 0, 0, 0]))
    assert np.array_equal(flipped, image[:, ::-1])
    unchanged = image.copy()
    CHANGES["flip"](unchanged, np.array([0.6, 0, 0, 0]))
    assert np.array_equal(unchanged, image)
    moved = image.copy()
    # The numbers shift the image by 3 rows up and by no column.
    CHANGES["shift"](moved, np.array([0.999, 0.5, 0, 0]))
    assert np.array_equal(moved[:-3], image[3:])
    # The new rows are the mirrored edge.
    assert np.array_equal(moved[-3:], image[:-4:-1])
    brighter = image.copy()
    CHANGES["brightness"](brighter, np.array([0.5, 0, 0, 0]))
    # This number multiplies the brightness by one.
    assert np.array_equal(brighter, image)
    flat = np.full((4, 4, 3), 90, np.uint8)
    CHANGES["contrast"](flat, np.array([0.9, 0, 0, 0]))
    assert flat.tolist() == np.full((4, 4, 3), 90).tolist()
    content = image.copy()
    CHANGES["crop"](content, np.array([1.0, 0.5, 0, 0]))
    assert np.abs(content.astype(int) - image).mean() < 30


def test_augmentations_are_parsed_by_name() -> None:
    assert parse_changes("crop,flip") == ("flip", "crop")
    assert parse_changes("flip+shift") == ("flip", "shift")
    with pytest.raises(ConfigError, match="no change 'flop' for --augment; did you mean 'flip'"):
        parse_changes("flop")


@pytest.mark.parametrize(
    ("specs", "taken"),
    [
        ((Leaf((8, 8, 3), "uint8"), Leaf((), "int32")), True),
        ((Leaf((8, 8, 1), "float32"), Leaf((), "int32")), True),
        ((Leaf((8, 8), "uint8"), Leaf((), "int32")), False),
        ((Leaf((8, 8, 3), "int32"), Leaf((), "int32")), False),
        (({"a": Leaf((8, 8, 3), "uint8")}, Leaf((), "int32")), False),
        (Leaf((8, 8, 3), "uint8"), False),
    ],
)
def test_which_data_can_be_augmented(specs: Any, taken: bool) -> None:
    assert takes(specs) is taken


def test_only_training_is_augmented_and_a_cache_changes_nothing(tmp_path: Path) -> None:
    make_folder(tmp_path, 10)
    options = {"dataset": f"images:{tmp_path},size=24x24", "augment": "flip,crop", "model": "cnn"}

    def parts(**more: Any) -> DataSet:
        config = FitConfig(**options, **more)  # type: ignore[arg-type]
        return prepared(images.load(config.dataset.partition(":")[2], 0), config)

    plain, from_cache = parts(), parts(cache="memory")
    rows = np.arange(len(plain.train))
    for epoch in (0, 0, 1):
        same = np.array_equal(
            from_cache.train.read(rows, epoch)[0], plain.train.read(rows, epoch)[0]
        )
        assert same
    assert not np.array_equal(plain.train.read(rows, 0)[0], plain.train.read(rows, 1)[0])
    seen = np.arange(len(plain.validation))
    assert np.array_equal(plain.validation.read(seen, 0)[0], plain.validation.read(seen, 1)[0])
    with pytest.raises(DataError, match="--augment flip needs images"):
        prepared(
            DataSet(ArraySource((np.zeros((4, 3)), np.zeros(4)))),
            FitConfig(dataset="regression", augment="flip", validation_fraction=0.0),
        )

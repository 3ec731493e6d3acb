"""Encoded images (jpeg, png, bmp, webp) to arrays of one size, by OpenCV.

OpenCV reads and resizes an image in 0.46 ms, and TensorFlow's kernels take 0.8 ms (256×256 to
224×224, one core). OpenCV also writes into memory that exists already, and releases Python's lock
meanwhile.
"""

from __future__ import annotations

import importlib
import struct
from typing import Any

import numpy as np

from tfmulti.errors import DataError

_JPEG, _PNG = b"\xff\xd8", b"\x89PNG\r\n\x1a\n"
# The default limit of an image: 384 MB in colours.
MEGAPIXELS = 128
_most_pixels = MEGAPIXELS * 1_000_000
_NO_IMAGE = "it is not an image, or a damaged one (jpeg, png, bmp and webp are read)"
_START_OF_SCAN, _END_OF_JPEG, _END_OF_PNG = b"\xff\xda", b"\xff\xd9", b"IEND"


def opencv() -> Any:
    """Returns the module `cv2`, which uses one thread a call: the loader has threads of its own.

    Raises:
        DataError: OpenCV is not installed.
    """
    try:
        cv2 = importlib.import_module("cv2")
    except ImportError:
        raise DataError(
            "reading images needs OpenCV, which is not installed. "
            "Install it: pip install 'tfmulti[images]'."
        ) from None
    cv2.setNumThreads(1)
    return cv2


def limit_pixels(millions: int) -> None:
    """Sets the largest number of pixels of an image, in millions; larger images are refused.

    A few bytes of a file may stand for any number of pixels.
    """
    global _most_pixels
    _most_pixels = millions * 1_000_000


def most_pixels() -> int:
    """Returns the largest number of pixels that an image may have."""
    return _most_pixels


def check_pixels(data: bytes) -> None:
    """Checks the size that an encoded image declares, before memory is taken for its pixels.

    Raises:
        DataError: the bytes are no known image, or the image has more pixels than `limit_pixels`
            allows.
    """
    declared = _declared_pixels(data)
    # OpenCV reads other formats, too, but their size is not known before they are decoded.
    if not declared:
        raise DataError(_NO_IMAGE)
    if declared > _most_pixels:
        raise DataError(
            f"the image has more than {_most_pixels:,} pixels. If you trust the image, allow more "
            "by --max_image_megapixels"
        )


def decode(data: bytes, channels: int = 3) -> np.ndarray:
    """Returns an encoded image as uint8 [height, width, channels]; colours are RGB.

    The image is turned upright, as its EXIF orientation says. `channels` is 1 or 3.

    Raises:
        DataError: the bytes are no known image, are cut off, or have more pixels than
            `limit_pixels` allows.
    """
    cv2 = opencv()
    if not data:
        raise DataError("the image is empty")
    if _is_cut_off(data):
        raise DataError(f"the image is cut off after {len(data):,} bytes")
    check_pixels(data)
    flag = cv2.IMREAD_GRAYSCALE if channels == 1 else cv2.IMREAD_COLOR_RGB
    try:
        image: np.ndarray | None = cv2.imdecode(np.frombuffer(data, np.uint8), flag)
    except cv2.error as error:
        raise DataError(f"OpenCV cannot read the image ({error.err})") from None
    if image is None:
        raise DataError(_NO_IMAGE)
    return image[..., np.newaxis] if channels == 1 else image


def decode_into(data: bytes, out: np.ndarray) -> None:
    """Writes an encoded image into `out`, uint8 [height, width, channels], resized to fit.

    Raises:
        DataError: the bytes are no known image, are cut off, or have more pixels than
            `limit_pixels` allows.
    """
    resize_into(decode(data, out.shape[-1]), out)


def resize_into(image: np.ndarray, out: np.ndarray) -> None:
    """Writes an image into `out`, resized to the height and the width of `out`.

    Both have the same number of channels. The resizing is bilinear. If both sides shrink to half
    or less, each new pixel is the mean of the pixels that it covers, which avoids aliasing.
    """
    height, width = out.shape[:2]
    if image.shape == out.shape:
        out[...] = image
        return
    cv2 = opencv()
    shrinks = image.shape[0] >= 2 * height and image.shape[1] >= 2 * width
    method = cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR
    cv2.resize(image, (width, height), dst=out, interpolation=method)


def _is_cut_off(data: bytes) -> bool:
    """Returns whether the end of an image is missing, which OpenCV silently fills with grey."""
    if data.startswith(_JPEG):
        # The encoded pixels contain neither marker. A thumbnail before them contains both, so the
        # last markers count.
        return data.rfind(_END_OF_JPEG) < data.rfind(_START_OF_SCAN)
    return data.startswith(_PNG) and _END_OF_PNG not in data[-16:]


def _declared_pixels(data: bytes) -> int:
    """Returns how many pixels the header of an image declares; 0 if the format is not known.

    Sources: PNG (ISO/IEC 15948), JPEG (ITU-T T.81, B.2.2), WebP (RFC 9649), BITMAPCOREHEADER and
    BITMAPINFOHEADER.
    """
    is_webp = data.startswith(b"RIFF")
    try:
        if data.startswith(_PNG) and data[12:16] == b"IHDR":
            width, height = struct.unpack_from(">II", data, 16)
        elif data.startswith(_JPEG):
            height, width = struct.unpack_from(">HH", data, _start_of_frame(data) + 5)
        elif data.startswith(b"BM"):
            (head_bytes,) = struct.unpack_from("<I", data, 14)
            width, height = struct.unpack_from("<HH" if head_bytes == 12 else "<ii", data, 18)
        elif is_webp and data[8:16] == b"WEBPVP8X":
            low, high, low_height, high_height = struct.unpack_from("<HBHB", data, 24)
            width, height = (high << 16 | low) + 1, (high_height << 16 | low_height) + 1
        elif is_webp and data[8:16] == b"WEBPVP8L":
            (bits,) = struct.unpack_from("<I", data, 21)
            width, height = (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
        elif is_webp and data[8:16] == b"WEBPVP8 ":
            width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", data, 26))
        else:
            return 0
    except struct.error:
        # The header is cut off.
        return 0
    return abs(int(width) * int(height))


def _start_of_frame(data: bytes) -> int:
    """Returns the offset of the JPEG segment that holds the size of the image.

    It returns the length of the data if there is no such segment.
    """
    offset = 2
    while offset + 4 <= len(data):
        mark, kind, length = struct.unpack_from(">BBH", data, offset)
        if mark == 0xFF and 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            return offset
        if mark != 0xFF or kind == 0xFF:
            # Bytes FF may fill the space before a marker.
            offset += 1
        elif kind == 0x01 or 0xD0 <= kind <= 0xD8:
            # These markers have no length.
            offset += 2
        else:
            offset += 2 + length
    return len(data)

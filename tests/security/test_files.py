"""Files that ask for more than they are: of memory, of time, or of the reader's patience."""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import os
import struct
import threading
import zipfile
import zlib
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from tests.security.test_parsers import parts_of, sealed
from tests.support.records import framed, write_features
from tfmulti.cluster.allocation import hosts_of_file
from tfmulti.cluster.cluster import Cluster, Task
from tfmulti.config.fit_config import (
    FitConfig,
    check_same_run,
    read_config_file,
    read_saved_config,
)
from tfmulti.config.reading import ReadOptions
from tfmulti.config.troubleshooting import docs_path_of
from tfmulti.data.arrays import ArraySource
from tfmulti.data.bad_records import is_of_storage
from tfmulti.data.batch_plan import BatchPlan
from tfmulti.data.formats import csv_tables, parquet_tables, pixels
from tfmulti.data.formats.gzip_faults import fault_of
from tfmulti.data.io import files, open_files
from tfmulti.data.loader import Loader
from tfmulti.data.sources import images, npz, tfrecord
from tfmulti.distribution.strategies import Placement
from tfmulti.doctor import __main__ as doctor
from tfmulti.doctor.machine import MARK_FILE
from tfmulti.errors import ClusterError, ConfigError, DataError, ResumeError, RunDirError
from tfmulti.launch.heartbeat import read_error, read_progress
from tfmulti.launch.hosts import read_hostfile
from tfmulti.training import watchdog
from tfmulti.training.checkpoint import file_format, owner
from tfmulti.training.checkpoint.file_format import Checkpoints, DamagedCheckpointError, Record

ENCODED = [
    (".png", []),
    (".bmp", []),
    (".jpg", []),
    (".jpg", [cv2.IMWRITE_JPEG_PROGRESSIVE, 1]),
    (".webp", [cv2.IMWRITE_WEBP_QUALITY, 80]),
    (".webp", [cv2.IMWRITE_WEBP_QUALITY, 101]),  # without loss
]


def png(width: int, height: int) -> bytes:
    """Returns a black image of one bit a pixel: some KB for any size."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress((b"\0" + bytes((width + 7) // 8)) * height, 1)
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head)
    return start + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_an_image_of_too_many_pixels_is_not_decoded() -> None:
    data = png(16_000, 8_001)
    assert len(data) < 200_000
    with pytest.raises(DataError, match=r"has more than 128,000,000 pixels.*max_image_megapixels"):
        pixels.decode(data)
    assert pixels.decode(png(16, 8)).shape == (8, 16, 3)


@pytest.mark.parametrize(("ending", "options"), ENCODED)
def test_the_size_of_each_format_is_known_before_it_is_decoded(
    ending: str, options: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    image = np.random.default_rng(0).integers(0, 255, (301, 517, 3)).astype(np.uint8)
    data = cv2.imencode(ending, image, options)[1].tobytes()
    assert pixels._declared_pixels(data) == 301 * 517
    assert pixels._declared_pixels(data[:12]) == 0
    monkeypatch.setattr(pixels, "_most_pixels", 301 * 517 - 1)
    with pytest.raises(DataError, match="has more than"):
        pixels.decode(data)


@pytest.mark.parametrize("ending", [".jp2", ".tiff", ".ppm", ".ras", ".hdr", ".gif", ".avif"])
def test_formats_whose_size_is_not_known_are_not_read(ending: str) -> None:
    """OpenCV reads them whatever a file is called, of any size."""
    image = np.zeros((64, 64, 3), np.uint8)
    if not cv2.haveImageWriter(f"x{ending}"):
        pytest.skip(f"this OpenCV writes no {ending}")
    given = image.astype(np.float32) if ending == ".hdr" else image
    data = cv2.imencode(ending, given)[1].tobytes()
    assert cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR) is not None
    with pytest.raises(DataError, match=r"jpeg, png, bmp and webp are read"):
        pixels.decode(data)


@pytest.mark.parametrize("marks", [b"\xff\x01", b"\xff\xd0\xff\xd7", b"\xff\xff\xff\x01"])
def test_marks_without_a_length_do_not_hide_the_size_of_a_jpeg(
    marks: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = cv2.imencode(".jpg", np.zeros((40, 30, 3), np.uint8))[1].tobytes()
    data = data[:2] + marks + data[2:]
    assert pixels._declared_pixels(data) == 1200
    monkeypatch.setattr(pixels, "_most_pixels", 1199)
    with pytest.raises(DataError, match="has more than 1,199 pixels"):
        pixels.decode(data)


@pytest.mark.parametrize(("ending", "options"), ENCODED)
def test_a_stream_knows_the_size_of_an_image_before_it_is_decoded(
    tmp_path: Path, ending: str, options: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    image = np.random.default_rng(0).integers(0, 255, (301, 517, 3)).astype(np.uint8)
    place = packed_records(tmp_path, cv2.imencode(ending, image, options)[1].tobytes())
    monkeypatch.setattr(pixels, "_most_pixels", 301 * 517)
    ((x, y),) = tfrecord.load(place, 0).finish(2).train
    assert (x.shape, y.shape) == ((2, 8, 8, 3), (2,))
    monkeypatch.setattr(pixels, "_most_pixels", 301 * 517 - 1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="the image is too large"):
        next(iter(tfrecord.load(place, 0).finish(2).train))


def test_a_canvas_of_a_webp_has_a_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.BytesIO()
    Image.new("RGB", (300, 500)).save(out, "WEBP", exif=b"Exif\0\0MM")
    assert out.getvalue()[8:16] == b"WEBPVP8X"
    place = packed_records(tmp_path, out.getvalue())
    monkeypatch.setattr(pixels, "_most_pixels", 300 * 500)
    assert len(next(iter(tfrecord.load(place, 0).finish(2).train))) == 2
    monkeypatch.setattr(pixels, "_most_pixels", 300 * 500 - 1)
    with pytest.raises(tf.errors.InvalidArgumentError, match="the image is too large"):
        next(iter(tfrecord.load(place, 0).finish(2).train))


def test_a_stream_reads_no_gif(tmp_path: Path) -> None:
    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, "GIF")
    stream = tfrecord.load(packed_records(tmp_path, out.getvalue()), 0).finish(2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="the image is too large"):
        next(iter(stream.train))
    assert "jpeg, png, bmp and webp are read" in str(fault_of(stream.train))


def test_a_stream_does_not_decode_an_image_of_too_many_pixels(tmp_path: Path) -> None:
    data = png(16_000, 8_001)
    stream = tfrecord.load(packed_records(tmp_path, data), 0).finish(2)
    with pytest.raises(tf.errors.InvalidArgumentError, match="the image is too large"):
        next(iter(stream.train))
    assert "has more than 128,000,000 pixels" in str(fault_of(stream.train))


def packed_records(folder: Path, data: bytes) -> str:
    """Writes a GZIP file of two records with an image, and returns the options that read it."""
    example = tf.train.Example()
    example.features.feature["image"].bytes_list.value.append(data)
    example.features.feature["label"].int64_list.value.append(1)
    records = framed(example.SerializeToString()) * 2
    (folder / "a.gz").write_bytes(gzip.compress(records))
    write_features(folder)
    return f"{folder}/a.gz"


def test_an_old_bitmap_has_a_size_too() -> None:
    head = struct.pack("<2sIHHI", b"BM", 26 + 32, 0, 0, 26) + struct.pack("<IHHHH", 12, 4, 2, 1, 24)
    assert pixels.decode(head + bytes(32)).shape == (2, 4, 3)


def test_the_flag_allows_more() -> None:
    try:
        pixels.limit_pixels(129)
        assert pixels.decode(png(16_000, 8_001), 1).shape == (8_001, 16_000, 1)
    finally:
        pixels.limit_pixels(pixels.MEGAPIXELS)


@settings(max_examples=500)
@given(st.binary(max_size=200), st.sampled_from([b"", b"\x89PNG\r\n\x1a\n", b"\xff\xd8", b"BM"]))
def test_any_bytes_are_an_image_or_a_bad_record(data: bytes, start: bytes) -> None:
    with contextlib.suppress(DataError):
        assert pixels.decode(start + data).dtype == np.uint8


def folder_of_images(tmp_path: Path) -> Path:
    for label in ("a", "b"):
        (tmp_path / label).mkdir()
        (tmp_path / label / "good.png").write_bytes(png(8, 8))
    return tmp_path


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_regular_file_is_a_bad_record(tmp_path: Path, kind: str) -> None:
    """Who opened a named pipe would wait for ever, and /dev/zero never ends."""
    folder = folder_of_images(tmp_path)
    odd = folder / "a" / "odd.png"
    if kind == "pipe":
        os.mkfifo(odd)
    else:
        odd.symlink_to("/dev/zero")
    source = images.load(f"{folder},size=8x8", 0).train
    assert len(source) == 3
    lost = [index for index in range(3) if source.where(index) == str(odd)]
    with pytest.raises(OSError, match="not a regular file"):
        source.read(np.array(lost))
    whole = Loader(source, BatchPlan(3, 3), Placement(0, 1, 1), ReadOptions(0, 1))
    batch = next(whole.batches())
    assert batch.own_rows == (2,)
    assert "odd.png: it is not a regular file." in batch.lost[0]


@pytest.mark.parametrize("kind", ["npz", "npy", "tfrecord"])
def test_a_named_pipe_is_no_data_set(tmp_path: Path, kind: str) -> None:
    """Whoever opened one waited for somebody to write to it."""
    os.mkfifo(tmp_path / "x.npy")
    pipe = str(tmp_path / "x.npy")
    load: dict[str, Callable[[], object]] = {
        "npz": lambda: npz.load(pipe, 0),
        "npy": lambda: import_module("tfmulti.data.sources.npy").load(str(tmp_path), 0),
        "tfrecord": lambda: open_files.LocalFile(pipe),
    }
    with pytest.raises((DataError, OSError), match="not a regular file"):
        load[kind]()


def test_a_pattern_means_regular_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.csv")
    for pattern in (tmp_path, tmp_path / "x.csv"):
        with pytest.raises(DataError, match=r"x\.csv is not a regular file"):
            files.matching("--dataset csv", str(pattern), (".csv",))


def test_a_file_that_is_one_example_has_an_end(tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    with path.open("wb") as file:
        file.truncate(files.MOST_BYTES + 1)  # it takes no place on the disk
    with pytest.raises(OSError, match="more than 1,073,741,824 bytes"):
        files.read_bytes(str(path), files.MOST_BYTES)
    with path.open("wb") as file:
        file.truncate(1000)
    assert len(files.read_bytes(f"file://{path}", 1000)) == 1000
    with pytest.raises(OSError, match="more than 999 bytes"):
        files.read_bytes(f"file://{path}", 999)


def npy(shape: tuple[int, ...], data: bytes = b"") -> bytes:
    """Returns an .npy file that declares a shape, and has other data."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        file, {"descr": "<f4", "fortran_order": False, "shape": shape}
    )
    return file.getvalue() + data


def test_an_npz_that_declares_terabytes_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", npy((1 << 43,), b"few"))
    words = r"the array 'x.npy' declares 35,184,372,088,832 bytes, but has "
    with pytest.raises(DataError, match=words):
        npz.load(str(path), 0)


def test_an_npz_of_more_than_the_memory_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.npz"
    np.savez_compressed(path, x=np.zeros((1000, 100), np.float32), y=np.zeros(1000, np.int32))
    assert path.stat().st_size < 4_000
    assert len(npz.load(str(path), 0).train) > 0
    monkeypatch.setattr(files, "memory_bytes", lambda: 90_000)
    words = r"holds 40\d,\d+ bytes, but 90,000 is the limit .* by --max_file_gigabytes"
    with pytest.raises(DataError, match=words):
        npz.load(str(path), 0)
    try:
        files.limit_unpacked(0.001)
        assert len(npz.load(str(path), 0).train) > 0
        files.limit_unpacked(0.0001)
        with pytest.raises(DataError, match="but 100,000 is the limit"):
            npz.load(str(path), 0)
    finally:
        files.limit_unpacked(None)


def repacked(data: bytes, compression: int) -> bytes:
    """Returns a checkpoint whose parts are stored or compressed."""
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as before,
        zipfile.ZipFile(out, "w", compression) as after,
    ):
        for name in before.namelist():
            after.writestr(name, before.read(name))
    return out.getvalue()


def test_a_packed_table_of_more_than_the_memory_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = gzip.compress(b"a,b\n" + b"1,2\n" * 1_000_000)
    assert len(data) < 10_000
    assert csv_tables.read_csv(data, is_gzip=True)[0].num_rows == 1_000_000
    monkeypatch.setattr(files, "memory_bytes", lambda: 1_000_000)
    words = r"more than 1,000,000 bytes.* by --max_file_gigabytes"
    with pytest.raises(ValueError, match=words) as caught:
        csv_tables.read_csv(data, is_gzip=True)
    assert docs_path_of(str(caught.value)) == "troubleshooting#file-limit"


def test_a_parquet_file_of_more_than_the_memory_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({"a": np.zeros(1_000_000, np.int64)}), out)
    assert len(out.getvalue()) < 10_000
    assert parquet_tables.read_parquet(out.getvalue()).num_rows == 1_000_000
    monkeypatch.setattr(files, "memory_bytes", lambda: 3_000_000)
    words = "1,000,000 rows of 1 columns, 4,000,000 bytes or more, .* by --max_file_gigabytes"
    with pytest.raises(ValueError, match=words):
        parquet_tables.read_parquet(out.getvalue())


@pytest.mark.parametrize(
    ("text", "share"), [("max\n", 1), ("1048576\n", 0), (str(2**63 - 1), 1), ("", 1)]
)
def test_the_memory_of_a_container_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, share: int
) -> None:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    (tmp_path / "memory.max").write_text(text)
    limits = (str(tmp_path / "none"), str(tmp_path / "memory.max"))
    monkeypatch.setattr(files, "CGROUP_LIMITS", limits)
    assert files.memory_bytes() == (machine if share else 1 << 20)


READERS: dict[str, Callable[[Path], object]] = {
    owner.FILE: owner._read,
    "hang_worker_1.json": watchdog.read,
    MARK_FILE: lambda path: doctor._read_mark(str(path.parent)),
    "config.json": read_saved_config,
    "hosts": read_hostfile,
    "heartbeat": read_progress,
    "error.json": read_error,
    "nodes": lambda path: hosts_of_file("PBS_NODEFILE", str(path)),
}


@pytest.mark.parametrize("kind", ["pipe", "device", "sparse"])
@pytest.mark.parametrize("name", READERS)
def test_small_files_are_regular_and_have_an_end(tmp_path: Path, name: str, kind: str) -> None:
    """Each of these reads waited for ever, or took any amount of memory."""
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)  # it takes no place on the disk
    with contextlib.suppress(ConfigError, ClusterError):
        assert READERS[name](path) is None


def test_a_configuration_of_the_user_may_be_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_text, args=['{"seed": 3}'])
    writer.start()
    assert read_config_file(str(tmp_path / "pipe")) == {"seed": 3}
    writer.join()


def test_a_checkpoint_is_no_larger_than_the_memory(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.write(Record(1, {}))
    with (tmp_path / "step-000000002.npz").open("wb") as file:
        file.truncate(1 << 43)
    record, wrong = checkpoints.newest()
    assert record is not None
    assert record.step == 1
    assert "more than" in wrong[0]


def test_the_mark_of_the_doctor_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("mine")
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / MARK_FILE).symlink_to(tmp_path / "other")
    with doctor.run_directory_mark(Cluster(("a:1", "b:1"), Task("worker", 0)), str(run_dir)):
        assert (tmp_path / "other").read_text() == "mine"
        assert len(str(doctor._read_mark(str(run_dir)))) == 32
    assert list(run_dir.iterdir()) == []


def test_a_small_checkpoint_takes_little_memory() -> None:
    """As a zip bomb 1 MB took 2 GB: tfmulti writes no compressed parts, and reads none."""
    data = file_format.to_bytes(Record(1, {"x": np.zeros(1000)}))
    assert file_format.from_bytes(repacked(data, zipfile.ZIP_STORED)).step == 1
    with pytest.raises(DamagedCheckpointError, match="compressed, or larger than the file"):
        file_format.from_bytes(repacked(data, zipfile.ZIP_DEFLATED))


def test_an_array_stands_in_a_checkpoint_once() -> None:
    """Written again for other workers, each mention of it would be a copy."""
    head, arrays = parts_of(file_format.to_bytes(Record(1, {"x": np.zeros(1000)})))
    head["tree"] = {"dict": {"x": {"array": 0}, "y": {"array": 0}}}
    with pytest.raises(DamagedCheckpointError, match="was already used"):
        file_format.from_bytes(sealed(head, arrays))


def test_parts_of_a_checkpoint_are_not_more_than_the_file() -> None:
    """Entries of a zip file may lie over each other."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr("record.json", b"x" * 10_000)
        for number in range(9):
            archive.filelist.append(archive.filelist[0])
            archive.NameToInfo[str(number)] = archive.filelist[0]
    with pytest.raises(DamagedCheckpointError, match="larger than the file"):
        file_format.from_bytes(out.getvalue())


def test_an_array_of_a_checkpoint_is_no_larger_than_its_part() -> None:
    with pytest.raises(ValueError, match=r"declares [0-9,]+ bytes of values, but has 3"):
        file_format.serialization.from_npy("", npy((1 << 43,), b"few"))
    with pytest.raises(ValueError, match=r"declares [0-9,]+ bytes of values, but has 3"):
        file_format.serialization.from_npy("", npy((1 << 40, 1 << 40), b"few"))


def test_a_named_pipe_is_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "step-000000009.npz")
    (tmp_path / "step-000000008.npz").symlink_to("/dev/zero")
    checkpoints = Checkpoints(tmp_path, keep=2)
    assert checkpoints.newest() == (None, [])
    checkpoints.write(Record(1, {}))
    assert [path.stem for path in checkpoints.files()] == ["step-000000001"]


class Failing(ArraySource):
    """Counts the reads. From some example on, each read fails."""

    def __init__(self, rows: int, error: Exception, first: int = 0) -> None:
        super().__init__((np.arange(rows, dtype=np.float32)[:, None],))
        self.error, self.first, self.tried = error, first, 0

    def read(self, indices: np.ndarray, epoch: int = 0) -> Any:
        self.tried += 1
        if (indices >= self.first).any():
            raise self.error
        return super().read(indices, epoch)

    def read_into(self, indices: np.ndarray, epoch: int, out: Any) -> None:
        out[0][...] = self.read(indices, epoch)[0]


def first_batch(source: Any, reading: ReadOptions, workers: int = 1) -> Any:
    reader = Loader(source, BatchPlan(len(source), 100), Placement(0, workers, 1), reading)
    return next(reader.batches())


GONE = OSError(errno.ESTALE, "Stale file handle")


@pytest.mark.parametrize("skip", [0, 10_000])
def test_a_storage_that_is_gone_ends_the_reading_at_once(skip: int) -> None:
    """Else each of the examples would be tried, and each failure may take minutes."""
    source = Failing(10_000, GONE)
    with pytest.raises(
        DataError, match=r"Stale file handle\. The storage failed, not a single record"
    ):
        first_batch(source, ReadOptions(0, skip))
    assert source.tried == 2


@pytest.mark.parametrize(("error", "tried"), [(GONE, 2), (TypeError("no"), 1)])
def test_a_worker_among_others_stops_at_the_first_fault_too(error: Exception, tried: int) -> None:
    """It reports the fault to the others, which takes a step, so the reading is not ended."""
    source = Failing(10_000, error)
    loader = Loader(source, BatchPlan(10_000, 100), Placement(0, 2, 1), ReadOptions(0, 0))
    batches = loader.batches()
    for _ in range(2):
        batch = next(batches)
        [fault] = batch.lost
        assert "The storage failed" in fault or "which no record causes" in fault
        assert not batch.data[0][0].any()
    assert source.tried == tried


def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name tells whether the storage has failed, or a sector of the disk."""
    (tmp_path / "x").write_bytes(b"data")
    file = open_files.open_file(str(tmp_path / "x"))

    def pread(*_: int) -> bytes:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "pread", pread)
    with pytest.raises(OSError, match="Input/output error") as error:
        file.read_at(0, 4)
    assert error.value.filename == str(tmp_path / "x")


@pytest.mark.parametrize("kind", [tf.errors.UnavailableError, tf.errors.DeadlineExceededError])
def test_a_remote_storage_that_does_not_answer_is_of_the_storage(kind: Any) -> None:
    with pytest.raises(OSError, match="no answer") as error, files.as_os_error():
        raise kind(None, None, "no answer")
    assert is_of_storage(error.value)


def test_a_folder_that_is_gone_is_of_the_storage_and_a_file_is_not(tmp_path: Path) -> None:
    for path, gone in ((tmp_path / "no" / "x", True), (tmp_path / "x", False)):
        with pytest.raises(OSError, match="No such file") as error:
            path.open("rb")
        assert is_of_storage(OSError(error.value.errno, "", str(path))) is gone
    assert not is_of_storage(OSError(errno.EIO, "Input/output error"))
    assert not is_of_storage(DataError("damaged"))


def test_a_disk_that_cannot_be_read_is_of_the_storage_and_a_bad_sector_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = OSError(errno.EIO, "Input/output error", str(tmp_path / "x.png"))
    assert not is_of_storage(error)

    def scandir(path: str) -> None:
        raise OSError(errno.EIO, "Input/output error", path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert is_of_storage(error)


@pytest.mark.parametrize("error", [TypeError, NameError, ValueError])
@pytest.mark.parametrize("skip", [0, 10_000])
def test_a_fault_of_the_sources_code_is_no_bad_record(error: type[Exception], skip: int) -> None:
    source = Failing(100, error("no"), 50)
    with pytest.raises(error) as found:
        first_batch(source, ReadOptions(0, skip))
    assert source.tried == 1
    [note] = found.value.__notes__
    assert f"Failing.read() raised {error.__name__}, which no record causes" in note


def test_other_workers_hear_of_a_fault_of_the_sources_code() -> None:
    batch = first_batch(Failing(100, TypeError("no")), ReadOptions(0), workers=2)
    assert "Failing.read() raised TypeError" in batch.lost[0]


def test_no_more_examples_are_tried_than_may_be_lost() -> None:
    source = Failing(10_000, OSError(errno.EIO, "Input/output error"))
    with pytest.raises(DataError, match="none of the first 8 examples can be read"):
        first_batch(source, ReadOptions(0, 7))
    assert source.tried == 1 + 100 + 8


def test_a_run_of_an_older_version_goes_on() -> None:
    """It has no value of a flag that came later, and so has that flag's default."""
    config = FitConfig(dataset="digits")
    saved = {name: value for name, value in vars(config).items() if name != "sync_batch_norm"}
    check_same_run(saved, config, "r")
    with pytest.raises(ResumeError, match="a run with sync_batch_norm=True, and this one has"):
        check_same_run(saved, FitConfig(dataset="digits", sync_batch_norm=False), "r")
    with pytest.raises(RunDirError, match=r"another program's config\.json"):
        check_same_run({"lr": 3}, config, "r")

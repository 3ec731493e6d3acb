"""Tests the index of TFRecord files: each record at its number, and damaged files."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.support.records import framed, write_records
from tests.support.sources import WorkerReplicas
from tfmulti.config.reading import ReadOptions
from tfmulti.data.batch_plan import BatchPlan
from tfmulti.data.formats import record_index
from tfmulti.data.formats.encoded import Decoder, EncodedSource
from tfmulti.data.formats.record_index import index_of, index_paths
from tfmulti.data.formats.records import Records
from tfmulti.data.io.open_files import LocalFile, opener, write_atomically
from tfmulti.data.loader import Batch, Loader
from tfmulti.data.source import Leaf
from tfmulti.errors import DataError

RECORDS = [bytes([i]) * length for i, length in enumerate([0, 5, 1, 4096, 70000, 3, 12, 4081])]
INDEX = ".a.tfrecord.tfmulti-index.npy"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFMULTI_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_records(tmp_path / "a.tfrecord", RECORDS)


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that were walked through."""
    paths: list[str] = []
    walk = record_index._walk

    def counted(path: str, *rest: object) -> np.ndarray:
        paths.append(path)
        return walk(path, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(record_index, "_walk", counted)
    return paths


def test_the_checksum_is_that_of_tensorflow() -> None:
    # What tf.io.TFRecordWriter makes of the one record b"abc".
    assert framed(b"abc").hex() == "0300000000000000" + "b099490e" + "616263" + "6e57f121"


def test_an_index_is_made_once(file: Path, walks: list[str]) -> None:
    first = index_of(str(file))
    assert first[:, 1].tolist() == [len(record) for record in RECORDS]
    content = file.read_bytes()
    assert [content[at : at + n] for at, n in first.tolist()] == RECORDS
    assert np.array_equal(index_of(str(file)), first)
    assert walks == [str(file)]
    assert sorted(p.name for p in file.parent.iterdir()) == [INDEX, "a.tfrecord"]


@pytest.mark.parametrize("change", ["records", "time"])
def test_an_index_is_made_anew_when_the_file_changed(
    file: Path, walks: list[str], change: str
) -> None:
    index_of(str(file))
    if change == "records":
        before = file.stat()
        write_records(file, RECORDS[:3])
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert len(index_of(str(file))) == 3
    else:
        os.utime(file, ns=(1, 1))
        assert len(index_of(str(file))) == len(RECORDS)
    assert len(walks) == 2
    index_of(str(file))
    assert len(walks) == 2


@pytest.mark.parametrize(
    "damage", ["flipped", "cut", "empty", "text", "other", "object", "version"]
)
def test_a_damaged_index_is_made_anew(file: Path, walks: list[str], damage: str) -> None:
    first = index_of(str(file))
    index = file.parent / INDEX
    content = bytearray(index.read_bytes())
    content[-3] ^= 1
    if damage == "other":
        np.save(index, np.zeros((4, 3)))
    elif damage == "object":
        np.save(index, np.array([{}]), allow_pickle=True)
    elif damage == "version":
        table = np.load(index)
        table[2, 0] -= 1
        np.save(index, table)
    else:
        kinds = {"flipped": bytes(content), "cut": content[:-8], "empty": b"", "text": b"index"}
        index.write_bytes(kinds[damage])
    assert np.array_equal(index_of(str(file)), first)
    assert len(walks) == 2
    index_of(str(file))
    assert len(walks) == 2


def test_an_index_goes_to_the_cache_if_the_folder_cannot_be_written(
    file: Path, walks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: str, data: bytes) -> None:
        if Path(path).parent == file.parent:
            raise PermissionError(13, "Permission denied")
        write_atomically(path, data)

    monkeypatch.setattr(record_index, "write_atomically", write)
    index_of(str(file))
    index_of(str(file))
    assert len(walks) == 1
    (stored,) = (file.parent / "cache").iterdir()
    assert str(stored) == index_paths(str(file))[1]


def test_an_index_that_cannot_be_stored_is_made_each_time(
    file: Path, walks: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: str, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(record_index, "write_atomically", write)
    assert np.array_equal(index_of(str(file)), index_of(str(file)))
    assert len(walks) == 2


def test_the_index_is_in_the_home_folder_by_default() -> None:
    assert index_paths("/d/a", {})[1].startswith(str(Path.home() / ".cache" / "tfmulti"))
    assert index_paths("/d/a", {"TFMULTI_CACHE": "/c"})[1].startswith("/c/")
    assert index_paths("/d/a", {})[1] != index_paths("/e/a", {})[1]


def test_several_workers_make_an_index_at_once(file: Path) -> None:
    start = threading.Barrier(8)

    def work(_: int) -> int:
        start.wait()
        return len(index_of(str(file)))

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(work, range(8))) == {len(RECORDS)}
    assert sorted(p.name for p in file.parent.iterdir()) == [INDEX, "a.tfrecord"]


def flip(at: int) -> Callable[[bytes], bytes]:
    def damage(content: bytes) -> bytes:
        return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]

    return damage


SECOND = len(framed(RECORDS[0]))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip(SECOND), "a.tfrecord, record 1: the checksum of its length is wrong"),
        (flip(SECOND + 9), "record 1: the checksum of its length is wrong.*file is damaged"),
        (lambda content: content[:-1], "is cut off in record 7, after 7 whole ones"),
        (lambda content: content[: SECOND + 5], "is cut off in record 1, after 1 whole ones"),
        (flip(0), "is no TFRecord file, or its first record is damaged"),
        (lambda content: b"label,image\n1,cat.jpg\n", "is no TFRecord file"),
        (lambda content: b"short", "is no TFRecord file"),
        (lambda content: bytes(10**5), "is no TFRecord file"),
        (lambda content: framed(b"x" * 50)[:11], "is no TFRecord file"),
    ],
)
def test_files_that_cannot_be_indexed(
    file: Path, damage: Callable[[bytes], bytes], message: str
) -> None:
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(DataError, match=message):
        Records([str(file)])
    assert not (file.parent / INDEX).exists()


def test_damaged_records_are_left_out_on_any_number_of_workers(file: Path) -> None:
    source = numbers(Records([str(file)]))
    for record in (2, 5, 7):
        offset = int(index_of(str(file))[record, 0])
        file.write_bytes(flip(offset)(file.read_bytes()))
    plan = BatchPlan(8, 8, seed=3)
    with pytest.raises(DataError, match=r"a.tfrecord, record [257]: .* Repair or remove it, or"):
        next(Loader(source, plan, WorkerReplicas(), ReadOptions()).batches())
    (alone,) = read(source, plan, WorkerReplicas())
    workers = read(source, plan, *(WorkerReplicas(rank, 3) for rank in range(3)))
    rows = [n for batch in workers for n in batch.data[0][0][: batch.own_rows[0]].tolist()]
    assert rows == alone.data[0][0].tolist()
    assert sorted(rows) == sorted(len(RECORDS[i]) for i in (0, 1, 3, 4, 6))
    lost = sorted(sentence for batch in workers for sentence in batch.lost)
    assert lost == sorted(alone.lost)
    assert [sentence.partition(": ")[0][-8:] for sentence in lost] == [
        f"record {i}" for i in (2, 5, 7)
    ]


def read(source: EncodedSource, plan: BatchPlan, *workers: WorkerReplicas) -> list[Batch]:
    """Returns the first batch of each worker."""
    return [next(Loader(source, plan, worker, ReadOptions(0, 9)).batches()) for worker in workers]


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a: No such file or directory. Give a readable file."):
        index_of(str(tmp_path / "a"))


def uneven(tmp_path: Path) -> Records:
    """Six files of 0, 3, 0, 1, 200 and 0 records, numbered over all of them."""
    paths, first = [], 0
    for i, count in enumerate([0, 3, 0, 1, 200, 0]):
        records = [b"%d" % n for n in range(first, first + count)]
        paths.append(str(write_records(tmp_path / f"part-{i}", records)))
        first += count
    return Records(paths)


def test_records_are_counted_over_uneven_files(tmp_path: Path) -> None:
    records = uneven(tmp_path)
    assert len(records) == 204
    order = np.random.default_rng(0).permutation(204)
    assert records.read(order) == [b"%d" % n for n in order]
    places = [records.where(n).rpartition("/")[2] for n in (0, 2, 3, 4, 203)]
    assert places == [f"part-{p}" for p in ("1, record 0", "1, record 2", "3, record 0")] + [
        f"part-{p}" for p in ("4, record 0", "4, record 199")
    ]


def test_files_without_records(tmp_path: Path) -> None:
    paths = [str(write_records(tmp_path / name, [])) for name in "ab"]
    with pytest.raises(DataError, match="no records in all 2 files"):
        Records(paths)
    with pytest.raises(DataError, match=r"no records in .*/a\. Give"):
        Records(paths[:1])


def numbers(records: Records) -> EncodedSource:
    """A source of which an example is the length of its record."""

    def parse(contents: object, out: dict[str, np.ndarray]) -> None:
        out["n"][:] = [len(data) for data in contents]  # type: ignore[attr-defined]

    return EncodedSource(records, Decoder(("n", "n"), {"n": Leaf((), "int64")}, parse))  # type: ignore[arg-type]


@pytest.mark.parametrize("at", [20, -2])
def test_a_flipped_bit_is_named_with_file_and_record(file: Path, at: int) -> None:
    records = Records([str(file)])
    content = bytearray(file.read_bytes())
    content[int(index_of(str(file))[3, 0]) + (at if at > 0 else 4096 - at)] ^= 1
    file.write_bytes(content)
    source = numbers(records)
    with pytest.raises(
        DataError, match=r"a.tfrecord, record 3: the checksum is wrong \(the file is damaged\)\."
    ):
        next(Loader(source, BatchPlan(8, 8), WorkerReplicas(), ReadOptions()).batches())
    batch = next(Loader(source, BatchPlan(8, 8), WorkerReplicas(), ReadOptions(0, 9)).batches())
    assert batch.own_rows == (7,)
    assert batch.data[0][0].tolist() == [len(r) for i, r in enumerate(RECORDS) if i != 3]


def test_a_file_that_became_shorter(file: Path) -> None:
    records = Records([str(file)])
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match="has become shorter"):
        records.read(np.array([7]))


def test_one_feature_may_be_input_and_target(file: Path) -> None:
    x, y = numbers(Records([str(file)])).read(np.array([3, 1]))
    assert (x.tolist(), y.tolist()) == ([4096, 5], [4096, 5])


def test_few_files_are_open_at_a_time_and_all_are_closed(tmp_path: Path) -> None:
    paths = [str(write_records(tmp_path / f"{i}", [b"%d" % i])) for i in range(20)]
    opened = opener(most=3)
    held = opened(paths[0])
    for path in paths:
        opened(path)
    # These are three files, and the one that `held` refers to.
    assert open_below(tmp_path) == 4
    assert held.read_at(12, 1) == b"0"
    assert opened(paths[19]) is opened(paths[19])
    del held, opened
    gc.collect()
    assert open_below(tmp_path) == 0


def open_below(folder: Path) -> int:
    """Returns how many of this process' open files are in a folder."""
    count = 0
    for number in os.listdir("/proc/self/fd"):
        # Another thread may have closed the file.
        with contextlib.suppress(OSError):
            count += os.readlink(f"/proc/self/fd/{number}").startswith(f"{folder}/")
    return count


def test_threads_read_while_files_are_opened_and_closed(tmp_path: Path) -> None:
    records = uneven(tmp_path)
    records._open = opener(most=1)

    def work(seed: int) -> bool:
        order = np.random.default_rng(seed).permutation(204)
        return records.read(order) == [b"%d" % n for n in order]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(16)))


def test_a_read_past_the_end_is_shorter(file: Path) -> None:
    content = file.read_bytes()
    assert LocalFile(str(file)).read_at(len(content) - 3, 10) == content[-3:]
    assert LocalFile(str(file)).read_at(len(content) + 3, 10) == b""


def test_a_label_out_of_range(tmp_path: Path) -> None:
    def parse(contents: object, out: dict[str, np.ndarray]) -> None:
        out["n"][:] = 3

    records = Records([str(write_records(tmp_path / "a", [b"x"]))])
    leaf = {"n": Leaf((), "int64")}
    with pytest.raises(ValueError, match=r"'n' is 3, out of range 0\.\.2"):
        EncodedSource(records, Decoder(("n", "n"), leaf, parse, 3)).read(np.array([0]))  # type: ignore[arg-type]

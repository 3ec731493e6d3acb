"""GZIP files, whole and damaged, as files whose records are read at random."""

from __future__ import annotations

import gzip
import os
import random
from pathlib import Path

import numpy as np
import pytest

from tests.support.records import framed, write_features
from tfmulti.data.formats.records import Records
from tfmulti.data.io.files import stamp_of
from tfmulti.data.io.open_files import LocalFile
from tfmulti.data.io.unpacked import folder_of, pieces, unpack
from tfmulti.data.sources import tfrecord
from tfmulti.errors import DataError

RECORDS = [random.Random(i).randbytes(i % 7) + b"same text" * i for i in range(60)]
CONTENT = b"".join(map(framed, RECORDS))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFMULTI_CACHE", str(tmp_path / "cache"))


def unpacked(path: Path, content: bytes) -> bytes:
    path.write_bytes(content)
    return b"".join(pieces(LocalFile(str(path)), stamp_of(str(path))))


def readable(path: Path, content: bytes) -> tuple[list[bytes], list[str]]:
    """Returns the records of a GZIP file that can be read, and why the others cannot."""
    path.write_bytes(content)
    records = Records(unpack([str(path)]), keep_damage=True, packed=[str(path)])
    good, bad = [], []
    for number in range(len(records)):
        try:
            good += records.read(np.array([number]))
        except ValueError as error:
            bad.append(f"{records.where(number)}: {error}")
    return good, bad


@pytest.mark.parametrize(
    "packed",
    [
        gzip.compress(CONTENT),
        gzip.compress(CONTENT[:999]) + gzip.compress(b"") + gzip.compress(CONTENT[999:]),
        gzip.compress(CONTENT[:999]) + bytes(600) + gzip.compress(CONTENT[999:]) + bytes(100_000),
    ],
)
def test_a_whole_file(tmp_path: Path, packed: bytes) -> None:
    assert unpacked(tmp_path / "a", packed) == CONTENT


def test_a_large_file_and_an_empty_one(tmp_path: Path) -> None:
    content = random.Random(0).randbytes(300_000)
    assert unpacked(tmp_path / "a", gzip.compress(content)) == content
    assert unpacked(tmp_path / "a", b"") == b""
    assert unpacked(tmp_path / "a", gzip.compress(b"")) == b""


def test_a_file_that_is_cut_off_anywhere(tmp_path: Path) -> None:
    packed, before = gzip.compress(CONTENT), 0
    for length in range(1, len(packed), 7):
        found = unpacked(tmp_path / "a", packed[:length])
        assert found[-1:] == b"\0"
        assert CONTENT.startswith(found[:-1])
        assert len(found) >= before
        before = len(found)
    assert before == len(CONTENT) + 1


def test_a_wrong_checksum_of_the_whole_is_no_damage(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(CONTENT))
    for place in range(1, 9):
        wrong = bytearray(packed)
        wrong[-place] ^= 1
        assert unpacked(tmp_path / "a", bytes(wrong)) == CONTENT
        assert unpacked(tmp_path / "a", bytes(wrong + packed)) == CONTENT + b"\0"


def test_what_is_read_of_damaged_files_is_right(tmp_path: Path) -> None:
    """Wherever a byte is wrong: each record is one of the file, in order, or a bad one is told."""
    packed, chance, lost, nothing = gzip.compress(CONTENT), random.Random(5), 0, 0
    for i in range(80):
        wrong = bytearray(packed)
        wrong[chance.randrange(60, len(wrong) - 8)] ^= 1 << chance.randrange(8)
        try:
            good, bad = readable(tmp_path / f"{i}.gz", bytes(wrong))
        except DataError:  # the code of all that follows is damaged
            nothing += 1
            continue
        following = iter(RECORDS)
        assert all(record in following for record in good)
        assert len(good) == len(RECORDS) or bad
        lost += len(good) < len(RECORDS)
    assert lost > 40 > 10 > nothing


def test_a_file_that_is_cut_off_loses_its_rest_as_one_record(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    ends = np.cumsum([len(framed(record)) for record in RECORDS])
    packed = gzip.compress(CONTENT[: ends[9]]) + gzip.compress(CONTENT[ends[9] :])
    first = len(gzip.compress(CONTENT[: ends[9]]))
    for length in (first, first + 30):
        good, bad = readable(path, packed[:length] if length > first else packed[:-60])
        assert good == RECORDS[: len(good)]
        assert len(good) >= 10
        (words,) = bad
        assert words.startswith(f"{path}, record {len(good)}: the GZIP file is cut off or damaged")
    wrong = bytearray(packed)
    wrong[first + 1] ^= 1  # no GZIP data follows
    good, (words,) = readable(path, bytes(wrong))
    assert good == RECORDS[:10]
    assert words.startswith(f"{path}, record 10: the GZIP file is cut off or damaged in it; what")


def test_a_record_whose_checksum_is_wrong_is_one_bad_record(tmp_path: Path) -> None:
    write_features(tmp_path)
    content = bytearray(CONTENT)
    content[len(framed(RECORDS[0])) + 13] ^= 1  # in the data of record 1
    (tmp_path / "a.gz").write_bytes(gzip.compress(content))
    (tmp_path / "test.gz").write_bytes(gzip.compress(framed(b"x")))
    data = tfrecord.load(f"{tmp_path},test=test.gz", 0, skip_bad_records=1)
    assert (len(data.train), len(data.test)) == (len(RECORDS), 1)
    assert data.warning == (
        f"GZIP files are unpacked to {folder_of()}, to be read without what is damaged."
    )
    assert data.train.where(1) == f"{tmp_path}/a.gz, record 1"
    with pytest.raises(ValueError, match="the checksum is wrong"):
        data.train.read(np.array([1]))


def test_files_are_unpacked_once(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(CONTENT))
    (first,) = unpack([str(path)])
    stamp = stamp_of(first)
    assert Path(first).read_bytes() == CONTENT
    assert Path(first).name.endswith("-a")
    assert unpack([str(path)] * 3) == [first] * 3
    assert stamp_of(first) == stamp
    path.write_bytes(gzip.compress(CONTENT[:100]))
    (other,) = unpack([str(path)])
    assert Path(other).read_bytes() == CONTENT[:100]
    os.utime(path, ns=(1, 1))
    assert unpack([str(path)]) not in ([first], [other])
    names = {name for name in os.listdir(folder_of()) if not name.endswith(".lock")}
    assert len(names) == 3


def test_what_is_no_file_of_records_is_named(tmp_path: Path) -> None:
    for content in (gzip.compress(b"some text of many words"), gzip.compress(CONTENT)[:12]):
        (tmp_path / "a.gz").write_bytes(content)
        with pytest.raises(DataError, match=rf"^{tmp_path}/a.gz is no TFRecord file, or its first"):
            readable(tmp_path / "a.gz", content)
    with pytest.raises(DataError, match=r"none.gz: No such file or directory. Give a readable"):
        unpack(["none.gz"])
    with pytest.raises(DataError, match=rf"^there are no records in {tmp_path}/a.gz"):
        readable(tmp_path / "a.gz", gzip.compress(b""))


def test_nowhere_to_unpack_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "a.gz").write_bytes(gzip.compress(CONTENT))
    monkeypatch.setenv("TFMULTI_CACHE", str(tmp_path / "file"))
    words = "a.gz cannot be unpacked to .*file/unpacked: Not a directory. Set TFMULTI_CACHE to a"
    with pytest.raises(DataError, match=words):
        unpack([str(tmp_path / "a.gz")])

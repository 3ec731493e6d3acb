"""Tests the reading of small files with a limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tfmulti.config.limited_reading import read_small


def test_a_high_limit_takes_no_memory_by_itself(tmp_path: Path) -> None:
    """`file.read(n)` takes n bytes before it reads, which fails for a limit like this one."""
    path = tmp_path / "small"
    path.write_bytes(b"x" * 3_000_000)
    assert read_small(path, 1 << 60) == b"x" * 3_000_000


@pytest.mark.parametrize("size", [11, 1 << 40])
def test_a_file_above_the_limit_is_not_read(tmp_path: Path, size: int) -> None:
    path = tmp_path / "sparse"
    with open(path, "wb") as file:
        file.truncate(size)
    with pytest.raises(OSError, match="it has more than 10 bytes"):
        read_small(path, 10)


def test_a_pipe_is_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="it is not a regular file"):
        read_small(tmp_path / "pipe", 10)

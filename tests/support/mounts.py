"""Mounts a small file system at a folder, as a disk that is soon full."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")


@contextlib.contextmanager
def mounted(folder: Path, size: str) -> Iterator[None]:
    """Mounts a file system of the given size at a folder."""
    options = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    subprocess.run(["mount", *options], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)

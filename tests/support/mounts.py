"""Mounts file systems: a small disk that is soon full, and a folder as two machines see it."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import networks

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


def why_not_over_network() -> str | None:
    """Returns why no folder can be mounted over a network here, or None."""
    if shutil.which("sshfs") is None:
        return "sshfs is not installed (apt-get install sshfs)"
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse is not there"
    return networks.why_not()


@contextlib.contextmanager
def seen_by_two_machines(folder: Path) -> Iterator[tuple[Path, Path]]:
    """Mounts a new folder at two places, and yields these.

    As with NFS on two machines, each mount has its own caches and does not see the other's locks.
    """
    server = folder / "server"
    places = (folder / "mount_1", folder / "mount_2")
    for path in (server, folder / "network", *places):
        path.mkdir(parents=True)
    with networks.hosts(1, folder / "network") as hosts, contextlib.ExitStack() as mounts:
        for place in places:
            options = ["-f", "-F", str(hosts.ssh_config)]
            argv = ["sshfs", *options, f"{hosts.address(1)}:{server}", str(place)]
            client = subprocess.Popen(argv)
            mounts.callback(_unmount, client, place)
            until = time.monotonic() + 30
            while not place.is_mount():
                assert client.poll() is None, "sshfs has ended"
                assert time.monotonic() < until, "sshfs does not mount"
                time.sleep(0.05)
        yield places


def _unmount(client: subprocess.Popen[bytes], place: Path) -> None:
    """Unmounts a folder, and waits for the client that has served it."""
    subprocess.run(["umount", "--lazy", str(place)], check=False)
    client.terminate()
    client.wait()

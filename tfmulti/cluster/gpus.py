"""Tells which GPUs a program would see, without asking CUDA or TensorFlow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path


def visible_gpus(env: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Returns the names by which CUDA_VISIBLE_DEVICES may list this machine's GPUs.

    If the variable is set, the result holds the names that it lists, at most as many as the machine
    has GPUs. If it is not set, the result holds the numbers of all GPUs.

    Args:
        env: the environment of the program.
        devices: the folder with the device files `nvidia0`, `nvidia1` and so on.
    """
    found = (re.fullmatch(r"nvidia(\d+)", entry.name) for entry in devices.iterdir())
    present = sorted(int(match[1]) for match in found if match)
    listed = env.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return tuple(map(str, present))
    chosen = [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1")]
    return tuple(chosen[: len(present)])

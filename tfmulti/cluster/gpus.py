"""Finds the GPUs that a program would see, without CUDA or TensorFlow."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from tfmulti.errors import DeviceError

Gpu = TypeVar("Gpu")


def visible_gpus(env: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Returns the names by which CUDA_VISIBLE_DEVICES may list this machine's GPUs.

    If the variable is set, the result holds the names that it lists, at most as many as the machine
    has GPUs. If it is not set, the result holds the numbers of all GPUs.

    Args:
        env: the environment of the program.
        devices: the folder with the device files `nvidia0`, `nvidia1` and so on.
    """
    matches = (re.fullmatch(r"nvidia(\d+)", entry.name) for entry in devices.iterdir())
    present = sorted(int(match[1]) for match in matches if match)
    listed = env.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return tuple(map(str, present))
    chosen = [name.strip() for name in listed.split(",") if name.strip() not in ("", "-1")]
    return tuple(chosen[: len(present)])


def gpus_of_task(env: Mapping[str, str], local_rank: int, local_size: int) -> tuple[str, ...]:
    """Returns the names of the GPUs of one of several processes of this machine.

    Args:
        env: the environment of the process.
        local_rank: the rank of the process among those of this machine.
        local_size: the number of processes on this machine.

    Raises:
        DeviceError: the GPUs cannot be divided evenly.
    """
    return tuple(own_part(visible_gpus(env), local_rank, local_size))


def own_part(visible: Sequence[Gpu], local_rank: int, local_size: int) -> Sequence[Gpu]:
    """Returns the GPUs of one of several processes that a scheduler has started on this machine.

    A scheduler shows each process its own GPU, or shows all processes the GPUs of all of them. So
    one visible GPU is this process' own, and several are divided by the local rank.

    Args:
        visible: the GPUs that the process sees.
        local_rank: the rank of the process among those of this machine.
        local_size: the number of processes on this machine.

    Raises:
        DeviceError: the GPUs cannot be divided evenly.

    >>> own_part("abcd", 1, 2)
    'cd'
    """
    if local_size == 1 or len(visible) <= 1:
        return visible
    per_process, rest = divmod(len(visible), local_size)
    if rest:
        raise DeviceError(
            f"{local_size} processes of this machine see {len(visible)} GPUs, which cannot be "
            "divided evenly. Start as many processes on each machine as it has GPUs."
        )
    return visible[local_rank * per_process : (local_rank + 1) * per_process]

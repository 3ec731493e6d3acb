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


def is_listed(index: int, uuid: str, env: Mapping[str, str]) -> bool:
    """Returns whether CUDA_VISIBLE_DEVICES lets a program use a GPU.

    The variable names GPUs by their numbers or by the beginnings of their UUIDs. CUDA and NVML
    number GPUs of one model alike (CUDA C++ Programming Guide, "CUDA Environment Variables").

    Args:
        index: the number of the GPU.
        uuid: its UUID, such as `GPU-8a7c…`.
        env: the environment of the program.

    >>> is_listed(1, "GPU-8a7c", {"CUDA_VISIBLE_DEVICES": "GPU-8a,3"})
    True
    """
    if "CUDA_VISIBLE_DEVICES" not in env:
        return True
    names = [name.strip() for name in env["CUDA_VISIBLE_DEVICES"].split(",") if name.strip()]
    # A MIG device has another UUID than its GPU.
    return any(
        name == str(index) or uuid.startswith(name) or name.startswith("MIG-") for name in names
    )


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

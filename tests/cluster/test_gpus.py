"""Tests which GPUs a process takes, by files like those of the driver."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from tfmulti.cluster import gpus
from tfmulti.cluster.gpus import gpus_of_task, own_part, visible_gpus
from tfmulti.errors import DeviceError


def machine(folder: Path, count: int) -> Path:
    for name in [*(f"nvidia{number}" for number in range(count)), "nvidiactl", "nvidia-uvm"]:
        (folder / name).touch()
    return folder


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, ("0", "1", "2", "3")),
        ({"CUDA_VISIBLE_DEVICES": "2,3"}, ("2", "3")),
        ({"CUDA_VISIBLE_DEVICES": " GPU-ab , MIG-c"}, ("GPU-ab", "MIG-c")),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5"}, ("0", "1", "2", "3")),
        # Numbers of the whole node, which need not be those that the task sees.
        ({"SLURM_STEP_GPUS": "6,7", "SLURM_JOB_GPUS": "4,5,6,7"}, ("0", "1", "2", "3")),
        ({"SLURM_STEP_GPUS": "6,7", "CUDA_VISIBLE_DEVICES": "0,1"}, ("0", "1")),
    ],
)
def test_gpus_that_a_program_sees(
    tmp_path: Path, env: dict[str, str], expected: tuple[str, ...]
) -> None:
    before = dict(env)
    assert visible_gpus(env, machine(tmp_path, 4)) == expected
    assert env == before


@pytest.fixture
def four_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes this machine look as if it had four GPUs."""
    folder = machine(tmp_path, 4)
    monkeypatch.setattr(gpus, "visible_gpus", lambda env: visible_gpus(env, folder))


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("env", "size", "expected"),
    [
        ({}, 1, ["0123"]),
        ({}, 2, ["01", "23"]),
        ({}, 4, ["0", "1", "2", "3"]),
        ({"SLURM_STEP_GPUS": "4,5,6,7"}, 2, ["01", "23"]),
        ({"CUDA_VISIBLE_DEVICES": "1,3"}, 2, ["1", "3"]),
        # The scheduler has given each process its own.
        ({"CUDA_VISIBLE_DEVICES": "2"}, 4, ["2", "2", "2", "2"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, 3, ["", "", ""]),
    ],
)
def test_gpus_of_the_processes_of_a_machine(
    env: Mapping[str, str], size: int, expected: list[str]
) -> None:
    assert ["".join(gpus_of_task(env, rank, size)) for rank in range(size)] == expected


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(("size", "seen"), [(3, 4), (8, 4)])
def test_gpus_that_cannot_be_divided(size: int, seen: int) -> None:
    words = f"{size} processes of this machine see {seen} GPUs, which cannot be divided evenly"
    with pytest.raises(DeviceError, match=words):
        gpus_of_task({}, 0, size)


def test_parts_keep_their_order() -> None:
    assert [own_part("abcdef", rank, 3) for rank in range(3)] == ["ab", "cd", "ef"]

"""Tests of the findings about GPUs, with answers in the form of NVIDIA's library.

No machine of the tests has a GPU, so the library's functions are replaced one by one.
"""

from __future__ import annotations

import os
import time
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from tfmulti.doctor import gpus
from tfmulti.doctor.finding import FAILED, OK, WARNING

UNSUPPORTED = pynvml.NVML_ERROR_NOT_SUPPORTED


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The answers of a machine with two healthy GPUs by function, which a test may change."""
    answers: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlShutdown": None,
        "nvmlDeviceGetCount": 2,
        "nvmlSystemGetDriverVersion": "570.1",
        "nvmlSystemGetCudaDriverVersion": 12080,
        "nvmlDeviceGetName": b"NVIDIA H200",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=150 << 30, used=0),
        "nvmlDeviceGetMigMode": (0, 0),
        "nvmlDeviceGetTotalEccErrors": 0,
        "nvmlDeviceGetComputeRunningProcesses": [SimpleNamespace(pid=os.getpid(), usedGpuMemory=1)],
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0,
        "nvmlDeviceGetTopologyCommonAncestor": pynvml.NVML_TOPOLOGY_NODE,
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=80, memory=10),
    }

    def answering(name: str) -> Any:
        def function(*arguments: object) -> Any:
            if isinstance(answers[name], Exception):
                raise answers[name]
            return answers[name]

        assert hasattr(pynvml, name)
        return function

    for name in answers:
        monkeypatch.setattr(pynvml, name, answering(name))
    monkeypatch.setattr(pynvml, "nvmlDeviceGetHandleByIndex", lambda index: index)
    uuids = ("GPU-aaaa", b"GPU-bbbb")
    monkeypatch.setattr(pynvml, "nvmlDeviceGetUUID", lambda index: uuids[index])
    return answers


def test_healthy_gpus_are_listed(library: dict[str, Any]) -> None:
    found = gpus.check_gpus(True, {})
    assert {each.status for each in found} == {OK}
    assert [each.measured for each in found] == ["NVIDIA H200, 150.0 GiB"] * 2 + [
        "0–1 one NUMA node"
    ]
    assert gpus.driver() == ("570.1", 12080)


@pytest.mark.parametrize(
    ("function", "answer", "status", "measured"),
    [
        ("nvmlDeviceGetTotalEccErrors", 3, FAILED, "3 uncorrected memory errors"),
        (
            "nvmlDeviceGetComputeRunningProcesses",
            [SimpleNamespace(pid=1, usedGpuMemory=2 << 30)],
            WARNING,
            "other processes use it: ",
        ),
        (
            "nvmlDeviceGetCurrentClocksThrottleReasons",
            pynvml.nvmlClocksEventReasonSwThermalSlowdown | pynvml.nvmlClocksEventReasonGpuIdle,
            WARNING,
            "its clock is lowered by heat",
        ),
    ],
)
def test_a_fault_of_a_gpu_is_named(
    library: dict[str, Any], function: str, answer: Any, status: str, measured: str
) -> None:
    library[function] = answer
    found = [each for each in gpus.check_gpus(True, {}) if each.status != OK]
    assert [each.check for each in found] == ["GPU 0", "GPU 1"]
    assert {each.status for each in found} == {status}
    assert all(each.measured.startswith(measured) for each in found)


def test_a_gpu_that_does_not_answer_every_question_is_fine(library: dict[str, Any]) -> None:
    for name in (
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlDeviceGetCurrentClocksThrottleReasons",
        "nvmlDeviceGetTopologyCommonAncestor",
        "nvmlDeviceGetUtilizationRates",
    ):
        library[name] = pynvml.NVMLError(UNSUPPORTED)
    assert {each.status for each in gpus.check_gpus(True, {})} == {OK}
    with gpus.Utilization({}) as used:
        time.sleep(0.3)
    assert not used.mean


def test_utilization_is_sampled(library: dict[str, Any]) -> None:
    with gpus.Utilization({}) as used:
        time.sleep(0.5)
    assert used.mean == {0: 80, 1: 80}


def test_a_clock_that_is_lowered_under_load_is_seen(library: dict[str, Any]) -> None:
    library["nvmlDeviceGetCurrentClocksThrottleReasons"] = (
        pynvml.nvmlClocksEventReasonSwThermalSlowdown
    )
    with gpus.Utilization({}) as used:
        time.sleep(0.3)
        library["nvmlDeviceGetCurrentClocksThrottleReasons"] = 0
    assert used.slowed == {0: ["heat"], 1: ["heat"]}
    assert gpus.slowed_finding("GPU 0", used.slowed[0]).measured == "its clock is lowered by heat"


@pytest.mark.parametrize("listed", ["1", "GPU-b", " GPU-bbbb "])
def test_a_gpu_that_is_left_out_is_not_judged(library: dict[str, Any], listed: str) -> None:
    library["nvmlDeviceGetTotalEccErrors"] = 3
    env = {"CUDA_VISIBLE_DEVICES": listed}
    found = gpus.check_gpus(True, env)
    assert [each.check for each in found if each.status != OK] == ["GPU 1"]
    assert found[0].measured == "NVIDIA H200, 150.0 GiB; left out by CUDA_VISIBLE_DEVICES"
    with gpus.Utilization(env) as used:
        time.sleep(0.3)
    assert set(used.mean) == {1}
    assert gpus.chosen_models(env) == ["NVIDIA H200"]
    # A MIG device may belong to any of them.
    assert len(gpus.chosen_models({"CUDA_VISIBLE_DEVICES": "MIG-c"})) == 2


def test_device_files_without_a_driver_are_a_fault(library: dict[str, Any]) -> None:
    library["nvmlInit"] = pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)
    assert [each.status for each in gpus.check_gpus(True, {})] == [FAILED]
    assert [each.status for each in gpus.check_gpus(False, {})] == [OK]
    assert gpus.driver() is None

"""Looks at the GPUs of this machine through NVIDIA's management library, without TensorFlow.

Source: NVML API reference, https://docs.nvidia.com/deploy/nvml-api/.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import statistics
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import psutil
import pynvml

from tfmulti.cluster.gpus import is_listed
from tfmulti.doctor.finding import FAILED, OK, WARNING, Finding

# The reasons for which a GPU lowers its clock that cost speed, with the words for them.
_SLOWED = {
    "nvmlClocksEventReasonSwPowerCap": "the power limit",
    "nvmlClocksThrottleReasonHwSlowdown": "the hardware's slowdown",
    "nvmlClocksEventReasonSwThermalSlowdown": "heat",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "heat of the hardware",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "the power brake",
}
_LEVELS = {
    "NVML_TOPOLOGY_INTERNAL": "one board",
    "NVML_TOPOLOGY_SINGLE": "one PCIe switch",
    "NVML_TOPOLOGY_MULTIPLE": "several PCIe switches",
    "NVML_TOPOLOGY_HOSTBRIDGE": "a host bridge",
    "NVML_TOPOLOGY_NODE": "one NUMA node",
    "NVML_TOPOLOGY_SYSTEM": "the link between processors",
}
_SAMPLE_S = 0.2


@contextlib.contextmanager
def handles() -> Iterator[list[Any]]:
    """Gives NVML's handles of all GPUs of this machine; none if there is no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield []
        return
    try:
        count = pynvml.nvmlDeviceGetCount()
        yield [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count)]
    finally:
        pynvml.nvmlShutdown()


def _is_chosen(index: int, gpu: Any, env: Mapping[str, str]) -> bool:
    """Returns whether this process may use a GPU."""
    return is_listed(index, _text(_answer_or(lambda: pynvml.nvmlDeviceGetUUID(gpu), "")), env)


def chosen_models(env: Mapping[str, str]) -> list[str]:
    """Returns the models of the GPUs that this process may use; none if there is no driver."""
    with handles() as gpus:
        chosen = [gpu for index, gpu in enumerate(gpus) if _is_chosen(index, gpu, env)]
        return [_text(pynvml.nvmlDeviceGetName(gpu)) for gpu in chosen]


def driver() -> tuple[str, int] | None:
    """Returns the version of the driver and the newest CUDA that it supports; None without one.

    The version of CUDA is a number: 1000 × its major part + 10 × its minor part.
    """
    with handles() as gpus:
        if not gpus:
            return None
        return str(pynvml.nvmlSystemGetDriverVersion()), pynvml.nvmlSystemGetCudaDriverVersion()


def check_gpus(has_device_files: bool, env: Mapping[str, str]) -> list[Finding]:
    """Returns the findings about each GPU of this machine.

    Of a GPU that CUDA_VISIBLE_DEVICES leaves out, only the model is told.

    Args:
        has_device_files: whether the system has device files of NVIDIA's GPUs.
        env: the environment variables.
    """
    with handles() as gpus:
        if not gpus:
            if not has_device_files:
                return [Finding("GPUs", OK, "none; CPUs train")]
            return [
                Finding(
                    "GPUs",
                    FAILED,
                    "there are device files of GPUs, but NVIDIA's library does not answer",
                    "libnvidia-ml.so.1 of the driver must be found",
                    "Install the driver; in a container start it with --gpus all.",
                )
            ]
        findings: list[Finding] = []
        for index, gpu in enumerate(gpus):
            description = Finding(f"GPU {index}", OK, _description(gpu))
            if _is_chosen(index, gpu, env):
                findings += [description, *_faults(description.check, gpu)]
            else:
                words = f"{description.measured}; left out by CUDA_VISIBLE_DEVICES"
                findings.append(replace(description, measured=words))
        return findings + _topology(gpus)


def _description(gpu: Any) -> str:
    """Returns the model of a GPU, its memory, and whether MIG is on."""
    name, memory = _text(pynvml.nvmlDeviceGetName(gpu)), pynvml.nvmlDeviceGetMemoryInfo(gpu)
    is_mig = _answer_or(lambda: pynvml.nvmlDeviceGetMigMode(gpu)[0], 0)
    return f"{name}, {memory.total / 2**30:.1f} GiB" + (", MIG is on" if is_mig else "")


def _faults(label: str, gpu: Any) -> list[Finding]:
    """Returns a finding for each fault of one GPU."""
    findings = []
    errors = _answer_or(
        lambda: pynvml.nvmlDeviceGetTotalEccErrors(
            gpu, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
        ),
        0,
    )
    if errors:
        findings.append(
            Finding(
                label,
                FAILED,
                f"{errors} uncorrected memory errors since the last start",
                "a GPU with uncorrected errors computes wrong numbers or stops",
                "Reset or replace it (nvidia-smi -q -d ECC), and leave it out until then: "
                "CUDA_VISIBLE_DEVICES.",
            )
        )
    others = [
        process
        for process in _answer_or(lambda: pynvml.nvmlDeviceGetComputeRunningProcesses(gpu), [])
        if process.pid != os.getpid()
    ]
    if others:
        findings.append(
            Finding(
                label,
                WARNING,
                "other processes use it: " + ", ".join(map(_process, others)),
                "a GPU belongs to one job",
                "End them, or choose other GPUs by CUDA_VISIBLE_DEVICES.",
            )
        )
    if slowed := _slowed(gpu):
        findings.append(slowed_finding(label, slowed))
    return findings


def slowed_finding(label: str, reasons: Sequence[str]) -> Finding:
    """Returns that a GPU has lowered its clock, and why."""
    return Finding(
        label,
        WARNING,
        f"its clock is lowered by {' and '.join(reasons)}",
        "the slowest GPU sets the pace of all",
        "Look at its cooling and its power limit: nvidia-smi -q -d PERFORMANCE,POWER.",
    )


def _process(process: Any) -> str:
    """Returns the name, the id and the memory of a process that uses a GPU."""
    try:
        name = psutil.Process(process.pid).name()
    except psutil.Error:
        name = "a process of another user or container"
    used = process.usedGpuMemory
    return f"{name} ({process.pid}" + (f", {used / 2**30:.1f} GiB)" if used else ")")


def _slowed(gpu: Any) -> list[str]:
    """Returns for which reasons a GPU has lowered its clock now."""
    reasons = _answer_or(lambda: pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(gpu), 0)
    return [description for name, description in _SLOWED.items() if reasons & getattr(pynvml, name)]


def _topology(gpus: list[Any]) -> list[Finding]:
    """Returns a finding that says over what each pair of GPUs is connected."""
    levels = {getattr(pynvml, name): description for name, description in _LEVELS.items()}
    pairs = []
    for first, second in itertools.combinations(range(len(gpus)), 2):
        ask = functools.partial(
            pynvml.nvmlDeviceGetTopologyCommonAncestor, gpus[first], gpus[second]
        )
        level = _answer_or(ask, None)
        if level is not None:
            pairs.append(f"{first}–{second} {levels.get(level, level)}")
    return [Finding("topology", OK, "; ".join(pairs))] if pairs else []


class Utilization:
    """Samples how busy each GPU is that this process may use, as a context.

    Args:
        env: the environment variables.

    Attributes:
        mean: the mean share of the time in which each GPU has computed, in percent, by its index
            among those of the machine. It is empty without GPUs.
        slowed: why each GPU has lowered its clock meanwhile, by its index.
    """

    def __init__(self, env: Mapping[str, str]) -> None:
        self.mean: Mapping[int, float] = {}
        self.slowed: dict[int, list[str]] = {}
        self._env = env
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Utilization:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        samples: dict[int, list[int]] = {}
        with handles() as gpus:
            chosen = [(i, gpu) for i, gpu in enumerate(gpus) if _is_chosen(i, gpu, self._env)]
            while chosen and not self._stop.wait(_SAMPLE_S):
                for index, gpu in chosen:
                    if slowed := _slowed(gpu):
                        self.slowed[index] = slowed
                    ask = functools.partial(pynvml.nvmlDeviceGetUtilizationRates, gpu)
                    rates = _answer_or(ask, None)
                    if rates is not None:
                        samples.setdefault(index, []).append(rates.gpu)
        self.mean = {index: statistics.fmean(rates) for index, rates in samples.items()}


def _answer_or(ask: Callable[[], Any], otherwise: Any) -> Any:
    """Returns NVML's answer, or `otherwise` if the GPU does not support the question."""
    try:
        return ask()
    except pynvml.NVMLError:
        return otherwise


def _text(name: str | bytes) -> str:
    """Returns NVML's text, which older versions give as bytes."""
    return name.decode() if isinstance(name, bytes) else name

"""Tells whether the driver and NVIDIA's wheels fit the CUDA that TensorFlow was built for."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Mapping

from packaging.requirements import Requirement

from tfmulti.doctor.finding import FAILED, OK, WARNING, Finding

_EXTRA = "and-cuda"
# Wheels are named after the major version of CUDA, as nvidia-cudnn-cu12.
_SUFFIX = re.compile(r"-cu(\d+)$")
# The wheels whose versions are shown where all wheels are right.
_SHOWN = ("nvidia-cudnn", "nvidia-nccl", "nvidia-cuda-runtime")
# Whoever has the wheel of one of these has CUDA as wheels.
_MAIN = ("nvidia-cudnn", "nvidia-cuda-runtime")


def needs_of_tensorflow() -> list[str]:
    """Returns the requirements of `tensorflow[and-cuda]`, or none without an installation."""
    try:
        return importlib.metadata.requires("tensorflow") or []
    except importlib.metadata.PackageNotFoundError:
        return []


def installed_wheels() -> dict[str, str]:
    """Returns the versions of NVIDIA's installed wheels by name."""
    by_name = {
        (wheel.metadata["Name"] or "").lower(): wheel.version
        for wheel in importlib.metadata.distributions()
    }
    return {name: version for name, version in by_name.items() if name.startswith("nvidia-")}


def cuda_findings(
    build: Mapping[str, object],
    driver: int | None,
    needs: Iterable[str],
    installed: Mapping[str, str],
) -> list[Finding]:
    """Returns whether the CUDA of the driver and of NVIDIA's wheels fits TensorFlow.

    A driver runs programs of its own major version of CUDA and of older ones. Within a major
    version an older driver runs them, too, but compiles no code for new GPUs.

    Args:
        build: what `tf.sysconfig.get_build_info` returns.
        driver: the newest CUDA of the driver, as `gpus.driver` returns it; None without a driver.
        needs: the requirements of TensorFlow, of which those of `and-cuda` count.
        installed: the versions of NVIDIA's wheels by name.
    """
    cuda = str(build.get("cuda_version", ""))
    if not build.get("is_cuda_build") or not cuda[:1].isdigit():
        return [
            Finding(
                "CUDA",
                FAILED,
                "this TensorFlow was built without CUDA",
                "GPUs need a TensorFlow that was built for CUDA",
                "Run: pip install 'tfmulti[gpu]', and uninstall tensorflow-cpu.",
            )
        ]
    major, minor = (int(part) for part in [*cuda.split("."), "0"][:2])
    return [*_driver(major, minor, driver), *_wheels(major, needs, installed)]


def _driver(major: int, minor: int, driver: int | None) -> list[Finding]:
    """Returns whether the driver runs programs of a version of CUDA."""
    if driver is None:
        return []
    of_driver = driver // 1000, driver % 1000 // 10
    shown = f"{of_driver[0]}.{of_driver[1]}"
    measured = f"the driver is for CUDA {shown}, and TensorFlow was built for {major}.{minor}"
    if of_driver >= (major, minor):
        return [Finding("CUDA", OK, measured)]
    is_old = of_driver[0] < major
    return [
        Finding(
            "CUDA",
            # Libraries in the image (cuda-compat) may still run it; the training below shows it.
            WARNING,
            measured,
            f"the driver supports CUDA {major}.{0 if is_old else minor} or newer",
            "Install a newer driver on the machine (nvidia-smi shows its version); a container "
            "uses that of the machine.",
        )
    ]


def _wheels(major: int, needs: Iterable[str], installed: Mapping[str, str]) -> list[Finding]:
    """Returns whether NVIDIA's wheels are of the versions that TensorFlow needs.

    Without the wheel of the runtime or of cuDNN, TensorFlow is taken to use the libraries of the
    system. With one of them, the others are expected as wheels, too. For example, cuDNN finds no
    convolution for XLA without the compiler nvidia-cuda-nvrtc.
    """
    wanted = {}
    for text in needs:
        need = Requirement(text)
        is_asked = need.marker is not None and need.marker.evaluate({"extra": _EXTRA})
        base = _SUFFIX.sub("", need.name)
        if is_asked and base.startswith("nvidia-"):
            wanted[base] = need
    right, wrong, missing = [], [], []
    for base, need in sorted(wanted.items()):
        version = installed.get(need.name)
        others = [name for name in installed if _SUFFIX.sub("", name) == base and name != need.name]
        if version is None and others:
            wrong.append(f"{others[0]} {installed[others[0]]} is for another CUDA than {major}")
        elif version is not None and not need.specifier.contains(version, prereleases=True):
            wrong.append(f"{need.name} is {version}, and {need.specifier} is needed")
        elif version is None:
            missing.append(f"{need.name} is missing")
        elif base in _SHOWN:
            right.append(f"{need.name} {version}")
    if any(wanted[base].name in installed for base in _MAIN if base in wanted):
        wrong += missing
    if wrong:
        return [
            Finding(
                "CUDA wheels",
                # The wheels may belong to another package, such as PyTorch's.
                WARNING,
                "; ".join(wrong),
                f"the libraries of CUDA {major} that TensorFlow was built for, or none of them",
                "Run: pip install --upgrade 'tfmulti[gpu]', and uninstall those of another CUDA.",
            )
        ]
    measured = ", ".join(right) or "none; TensorFlow looks for the libraries of the system"
    return [Finding("CUDA wheels", OK, measured)]

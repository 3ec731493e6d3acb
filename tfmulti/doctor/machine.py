"""Looks at the machine of this worker: versions, cores, memory, files, proxies and addresses."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import uuid
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import psutil
from packaging.requirements import Requirement

import tfmulti
from tfmulti.cluster.cluster import Cluster
from tfmulti.cluster.gpus import visible_gpus
from tfmulti.cluster.listening import is_here, is_loopback
from tfmulti.cluster.proxies import PROXIES
from tfmulti.doctor.finding import FAILED, OK, WARNING, Finding
from tfmulti.doctor.gpus import check_gpus, driver

# The packages whose versions decide the numbers; they must be equal on all workers.
_COMPARED = ("tensorflow", "keras", "numpy", "ml_dtypes")
# From CUDA 13 on the name of the runtime has no number.
_CUDA = ("nvidia-cudnn-cu", "nvidia-nccl-cu", "nvidia-cuda-runtime-cu")
_SHOWN = (
    *_COMPARED,
    *(f"{name}{number}" for name in _CUDA for number in (12, 13)),
    "nvidia-cuda-runtime",
)
_MEMORY_GIB, _DISK_GIB, _FULL_GIB = 2.0, 1.0, 0.05
# NCCL puts its buffers there. Containers get 64 MiB unless told otherwise.
_SHM_MIB = 512
_FILES, _FEW_FILES = 4096, 256
# The file in the run directory by which the chief finds out whether all workers see that folder.
MARK_FILE = ".tfmulti-doctor"


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages whose versions decide the numbers."""
    by_name = {"Python": platform.python_version(), "tfmulti": tfmulti.__version__}
    for name in _SHOWN:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            by_name[name] = importlib.metadata.version(name)
    return by_name


def check_machine(
    env: Mapping[str, str], cluster: Cluster | None, run_dir: str | None
) -> list[Finding]:
    """Returns the findings about this worker's machine.

    Args:
        env: the environment variables.
        cluster: the cluster of this process, or None.
        run_dir: the run directory that was given, or None.
    """
    gpus = visible_gpus(env)
    findings = [
        *_versions(env),
        *check_gpus(any(Path("/dev").glob("nvidia[0-9]*")), env),
        *_resources(len(gpus)),
        *_disk(Path(run_dir or "runs"), run_dir is not None),
        *_proxies(env),
    ]
    return findings + (_addresses(cluster) if cluster is not None else [])


def _versions(env: Mapping[str, str]) -> list[Finding]:
    """Returns whether the installed versions are those that tfmulti needs."""
    shown = ", ".join(f"{name} {version}" for name, version in versions().items())
    if (installed_driver := driver()) is not None:
        version, cuda = installed_driver
        shown += f", driver {version} for CUDA {cuda // 1000}.{cuda % 1000 // 10}"
    wrong = []
    needs: list[str] = []
    # Without an installation, as in a checkout on PYTHONPATH, nothing tells the needs.
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        needs = importlib.metadata.requires("tfmulti") or []
    for text in needs:
        need = Requirement(text)
        if need.marker is not None:
            continue
        try:
            installed = importlib.metadata.version(need.name)
        except importlib.metadata.PackageNotFoundError:
            wrong.append(f"{need.name} is not installed")
            continue
        if not need.specifier.contains(installed, prereleases=True):
            wrong.append(f"{need.name} is {installed}, and {need.specifier} is needed")
    backend = env.get("KERAS_BACKEND", "tensorflow")
    if backend != "tensorflow":
        wrong.append(f"KERAS_BACKEND is {backend!r}")
    if wrong:
        return [
            Finding(
                "versions",
                FAILED,
                "; ".join(wrong),
                "the versions that tfmulti was installed for",
                "Run: pip install --upgrade tfmulti, and unset KERAS_BACKEND.",
            )
        ]
    return [Finding("versions", OK, shown)]


def _resources(gpus: int) -> list[Finding]:
    """Returns the findings about cores, memory, shared memory and open files."""
    cores, memory = len(os.sched_getaffinity(0)), psutil.virtual_memory()
    load, free = os.getloadavg()[0], memory.available / 2**30
    findings = [
        Finding(
            "cores",
            OK if load < cores else WARNING,
            f"{cores} with a load of {load:.1f}",
            "training needs its cores for itself; the slowest worker sets the pace",
            "End the other programs, or wait.",
        ),
        Finding(
            "memory",
            OK if free >= _MEMORY_GIB else WARNING,
            f"{free:.1f} of {memory.total / 2**30:.1f} GiB are free",
            f"TensorFlow and a small model need {_MEMORY_GIB:g} GiB",
            "End other programs, or take a larger machine.",
        ),
    ]
    with contextlib.suppress(OSError):
        shared = shutil.disk_usage("/dev/shm").total / 2**20
        is_enough = shared >= _SHM_MIB or gpus < 2
        findings.append(
            Finding(
                "/dev/shm",
                OK if is_enough else WARNING,
                f"{shared:,.0f} MiB",
                f"NCCL needs {_SHM_MIB} MiB for several GPUs",
                "In a container: --shm-size=1g, or in Kubernetes an emptyDir of medium Memory.",
            )
        )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = soft < _FILES
    most = hard if 0 < hard < 65536 else 65536
    advice = f"Run: ulimit -n {most}"
    if most < _FILES:
        advice = (
            f"The hard limit is {hard:,}. Raise it: LimitNOFILE of the service, nofile in "
            "/etc/security/limits.conf, or --ulimit nofile=65536 of the container."
        )
    findings.append(
        Finding(
            "open files",
            FAILED if soft < _FEW_FILES else WARNING if few else OK,
            f"{soft:,} may be open at a time",
            f"{_FILES:,} for many workers and many files of data",
            advice,
        )
    )
    return findings


def _disk(path: Path, was_given: bool) -> list[Finding]:
    """Returns whether the run directory can be written, with atomic renames, and has room."""
    parent = path.absolute()
    while not parent.exists():
        parent = parent.parent
    named = f"--run_dir {path}" if was_given else f"the folder {path}"
    trial = parent / f"{MARK_FILE}-{uuid.uuid4().hex}"
    try:
        trial.write_bytes(b"1")
        trial.replace(trial.with_suffix(".new"))
        has_new = trial.with_suffix(".new").read_bytes() == b"1" and not trial.exists()
        trial.with_suffix(".new").unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            trial.unlink(missing_ok=True)
        return [
            Finding(
                "run folder",
                FAILED,
                f"{named}: {parent} cannot be written ({error.strerror})",
                "a run writes its checkpoints there",
                "Give another --run_dir, make room, or change the folder's owner.",
            )
        ]
    if not has_new:
        return [
            Finding(
                "run folder",
                FAILED,
                f"{named}: a renamed file did not take its new name",
                "a checkpoint becomes whole by a rename",
                "Give a --run_dir on a file system with atomic renames.",
            )
        ]
    free = shutil.disk_usage(parent).free / 2**30
    status = FAILED if free < _FULL_GIB else WARNING if free < _DISK_GIB else OK
    return [
        Finding(
            "run folder",
            status,
            f"{named} can be written; {free:,.2f} GiB are free",
            f"{_DISK_GIB:g} GiB for checkpoints and the model",
            "Make room, or give another --run_dir.",
        )
    ]


def _proxies(env: Mapping[str, str]) -> list[Finding]:
    """Returns which proxies the environment names, without their passwords."""
    proxies = [f"{name} ({_host_of(env[name])})" for name in PROXIES if env.get(name)]
    if not proxies:
        return [Finding("proxies", OK, "none")]
    return [
        Finding(
            "proxies",
            WARNING,
            f"the environment names a proxy: {', '.join(proxies)}",
            "workers reach each other without a proxy; tfmulti sees to that in its own processes",
            "Unset it for other programs of the job that use gRPC, or list the workers' hosts in "
            "no_proxy.",
        )
    ]


def _host_of(proxy: str) -> str:
    """Returns the host of a proxy, without its user and password, which may have any characters."""
    place = proxy.rpartition("@")[2].rpartition("://")[2]
    try:
        return urlsplit(f"//{place}").hostname or "no host"
    except ValueError:
        return "no valid host"


def _addresses(cluster: Cluster) -> list[Finding]:
    """Returns whether the workers' names mean the right addresses on this machine."""
    findings, addresses_of_rank = [], {}
    for rank, host in enumerate(cluster.hosts):
        try:
            infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except OSError as error:
            if rank == cluster.rank:
                findings.append(
                    Finding(
                        "own address",
                        FAILED,
                        f"the name {host} of this worker does not resolve here ({error.strerror})",
                        "every worker's name resolves on every machine",
                        f"Correct the name in TF_CONFIG, or add {host} to DNS or /etc/hosts.",
                    )
                )
            continue
        addresses_of_rank[rank] = sorted({str(info[4][0]) for info in infos})
    loopback_ranks = [
        rank for rank, addresses in addresses_of_rank.items() if all(map(is_loopback, addresses))
    ]
    if len(loopback_ranks) < len(addresses_of_rank):
        for rank in loopback_ranks:
            findings.append(
                Finding(
                    "loopback",
                    WARNING if rank == cluster.rank else FAILED,
                    f"the name {cluster.hosts[rank]} of worker {rank} means "
                    f"{', '.join(addresses_of_rank[rank])} here",
                    "a worker's name means an address that other machines reach",
                    f"Remove the name {cluster.hosts[rank]} from the line of that address in "
                    "/etc/hosts, or give TF_CONFIG the numbers of the addresses.",
                )
            )
    own = cluster.hosts[cluster.rank]
    if cluster.rank in addresses_of_rank and not is_here(own):
        findings.append(
            Finding(
                "own address",
                FAILED,
                f"{own} ({', '.join(addresses_of_rank[cluster.rank])}) is not an address of this "
                f"machine ({socket.gethostname()})",
                "each worker listens at the address that TF_CONFIG gives its task",
                "Correct TF_CONFIG's task.index on this machine, or the address.",
            )
        )
    address = cluster.addresses[cluster.rank]
    return findings or [Finding("own address", OK, f"{address} belongs to this machine")]

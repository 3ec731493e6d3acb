"""Reads what mpirun gives each process: its rank, and how many there are.

- Open MPI: OMPI_COMM_WORLD_*. Version 5 starts processes by PRRTE and sets the same variables.
  https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
- MPICH, Intel MPI and others by Hydra: PMI_RANK and PMI_SIZE, with MPI_LOCALRANKID and
  MPI_LOCALNRANKS. https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md

The variables tell no hosts. On one host none are needed. On several hosts, rank 0 is looked for on
the hosts of the allocation in which mpirun ran, which `allocation` reads. Without one, mpi4py tells
all hosts.

Jobs that run at the same time must have different names. Open MPI and Intel MPI number their jobs.
MPICH sets no variable that differs between two jobs, so `completed` names the job by the process of
mpirun, or by random bytes that mpi4py gives to all processes.
"""

from __future__ import annotations

import atexit
import os
import re
import secrets
import socket
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tfmulti.cluster.allocation import allocated_hosts
from tfmulti.cluster.job_secret import SECRET
from tfmulti.cluster.layout import TIMEOUT_S, Env, Layout, number_of
from tfmulti.cluster.listening import LOOPBACK
from tfmulti.errors import EXIT_USER, ClusterError

NAME = "mpi"
# The rank, the number of processes, and both of the host's processes.
_OPEN_MPI = (
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
)
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
# Each is the same in all processes of a job: the job's number in Open MPI, that of Intel MPI, and
# the address at which an older Hydra listens.
_JOB = ("PMIX_NAMESPACE", "I_MPI_HYDRA_UUID", "PMI_PORT")
VARIABLES = (*_OPEN_MPI, *_HYDRA, *_JOB)
# Each process sends its host's name in so many bytes. A name in DNS has at most 253.
_NAME_BYTES = 256
_TOKEN_BYTES = 16
_NAME = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]*")
# The processes that start the ranks of a host: Hydra's, and those of other programs with PMI.
_STARTERS = ("hydra_pmi_proxy", "mpiexec", "mpirun")


def is_here(env: Env) -> bool:
    """Returns whether this process is one of several that mpirun has started."""
    return any(rank in env and env.get(size) not in (None, "1") for rank, size, *_ in _kinds(env))


def read(env: Env) -> Layout:
    """Returns the layout of the processes of one mpirun.

    Raises:
        ClusterError: a variable is wrong.
    """
    names = next(names for names in _kinds(env) if names[0] in env)
    rank, size = (number_of(env, name, NAME) for name in names[:2])
    local_rank, local_size = (
        number_of(env, name, NAME) if name in env else default
        for name, default in zip(names[2:], (rank, size), strict=True)
    )
    hosts = allocated_hosts(env)
    if names[2] not in env and len(hosts) > 1:
        raise ClusterError(
            f"mpi: {names[0]} is set, but {names[2]} is not, so a process does not know which "
            f"others share its host, and the allocation has {len(hosts)} hosts. Use the mpirun of "
            "Open MPI, MPICH or Intel MPI, or srun."
        )
    job = next((f"mpi {env[name]}" for name in _JOB if name in env), "")
    if local_size >= size:
        here = (LOOPBACK,) * size
        return Layout(NAME, rank, size, local_rank, local_size, LOOPBACK, (LOOPBACK,), job, here)
    host = socket.gethostname()
    return Layout(NAME, rank, size, local_rank, local_size, host, hosts, job)


def completed(
    layout: Layout, env: Env, processes: Path = Path("/proc"), *, timeout_s: float = TIMEOUT_S
) -> Layout:
    """Returns a layout with a name of the job and the hosts of rank 0. Every process calls it.

    Args:
        layout: what `read` has returned.
        env: the environment, which may hold the job's secret.
        processes: the folder with the files of Linux' processes.
        timeout_s: the seconds after which it no longer waits for the other processes.

    Raises:
        ClusterError: nothing tells this job from another one, no host is known, a host has no
            valid name, or a process does not come.
    """
    if layout.hosts and not layout.job:
        layout = replace(layout, job=_started_by(processes, os.getpid()))
    if layout.chief_hosts and (layout.job or env.get(SECRET)):
        # Jobs with different secrets cannot mix, so any name will do.
        return replace(layout, job=layout.job or "mpi")
    if layout.hosts:
        raise ClusterError(_no_name("the process of mpirun is not visible"))
    host = layout.host.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    gathered = _gathered(_library(layout), host + secrets.token_bytes(_TOKEN_BYTES), timeout_s)
    hosts = names_of([each[:_NAME_BYTES] for each in gathered])
    token = gathered[0][_NAME_BYTES:].hex()
    return replace(layout, hosts=hosts, chief_hosts=hosts[:1], job=layout.job or token)


def _gathered(library: Any, own: bytes, timeout_s: float) -> list[bytes]:
    """Returns the bytes of all ranks, which have the same number each.

    The method `allgather` would unpickle what the other processes send. `Allgather` would take a
    core until the last process has come, and that one may need the core.

    Raises:
        ClusterError: a process has not come in time. One that knows the hosts by a variable that
            the others lack does not come at all.
    """
    until_s = time.monotonic() + timeout_s
    world = library.COMM_WORLD
    received = bytearray(len(own) * world.Get_size())
    request = world.Iallgather([own, library.BYTE], [received, library.BYTE])
    while not request.Test():
        if time.monotonic() > until_s:
            # MPI's own end of the process would wait for the others once more.
            atexit.register(world.Abort, EXIT_USER)
            raise ClusterError(
                f"mpi: not all of the {world.Get_size()} processes have come within "
                f"{timeout_s:.0f} s. Did all start, and do all have the same {SECRET} and "
                "TFMULTI_CHIEF_HOST (mpirun -x)?"
            )
        time.sleep(0.001)
    return [bytes(received[i : i + len(own)]) for i in range(0, len(received), len(own))]


def names_of(fields: list[bytes]) -> tuple[str, ...]:
    """Returns the host of each rank from the rank's field of bytes, which zeros fill up.

    Raises:
        ClusterError: the bytes of a rank are no name of a host.
    """
    names = [field.rstrip(b"\0") for field in fields]
    for rank, name in enumerate(names):
        if not _NAME.fullmatch(name):
            raise ClusterError(
                f"mpi: the host of process {rank} calls itself {name[:60]!r}, which is not the "
                "name of a host. Set its host name, or TFMULTI_CHIEF_HOST (mpirun -x)."
            )
    return tuple(name.decode() for name in names)


def _started_by(processes: Path, pid: int) -> str:
    """Returns a name of the process of mpirun that has started a process, or an empty text.

    The number of a process is used again after its end, so the name also has the time of its start.
    """
    while pid > 1:
        try:
            before, _, after = (processes / str(pid) / "stat").read_text().rpartition(")")
        except OSError:
            return ""
        # See `man 5 proc`: the name, in parentheses, may hold any character.
        fields, name = after.split(), before.partition("(")[2]
        if name.startswith(_STARTERS):
            return f"mpi {pid} {fields[19]}"
        pid = int(fields[1])
    return ""


def _no_name(reason: str) -> str:
    """Returns the message about a job that has no name of its own."""
    return (
        f"mpi: this job cannot be told from others that run at the same time, because {reason}. "
        f"Give all of its processes a secret of their own: {SECRET}=… mpirun …."
    )


def _library(layout: Layout) -> Any:
    """Returns mpi4py's module, whose communicator has all processes.

    Raises:
        ClusterError: mpi4py is not installed, or uses another MPI than mpirun.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        # Its wheel raises RuntimeError if it finds no MPI library.
        if layout.chief_hosts:
            raise ClusterError(_no_name("mpi4py is not installed")) from None
        raise ClusterError(
            f"mpi: {layout.size} processes run on several hosts, whose names mpirun does not tell. "
            "Install mpi4py (pip install 'tfmulti[mpi]'), start mpirun in an allocation of Slurm, "
            "PBS or LSF, or set TFMULTI_CHIEF_HOST to the host of rank 0 (mpirun -x)."
        ) from None
    if MPI.COMM_WORLD.Get_size() != layout.size:
        raise ClusterError(
            f"mpi: mpirun has started {layout.size} processes, but mpi4py sees "
            f"{MPI.COMM_WORLD.Get_size()}, since it uses another MPI library "
            f"({MPI.Get_library_version().split(',')[0]}). Install mpi4py for this mpirun."
        )
    return MPI


def _kinds(env: Env) -> tuple[tuple[str, ...], ...]:
    """Returns the names of the variables of each kind of mpirun, the likeliest kind first.

    `srun --mpi=pmi2` sets PMI_RANK, too; there Slurm's own variables tell more. A batch script has
    a SLURM_PROCID as well, and so has Hydra's proxy, which passes it on to its processes.
    """
    by_srun = (
        "MPI_LOCALNRANKS" not in env
        and "SLURM_PROCID" in env
        and env.get("SLURM_PROCID") == env.get("PMI_RANK")
        and env.get("SLURM_STEP_NUM_TASKS") == env.get("PMI_SIZE")
    )
    return (_OPEN_MPI,) if by_srun else (_OPEN_MPI, _HYDRA)

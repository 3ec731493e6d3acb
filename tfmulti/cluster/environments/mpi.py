"""Reads what mpirun gives each process: its rank, and how many there are.

- Open MPI: OMPI_COMM_WORLD_*. Version 5 starts processes by PRRTE and sets the same variables.
  https://docs.open-mpi.org/en/v5.0.x/tuning-apps/environment-var.html
- MPICH, Intel MPI and others by Hydra: PMI_RANK and PMI_SIZE, with MPI_LOCALRANKID and
  MPI_LOCALNRANKS. https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md

The variables tell no hosts. On one host none are needed. On several hosts, rank 0 is looked for on
the hosts of the allocation in which mpirun ran, which `allocation` reads. Without one, mpi4py tells
all hosts.
"""

from __future__ import annotations

import re
import socket
from dataclasses import replace

from tfmulti.cluster.allocation import allocated_hosts
from tfmulti.cluster.layout import Env, Layout, number_of
from tfmulti.cluster.listening import LOOPBACK
from tfmulti.errors import ClusterError

NAME = "mpi"
VARIABLES = (
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    *("OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)
# The rank, the number of processes, and both of the host's processes.
_OPEN_MPI, _HYDRA = VARIABLES[:4], VARIABLES[4:]
# Each process sends its host's name in so many bytes. A name in DNS has at most 253.
_NAME_BYTES = 256
_NAME = re.compile(rb"[A-Za-z0-9][A-Za-z0-9._-]*")


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
    # Open MPI's number of the job, or the address of Hydra: the same in all processes of the job.
    job = f"mpi {env.get('PMIX_NAMESPACE', env.get('PMI_PORT', ''))}"
    if local_size >= size:
        hosts = (LOOPBACK,) * size
        return Layout(NAME, rank, size, local_rank, local_size, LOOPBACK, (LOOPBACK,), job, hosts)
    own = socket.gethostname()
    return Layout(NAME, rank, size, local_rank, local_size, own, allocated_hosts(env), job)


def with_hosts(layout: Layout) -> Layout:
    """Returns a layout with the host of each rank, which MPI itself tells. Every process calls it.

    Raises:
        ClusterError: mpi4py is not installed, or a host has no valid name.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError):
        # Its wheel raises RuntimeError if it finds no MPI library.
        raise ClusterError(
            f"mpi: {layout.size} processes run on several hosts, whose names mpirun does not tell. "
            "Install mpi4py (pip install 'tfmulti[mpi]'), start mpirun in an allocation of Slurm, "
            "PBS or LSF, or set TFMULTI_CHIEF_HOST to the host of rank 0 (mpirun -x)."
        ) from None
    # The method `allgather` would unpickle what the other processes send.
    own = layout.host.encode()[:_NAME_BYTES].ljust(_NAME_BYTES, b"\0")
    gathered = bytearray(_NAME_BYTES * layout.size)
    MPI.COMM_WORLD.Allgather([own, MPI.BYTE], [gathered, MPI.BYTE])
    hosts = names_of(bytes(gathered))
    return replace(layout, hosts=hosts, chief_hosts=hosts[:1])


def names_of(gathered: bytes) -> tuple[str, ...]:
    """Returns the host of each rank from the bytes of all ranks.

    Raises:
        ClusterError: the bytes of a rank are no name of a host.
    """
    ends = range(0, len(gathered), _NAME_BYTES)
    names = [gathered[end : end + _NAME_BYTES].rstrip(b"\0") for end in ends]
    for rank, name in enumerate(names):
        if not _NAME.fullmatch(name):
            raise ClusterError(
                f"mpi: the host of process {rank} calls itself {name[:60]!r}, which is no name of "
                "a host. Set its host name, or TFMULTI_CHIEF_HOST (mpirun -x)."
            )
    return tuple(name.decode() for name in names)


def _kinds(env: Env) -> tuple[tuple[str, ...], ...]:
    """Returns the names of the variables of each kind of mpirun, the likeliest kind first.

    `srun --mpi=pmi2` sets PMI_RANK, too; there Slurm's own variables tell more.
    """
    return (_OPEN_MPI,) if "SLURM_PROCID" in env else (_OPEN_MPI, _HYDRA)

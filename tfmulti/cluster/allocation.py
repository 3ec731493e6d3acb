"""Reads the hosts that a scheduler has given to a job.

Slurm   SLURM_JOB_NODELIST, in `salloc` and in batch scripts
PBS     PBS_NODEFILE, a file with a line for each slot of a host
LSF     LSB_DJOB_HOSTFILE, such a file, or LSB_MCPU_HOSTS, `host slots host slots …`
Azure   AZ_BATCH_MASTER_NODE, `address:port` of the node on which mpirun runs alone
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tfmulti.cluster.host_lists import HostListError, expand_hosts
from tfmulti.config.limited_reading import read_small
from tfmulti.errors import ClusterError

CHIEF_HOST = "TFMULTI_CHIEF_HOST"
# The largest host file, which has a line for each slot.
MOST_BYTES = 1 << 22


def allocated_hosts(env: Mapping[str, str]) -> tuple[str, ...]:
    """Returns each host of the allocation once, in the scheduler's order; empty without one.

    TFMULTI_CHIEF_HOST, if it is set, comes first.

    Raises:
        ClusterError: a host list does not parse, or a host file cannot be read.
    """
    chief_host = env.get(CHIEF_HOST)
    hosts: list[str] = [chief_host] if chief_host else []
    if "SLURM_JOB_NODELIST" in env:
        try:
            hosts += expand_hosts(env["SLURM_JOB_NODELIST"])
        except HostListError as error:
            raise ClusterError(f"SLURM_JOB_NODELIST: {error} Leave the allocation.") from None
    elif "PBS_NODEFILE" in env:
        hosts += hosts_of_file("PBS_NODEFILE", env["PBS_NODEFILE"])
    elif "LSB_DJOB_HOSTFILE" in env:
        hosts += hosts_of_file("LSB_DJOB_HOSTFILE", env["LSB_DJOB_HOSTFILE"])
    elif "LSB_MCPU_HOSTS" in env:
        hosts += env["LSB_MCPU_HOSTS"].split()[::2]
    elif "AZ_BATCH_MASTER_NODE" in env:
        hosts.append(env["AZ_BATCH_MASTER_NODE"].partition(":")[0])
    return tuple(dict.fromkeys(hosts))


def hosts_of_file(variable: str, path: str) -> Sequence[str]:
    """Returns the host of each line of a scheduler's file, in its order.

    Args:
        variable: the variable that names the file.
        path: the file.

    Raises:
        ClusterError: the file cannot be read, or is not a list of hosts.
    """
    try:
        text = read_small(path, MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ClusterError(
            f"{variable} is {path!r}: {reason}. Start this command inside of the job."
        ) from None
    hosts = [line.split()[0] for line in text.splitlines() if line.strip()]
    if not hosts:
        raise ClusterError(f"{variable} is {path!r}, which is not a list of hosts.")
    return hosts

"""Reads what LSF's job step manager (`jsrun`) gives each process.

JSM_NAMESPACE_* hold the ranks. LSB_DJOB_RANKFILE names a file with a host in each line. The first
is the launch node, on which jsrun itself runs. See
https://www.ibm.com/docs/en/spectrum-lsf/10.1.0?topic=variables-environment-variable-reference
"""

from __future__ import annotations

import socket

from tfmulti.cluster.allocation import hosts_of_file
from tfmulti.cluster.layout import Env, Layout, number_of
from tfmulti.errors import ClusterError

NAME = "lsf"
# The elements of a job array share the job's number, and so do several jsrun of one job.
_JOB = ("LSB_JOBINDEX", "PMIX_NAMESPACE")
VARIABLES = (
    *("LSB_JOBID", "LSB_DJOB_RANKFILE", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
    *("JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE", *_JOB),
)


def is_here(env: Env) -> bool:
    """Returns whether jsrun has started this process beside others."""
    return "LSB_JOBID" in env and env.get("JSM_NAMESPACE_SIZE", "1") != "1"


def read(env: Env) -> Layout:
    """Returns the layout of the processes of one jsrun.

    Raises:
        ClusterError: a variable is missing or wrong, or the rank file cannot be read.
    """
    rank, size, local_rank = (
        number_of(env, f"JSM_NAMESPACE_{name}", NAME) for name in ("RANK", "SIZE", "LOCAL_RANK")
    )
    if "LSB_DJOB_RANKFILE" not in env:
        raise ClusterError(
            "lsf: LSB_DJOB_RANKFILE is not set, so the hosts are not known. Start the processes by "
            "jsrun inside of a job."
        )
    launch, *compute = dict.fromkeys(hosts_of_file("LSB_DJOB_RANKFILE", env["LSB_DJOB_RANKFILE"]))
    hosts = tuple(compute) or (launch,)
    local_size = local_rank + 1
    if "JSM_NAMESPACE_LOCAL_SIZE" in env:
        local_size = number_of(env, "JSM_NAMESPACE_LOCAL_SIZE", NAME, 1)
        if len(hosts) == 1 and local_size < size:
            # The file has no line of a launch node, so its first host computes, too.
            hosts = (launch, *hosts)
    elif len(hosts) == 1:
        local_size = size
    return Layout(
        NAME,
        rank,
        size,
        local_rank,
        local_size,
        host=hosts[0] if len(hosts) == 1 else socket.gethostname(),
        chief_hosts=hosts,
        job=" ".join(["lsf", env["LSB_JOBID"], *(env.get(name, "") for name in _JOB)]),
        hosts=hosts * size if len(hosts) == 1 else (),
    )

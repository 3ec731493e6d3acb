"""Reads what Volcano's plugins `env` and `svc` give the pods of a task.

See https://volcano.sh/en/docs/v1-8-2/user-guide/how_to_use_job_plugins. The task must be named
`worker`. Volcano's `tensorflow` plugin sets TF_CONFIG instead.
"""

from __future__ import annotations

import re

from tfmulti.cluster.cluster import Cluster, Task
from tfmulti.cluster.environments.kubernetes import PORT
from tfmulti.cluster.layout import Env, address_of, number_of
from tfmulti.errors import ClusterError

NAME = "volcano"
_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
VARIABLES = ("VC_TASK_INDEX", "VC_WORKER_HOSTS", "VC_WORKER_NUM")


def is_here(env: Env) -> bool:
    """Returns whether this process runs in a pod of a Volcano job with several workers.

    A list in a wrong form counts, too: `read` then reports the error, so that no pod trains
    alone by mistake.
    """
    hosts = env.get("VC_WORKER_HOSTS", "").strip()
    is_single = (
        _HOST.fullmatch(hosts)
        and env.get("VC_TASK_INDEX") == "0"
        and env.get("VC_WORKER_NUM", "1") == "1"
    )
    return "VC_TASK_INDEX" in env and hosts != "" and not is_single


def read(env: Env) -> Cluster:
    """Returns the cluster of all pods of the task `worker`.

    Raises:
        ClusterError: VC_WORKER_HOSTS is not a list of hosts, VC_WORKER_NUM is not their number, or
            the index is missing or is not one of the hosts'.
    """
    hosts = [host.strip() for host in env["VC_WORKER_HOSTS"].split(",")]
    count = number_of(env, "VC_WORKER_NUM", NAME) if "VC_WORKER_NUM" in env else len(hosts)
    if count != len(hosts) or not all(_HOST.fullmatch(host) for host in hosts):
        number = f", {count} in all" if "VC_WORKER_NUM" in env else ""
        raise ClusterError(
            f"volcano: VC_WORKER_HOSTS is {env['VC_WORKER_HOSTS'][:80]!r}, but it must be host "
            f"names with commas between them{number}. Volcano's plugin svc sets it; do not change "
            "it."
        )
    rank = number_of(env, "VC_TASK_INDEX", NAME)
    if rank >= len(hosts):
        raise ClusterError(
            f"volcano: VC_TASK_INDEX is {rank}, but VC_WORKER_HOSTS has {len(hosts)} hosts. Put "
            "the training into one task, named worker."
        )
    return Cluster(tuple(address_of(host, PORT) for host in hosts), Task("worker", rank))

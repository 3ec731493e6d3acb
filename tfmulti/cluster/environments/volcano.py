"""Reads what Volcano's plugins `env` and `svc` give the pods of a task.

See https://volcano.sh/en/docs/v1-8-2/user-guide/how_to_use_job_plugins. The task must be named
`worker`. Volcano's `tensorflow` plugin sets TF_CONFIG instead.
"""

from __future__ import annotations

from tfmulti.cluster.cluster import Cluster, Task
from tfmulti.cluster.environments.kubernetes import PORT
from tfmulti.cluster.layout import Env, address_of, number_of
from tfmulti.errors import ClusterError

NAME = "volcano"
VARIABLES = ("VC_TASK_INDEX", "VC_WORKER_HOSTS", "VC_WORKER_NUM")


def is_here(env: Env) -> bool:
    """Returns whether this process runs in a pod of a Volcano job with several workers."""
    hosts = env.get("VC_WORKER_HOSTS", "")
    return "VC_TASK_INDEX" in env and "," in hosts


def read(env: Env) -> Cluster:
    """Returns the cluster of all pods of the task `worker`.

    Raises:
        ClusterError: the index is missing, or is not one of the hosts'.
    """
    hosts = [host.strip() for host in env["VC_WORKER_HOSTS"].split(",")]
    rank = number_of(env, "VC_TASK_INDEX", NAME)
    if rank >= len(hosts):
        raise ClusterError(
            f"volcano: VC_TASK_INDEX is {rank}, but VC_WORKER_HOSTS has {len(hosts)} hosts. Put "
            "the training into one task, named worker."
        )
    return Cluster(tuple(address_of(host, PORT) for host in hosts), Task("worker", rank))

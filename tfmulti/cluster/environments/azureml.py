"""Reads what Azure Machine Learning gives each process of a job with PyTorch's distribution.

A job with TensorFlow's distribution has TF_CONFIG, and one with MPI's has mpirun's variables.
PyTorch's distribution starts one process a node or more (`process_count_per_instance`), with
MASTER_ADDR, the address of node 0, and RANK, WORLD_SIZE, LOCAL_RANK and NODE_RANK. See
https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu. AZUREML_NODE_COUNT
is the number of nodes. That page does not name it, but jobs have it, and schedulers read it:
https://github.com/NVIDIA/KAI-Scheduler/tree/main/pkg/podgrouper/podgrouper/plugins/aml.
LOCAL_WORLD_SIZE, the number of processes of a node, is torchrun's
(https://docs.pytorch.org/docs/stable/elastic/run.html).
"""

from __future__ import annotations

import socket

from tfmulti.cluster.layout import Env, Layout, number_of
from tfmulti.errors import ClusterError

NAME = "azureml"
NODES, LOCAL_SIZE = "AZUREML_NODE_COUNT", "LOCAL_WORLD_SIZE"
VARIABLES = (
    *("AZUREML_RUN_ID", "MASTER_ADDR", "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK"),
    *(NODES, LOCAL_SIZE),
)


def is_here(env: Env) -> bool:
    """Returns whether this process is one of several of an Azure ML job."""
    return "AZUREML_RUN_ID" in env and "MASTER_ADDR" in env and env.get("WORLD_SIZE", "1") != "1"


def read(env: Env) -> Layout:
    """Returns the layout of the processes of the job.

    Raises:
        ClusterError: a variable is missing or wrong, or they contradict each other.
    """
    rank, size, local_rank = (
        number_of(env, name, NAME) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    )
    local_size = _local_size(env, size)
    node, rest = divmod(rank - local_rank, local_size)
    if rest or node != (number_of(env, "NODE_RANK", NAME) if "NODE_RANK" in env else node):
        raise ClusterError(
            f"azureml: RANK {rank}, LOCAL_RANK {local_rank} and NODE_RANK "
            f"{env.get('NODE_RANK', 'not set')} contradict each other with {local_size} processes "
            "on each node. Azure ML sets these variables; do not change them."
        )
    return Layout(
        NAME,
        rank,
        size,
        local_rank,
        local_size,
        # One name for all processes of a node. MASTER_ADDR is the one that the others reach.
        host=env["MASTER_ADDR"] if node == 0 else socket.gethostname(),
        chief_hosts=(env["MASTER_ADDR"],),
        job=f"azureml {env['AZUREML_RUN_ID']}",
        hosts=(env["MASTER_ADDR"],) * size if local_size == size else (),
    )


def _local_size(env: Env, size: int) -> int:
    """Returns the number of processes of each node.

    Raises:
        ClusterError: no variable tells it, or the processes cannot be divided evenly.
    """
    if LOCAL_SIZE in env:
        return number_of(env, LOCAL_SIZE, NAME, 1)
    if NODES not in env:
        raise ClusterError(
            f"azureml: neither {NODES} nor {LOCAL_SIZE} is set, so it is not known how many "
            f"processes share the GPUs of a node. Set {LOCAL_SIZE} to the job's "
            "process_count_per_instance, among its environment_variables."
        )
    nodes = number_of(env, NODES, NAME, 1)
    local_size, rest = divmod(size, nodes)
    if rest or not local_size:
        raise ClusterError(
            f"azureml: WORLD_SIZE is {size}, which cannot be divided by the {nodes} nodes of "
            f"{NODES}. Start as many processes on each node, or set {LOCAL_SIZE}."
        )
    return local_size

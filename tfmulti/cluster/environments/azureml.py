"""Reads what Azure Machine Learning gives each node of a job with PyTorch's distribution.

A job with TensorFlow's distribution has TF_CONFIG, and one with MPI's has mpirun's variables and
AZ_BATCH_MASTER_NODE, the address of the first node. PyTorch's distribution starts one process a
node or more, with MASTER_ADDR, RANK, WORLD_SIZE, LOCAL_RANK and NODE_RANK. See
https://learn.microsoft.com/azure/machine-learning/how-to-train-distributed-gpu
"""

from __future__ import annotations

import socket

from tfmulti.cluster.layout import Env, Layout, number_of

NAME = "azureml"
VARIABLES = ("AZUREML_RUN_ID", "MASTER_ADDR", "RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK")


def is_here(env: Env) -> bool:
    """Returns whether this process is one of several of an Azure ML job."""
    return "AZUREML_RUN_ID" in env and "MASTER_ADDR" in env and env.get("WORLD_SIZE", "1") != "1"


def read(env: Env) -> Layout:
    """Returns the layout of the processes of the job.

    Raises:
        ClusterError: a variable is missing or wrong.
    """
    rank, size, local_rank = (
        number_of(env, name, NAME) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    )
    # Each node starts as many processes as the first, so the node's rank tells how many.
    node = number_of(env, "NODE_RANK", NAME) if "NODE_RANK" in env else 0
    local_size = (rank - local_rank) // node if node else local_rank + 1
    if "LOCAL_WORLD_SIZE" in env:
        local_size = number_of(env, "LOCAL_WORLD_SIZE", NAME, 1)
    return Layout(
        NAME,
        rank,
        size,
        local_rank,
        local_size,
        host=env["MASTER_ADDR"] if rank == 0 else socket.gethostname(),
        chief_hosts=(env["MASTER_ADDR"],),
        job=f"azureml {env['AZUREML_RUN_ID']}",
    )

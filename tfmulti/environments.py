"""Finds the cluster that the environment describes: pure functions of a mapping.

To support another launcher or scheduler, write a function `env -> Cluster | None` and
add it to `ENVIRONMENTS`; the first that recognises the environment is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tfmulti.cluster import Cluster
from tfmulti.errors import ClusterError

Env = Mapping[str, str]


def tf_config(env: Env) -> Cluster | None:
    """Returns the cluster of TF_CONFIG, or None where it is not set or empty."""
    text = env.get("TF_CONFIG", "").strip()
    return Cluster.from_tf_config(text) if text else None


ENVIRONMENTS: dict[str, Callable[[Env], Cluster | None]] = {"TF_CONFIG": tf_config}


def find_cluster(env: Env) -> tuple[Cluster | None, str]:
    """Returns the cluster of the environment and the name of where it was found.

    Returns:
        The cluster, or None where the environment has none; then the name is empty.

    Raises:
        ClusterError: the environment describes a cluster, but wrongly.
    """
    for name, read in ENVIRONMENTS.items():
        cluster = read(env)
        if cluster is not None:
            return cluster, name
    return None, ""


def check_trains(cluster: Cluster | None) -> None:
    """Raises ClusterError where this process is an evaluator task, which has no part in it."""
    if cluster is not None and cluster.is_evaluator:
        raise ClusterError(
            "this process is an evaluator task of TF_CONFIG, which does not train: the workers "
            "evaluate. Do not start it, or make it a worker."
        )

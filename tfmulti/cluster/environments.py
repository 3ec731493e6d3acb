"""Finds the cluster that the environment describes: pure functions of a mapping.

To support another launcher or scheduler, write a function `env -> Cluster | None` and
add it to `ENVIRONMENTS`; the first that recognises the environment is used.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from tfmulti.cluster.cluster import Cluster
from tfmulti.config import json_values
from tfmulti.errors import ClusterError

Env = Mapping[str, str]


def tf_config(env: Env) -> Cluster | None:
    """Returns the cluster of TF_CONFIG, or None where it is not set, empty or `{}`."""
    text = env.get("TF_CONFIG", "").strip()
    return None if is_empty(text) else Cluster.from_tf_config(text)


def is_empty(text: str) -> bool:
    """Whether the text of TF_CONFIG describes no cluster and no task, as TensorFlow reads it.

    >>> is_empty('{}'), is_empty('{"cluster": {}}'), is_empty('{"task": {"type": "worker"}}')
    (True, True, False)
    """
    try:
        config = json_values.parse(text) if text else {}
    except json.JSONDecodeError:
        return False  # `Cluster.from_tf_config` says what is wrong
    return isinstance(config, dict) and not config.get("cluster") and not config.get("task")


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

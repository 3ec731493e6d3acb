"""Finds the cluster that the environment variables describe, by pure functions of a mapping.

To support another launcher or scheduler, write a function `env -> Cluster | None` and add it to
`ENVIRONMENTS`. `find_cluster` uses the first function that returns a cluster.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from tfmulti.cluster.cluster import Cluster
from tfmulti.config import json_values
from tfmulti.errors import ClusterError

Env = Mapping[str, str]


def tf_config(env: Env) -> Cluster | None:
    """Returns the cluster of TF_CONFIG, or None if TF_CONFIG is not set or describes nothing.

    Raises:
        ClusterError: TF_CONFIG breaks a rule of its format.
    """
    text = env.get("TF_CONFIG", "").strip()
    return None if is_empty(text) else Cluster.from_tf_config(text)


def is_empty(text: str) -> bool:
    """Returns whether the text of TF_CONFIG describes neither a cluster nor a task.

    TensorFlow ignores such a text too.

    >>> is_empty('{}'), is_empty('{"cluster": {}}'), is_empty('{"task": {"type": "worker"}}')
    (True, True, False)
    """
    try:
        config = json_values.parse(text) if text else {}
    except json.JSONDecodeError:
        # `Cluster.from_tf_config` will say what is wrong with the text.
        return False
    return isinstance(config, dict) and not config.get("cluster") and not config.get("task")


ENVIRONMENTS: dict[str, Callable[[Env], Cluster | None]] = {"TF_CONFIG": tf_config}


def find_cluster(env: Env) -> tuple[Cluster | None, str]:
    """Returns the cluster of the environment, and the name of its place in `ENVIRONMENTS`.

    Returns:
        The cluster and the name, or None and an empty name if the environment has no cluster.

    Raises:
        ClusterError: the description of the cluster breaks a rule of its format.
    """
    for name, read in ENVIRONMENTS.items():
        cluster = read(env)
        if cluster is not None:
            return cluster, name
    return None, ""


def check_trains(cluster: Cluster | None) -> None:
    """Checks that this process may train.

    Raises:
        ClusterError: this process is an evaluator task, which does not train.
    """
    if cluster is not None and cluster.is_evaluator:
        raise ClusterError(
            "this process is an evaluator task of TF_CONFIG, which does not train: the workers "
            "evaluate. Do not start it, or make it a worker."
        )

"""Reads TF_CONFIG, which TensorFlow, the launcher, Kubeflow's TFJob and Vertex AI set.

The format: https://www.tensorflow.org/guide/distributed_training#TF_CONFIG. Kubeflow's TFJob:
https://www.kubeflow.org/docs/components/trainer/legacy-v1/user-guides/tensorflow/. A TFJob with
dynamic workers has `sparseCluster` in place of `cluster`, which lists a worker's own address alone.
"""

from __future__ import annotations

import json

from tfmulti.cluster.cluster import Cluster
from tfmulti.cluster.layout import Env
from tfmulti.config import json_values

NAME = "tf_config"
VARIABLES = ("TF_CONFIG",)


def is_here(env: Env) -> bool:
    """Returns whether TF_CONFIG describes a cluster or a task."""
    return not is_empty(env.get("TF_CONFIG", "").strip())


def read(env: Env) -> Cluster:
    """Returns the cluster of TF_CONFIG.

    Raises:
        ClusterError: TF_CONFIG breaks a rule of its format.
    """
    return Cluster.from_tf_config(env["TF_CONFIG"].strip())


def is_empty(text: str) -> bool:
    """Returns whether the text of TF_CONFIG describes neither a cluster nor a task.

    TensorFlow ignores such a text too.

    >>> is_empty('{}'), is_empty('{"cluster": {}}'), is_empty('{"task": {"type": "worker"}}')
    (True, True, False)
    """
    try:
        config = json_values.parse(text or "{}")
    except json.JSONDecodeError:
        # `Cluster.from_tf_config` will say what is wrong with the text.
        return False
    keys = ("cluster", "sparseCluster", "task")
    return isinstance(config, dict) and not any(config.get(key) for key in keys)

"""Reads CLUSTER_SPEC, which Vertex AI gives each replica of a custom job.

Worker pool 0 is the primary replica, pool 1 holds the workers, pool 2 parameter or reduction
servers, and pool 3 evaluators. Vertex AI sets TF_CONFIG as well, which is read first. See
https://cloud.google.com/vertex-ai/docs/training/distributed-training
"""

from __future__ import annotations

import json
from typing import Any

from tfmulti.cluster.cluster import Cluster, Task
from tfmulti.cluster.layout import Env
from tfmulti.config import json_values
from tfmulti.errors import ClusterError

NAME = "vertex"
VARIABLES = ("CLUSTER_SPEC",)
_POOLS = {"workerpool0": "chief", "workerpool1": "worker", "workerpool3": "evaluator"}


def is_here(env: Env) -> bool:
    """Returns whether CLUSTER_SPEC describes more than the primary replica.

    A text of another form counts as well. `read` then says what is wrong with it, because a replica
    must not train alone by mistake.
    """
    if not env.get("CLUSTER_SPEC", "").strip():
        return False
    try:
        cluster = _spec(env)["cluster"]
    except ClusterError:
        return True
    primary = cluster.get("workerpool0")
    return not (len(cluster) == 1 and isinstance(primary, list) and len(primary) == 1)


def read(env: Env) -> Cluster:
    """Returns the cluster of pools 0 and 1.

    Raises:
        ClusterError: CLUSTER_SPEC breaks a rule of its format, or this replica is none that trains.
    """
    spec = _spec(env)
    pools: dict[str, Any] = spec["cluster"]
    task = spec.get("task")
    kind = task.get("type") if isinstance(task, dict) else None
    index = task.get("index") if isinstance(task, dict) else None
    if not isinstance(kind, str) or kind not in _POOLS or not isinstance(index, int):
        raise ClusterError(
            f"vertex: CLUSTER_SPEC['task'] is {repr(task)[:80]}, but only replicas of workerpool0 "
            "and workerpool1 train. Leave the other pools out of the job."
        )
    jobs: dict[str, tuple[str, ...]] = {}
    for pool, name in _POOLS.items():
        addresses = pools.get(pool, [])
        if not isinstance(addresses, list) or not all(isinstance(a, str) for a in addresses):
            raise ClusterError(
                f"vertex: CLUSTER_SPEC['cluster'][{pool!r}] must be a list of addresses. Vertex AI "
                "sets it; do not change it."
            )
        jobs[name] = tuple(addresses)
    if len(jobs["chief"]) != 1:
        raise ClusterError(
            f"vertex: workerpool0 has {len(jobs['chief'])} replicas, but it must have one. Set its "
            "replicaCount to 1."
        )
    return Cluster(jobs["worker"], Task(_POOLS[kind], index), jobs["chief"][0], jobs["evaluator"])


def _spec(env: Env) -> dict[str, Any]:
    """Returns the object of CLUSTER_SPEC, whose `cluster` is an object.

    Raises:
        ClusterError: CLUSTER_SPEC has another form.
    """
    text = env["CLUSTER_SPEC"]
    try:
        spec = json_values.parse(text)
    except json.JSONDecodeError:
        spec = None
    if not isinstance(spec, dict) or not isinstance(spec.get("cluster"), dict):
        raise ClusterError(
            f"vertex: CLUSTER_SPEC is {text[:80]!r}, but it must be a JSON object with the object "
            "'cluster'. Vertex AI sets it; do not change it, or give --environment none."
        )
    return spec

"""Reads what SageMaker's training toolkit gives each machine.

SM_HOSTS is a JSON list of all hosts, and SM_CURRENT_HOST is this one. The order of the list is not
promised, so the hosts are sorted: `algo-1` is the chief. See
https://github.com/aws/sagemaker-training-toolkit/blob/master/ENVIRONMENT_VARIABLES.md
"""

from __future__ import annotations

import json
import re

from tfmulti.cluster.cluster import Cluster, Task
from tfmulti.cluster.environments.kubernetes import PORT
from tfmulti.cluster.layout import Env, address_of
from tfmulti.config import json_values
from tfmulti.config.limited_reading import whole_number
from tfmulti.errors import ClusterError

NAME = "sagemaker"
VARIABLES = ("SM_HOSTS", "SM_CURRENT_HOST")


def is_here(env: Env) -> bool:
    """Returns whether this process runs in a SageMaker job of several machines.

    A list in a wrong form counts, too: `read` then reports the error, so that no machine trains
    alone by mistake.
    """
    if "SM_CURRENT_HOST" not in env or not env.get("SM_HOSTS", "").strip():
        return False
    return _hosts(env) != [env["SM_CURRENT_HOST"]]


def read(env: Env) -> Cluster:
    """Returns the cluster of one worker for each machine.

    Raises:
        ClusterError: SM_HOSTS is not a list of names, or lacks this host.
    """
    hosts = _hosts(env)
    if hosts is None:
        raise ClusterError(
            f"sagemaker: SM_HOSTS is {env['SM_HOSTS'][:80]!r}, but it must be a JSON list of host "
            "names. SageMaker sets it; do not change it."
        )
    hosts.sort(key=_by_number)
    host = env["SM_CURRENT_HOST"]
    if host not in hosts:
        raise ClusterError(
            f"sagemaker: SM_CURRENT_HOST is {host[:80]!r}, but SM_HOSTS is "
            f"{env['SM_HOSTS'][:80]!r}. SageMaker sets both; do not change them."
        )
    addresses = tuple(address_of(name, PORT) for name in hosts)
    return Cluster(addresses, Task("worker", hosts.index(host)))


def _hosts(env: Env) -> list[str] | None:
    """Returns the hosts of SM_HOSTS, or None if it is not a JSON list of names."""
    try:
        hosts = json_values.parse(env["SM_HOSTS"])
    except json.JSONDecodeError:
        return None
    is_list = isinstance(hosts, list) and all(isinstance(host, str) for host in hosts)
    return hosts if is_list else None


def _by_number(host: str) -> list[tuple[int, str]]:
    """Returns a key that sorts `algo-2` before `algo-10`."""
    parts = ((whole_number(part), part) for part in re.split(r"([0-9]+)", host))
    return [(-1, part) if number is None else (number, "") for number, part in parts]

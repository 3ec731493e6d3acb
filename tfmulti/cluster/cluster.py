"""Describes a cluster: the addresses of its workers, and which of them this process is.

`Cluster` is an immutable value. Its constructor checks every rule, so each instance is valid.
A cluster is read from the text of TF_CONFIG and written back to it. For the format see
https://www.tensorflow.org/guide/distributed_training#TF_CONFIG.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tfmulti.config import json_values
from tfmulti.config.limited_reading import whole_number
from tfmulti.errors import ClusterError, did_you_mean

TASK_TYPES = ("chief", "worker", "evaluator")
# TensorFlow 1 called the chief "master". Kubeflow and SageMaker still send that name.
_ALIASES = {"master": "chief"}
# A name in DNS has at most 255 characters.
_NAME = r"[^\s:/\\\[\]\x00-\x1f\x7f\ud800-\udfff]{1,255}"
_ADDRESS = re.compile(rf"(?P<host>\[[0-9A-Fa-f:.]+\]|{_NAME}):(?P<port>[0-9]+)")
# Messages show at most this many characters of a value.
_SHOWN = 80


@dataclass(frozen=True)
class Task:
    """One process of the cluster.

    Args:
        type: the job of the process: `chief`, `worker` or `evaluator`.
        index: the place of the process in the address list of that job, from 0.

    Raises:
        ClusterError: the type is unknown, or the index is not a whole number from 0.
    """

    type: str
    index: int

    def __post_init__(self) -> None:
        if self.type not in TASK_TYPES:
            raise ClusterError(
                f"task.type is {_shown(self.type)}, which is no type of task; "
                + did_you_mean(str(self.type), TASK_TYPES)
            )
        if not isinstance(self.index, int) or isinstance(self.index, bool) or self.index < 0:
            raise ClusterError(
                f"task.index is {_shown(self.index)}, but it must be a whole number from 0. "
                "Fix it on this host."
            )


@dataclass(frozen=True)
class Cluster:
    """The workers of one job, and the place of this process among them.

    Args:
        workers: the `host:port` of each worker task, in the order of their indices.
        task: the task of this process.
        chief: the `host:port` of the `chief` task. None makes worker 0 the chief.
        evaluators: the addresses of evaluator tasks, which are not workers of the cluster.
        local_rank: the rank of this process among those that a scheduler has started on its host.
        local_size: the number of these. A host with one process has 1, and so has TF_CONFIG.

    Raises:
        ClusterError: an address, an index or a task type breaks a rule of the format.

    >>> cluster = Cluster(workers=("h1:2222", "h2:2222"), task=Task("worker", 1))
    >>> cluster.size, cluster.rank, cluster.is_chief
    (2, 1, False)
    """

    workers: tuple[str, ...]
    task: Task
    chief: str | None = None
    evaluators: tuple[str, ...] = ()
    local_rank: int = field(default=0, compare=False)
    local_size: int = field(default=1, compare=False)

    def __post_init__(self) -> None:
        _check_addresses(self._jobs())
        if not self.addresses:
            raise ClusterError(
                "the cluster has no worker: it needs a 'worker' list of \"host:port\" addresses."
            )
        addresses = self._jobs().get(self.task.type, ())
        if self.task.type == "evaluator" and not addresses:
            # Kubeflow starts evaluators that TF_CONFIG does not list.
            return
        if self.task.index >= len(addresses):
            raise ClusterError(
                f"task.index is {_shown(self.task.index)}, but job {self.task.type!r} has "
                f"the indices 0 to {len(addresses) - 1}. "
                "Fix it on this host."
                if addresses
                else f"this task is of type {self.task.type!r}, but the cluster has no "
                f"{self.task.type!r} job. Add it to the cluster, or fix task.type."
            )

    @property
    def addresses(self) -> tuple[str, ...]:
        """The `host:port` of every worker by rank, the chief first."""
        return (*([self.chief] if self.chief else []), *self.workers)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of every worker by rank, without its port."""
        return tuple(host_of(address) for address in self.addresses)

    @property
    def size(self) -> int:
        """The number of workers that train, with the chief and without evaluators."""
        return len(self.addresses)

    @property
    def is_evaluator(self) -> bool:
        """Whether this process is an evaluator task."""
        return self.task.type == "evaluator"

    @property
    def rank(self) -> int:
        """The rank of this worker: 0 for the chief, at most `size - 1`.

        Raises:
            ClusterError: this process is an evaluator, which has no rank.
        """
        if self.is_evaluator:
            raise ClusterError("an evaluator stands outside the cluster and has no rank.")
        return self.task.index + (1 if self.chief and self.task.type == "worker" else 0)

    @property
    def is_chief(self) -> bool:
        """Whether this process is the chief, which is the worker of rank 0."""
        return not self.is_evaluator and self.rank == 0

    def for_rank(self, rank: int) -> Cluster:
        """Returns the same cluster with the worker of rank `rank` as its own task.

        Raises:
            ClusterError: the rank is below 0, or not below the number of workers.
        """
        if not 0 <= rank < self.size:
            raise ClusterError(f"rank is {rank}, but the cluster has {self.size} workers.")
        if self.chief is None:
            task = Task("worker", rank)
        else:
            task = Task("chief", 0) if rank == 0 else Task("worker", rank - 1)
        return Cluster(self.workers, task, self.chief, self.evaluators)

    def to_tf_config(self) -> str:
        """Returns the JSON text of TF_CONFIG for this worker."""
        jobs = {name: list(addresses) for name, addresses in self._jobs().items() if addresses}
        task = {"type": self.task.type, "index": self.task.index}
        return json.dumps({"cluster": jobs, "task": task})

    @classmethod
    def from_tf_config(cls, text: str) -> Cluster:
        """Returns the cluster that `text`, the value of TF_CONFIG, describes.

        The text may leave out the `chief` job, call it `master`, describe an `evaluator` task, and
        have further keys.

        Raises:
            ClusterError: the text is not JSON, or it breaks a rule of the format.
        """
        config = _as_object(text)
        jobs = _jobs_of(config)
        task = config.get("task")
        if not isinstance(task, Mapping):
            raise ClusterError(
                f"TF_CONFIG['task'] is {_shown(task)}, but it must say which process this is: "
                '{"type": "worker", "index": 0}.'
            )
        kind = task.get("type")
        index = task.get("index", 0)
        if isinstance(index, str):
            number = whole_number(index)
            index = index if number is None else number
        chiefs = jobs.get("chief", ())
        if len(chiefs) > 1:
            raise ClusterError(
                f"TF_CONFIG['cluster']['chief'] has {len(chiefs)} addresses "
                f"({_shown(list(chiefs))}), but a cluster has one chief. "
                "Move the others to 'worker'."
            )
        try:
            return cls(
                workers=jobs.get("worker", ()),
                task=Task(_ALIASES.get(str(kind), str(kind)), index),
                chief=chiefs[0] if chiefs else None,
                evaluators=jobs.get("evaluator", ()),
            )
        except ClusterError as error:
            raise ClusterError(f"TF_CONFIG: {error}") from None

    def _jobs(self) -> dict[str, tuple[str, ...]]:
        """Returns the addresses of each job, which may be empty."""
        return {
            "chief": () if self.chief is None else (self.chief,),
            "worker": self.workers,
            "evaluator": self.evaluators,
        }


def _as_object(text: str) -> Mapping[str, Any]:
    """Returns the JSON object of TF_CONFIG, or raises ClusterError."""
    try:
        config = json_values.parse(text)
    except json.JSONDecodeError as error:
        raise ClusterError(
            f"TF_CONFIG is not JSON ({error.msg} at character {error.pos}): {text[:60]!r}. "
            'It must look like {"cluster": {"worker": ["host:port", ...]}, '
            '"task": {"type": "worker", "index": 0}}.'
        ) from None
    if not isinstance(config, Mapping):
        raise ClusterError(f"TF_CONFIG must be a JSON object, but is {text[:60]!r}.")
    return config


def _jobs_of(config: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Returns the address lists of TF_CONFIG by job, or raises ClusterError."""
    if "sparseCluster" in config:
        raise ClusterError(
            "TF_CONFIG has a sparseCluster, which lists this worker alone, but every worker needs "
            "the addresses of all. Set enableDynamicWorker: false in the TFJob."
        )
    cluster = config.get("cluster")
    if not isinstance(cluster, Mapping) or not cluster:
        raise ClusterError(
            f"TF_CONFIG['cluster'] is {_shown(cluster)}, but it must list the addresses of the "
            'workers: {"worker": ["host:port", ...]}. Unset TF_CONFIG to run without a cluster.'
        )
    jobs: dict[str, tuple[str, ...]] = {}
    for key, addresses in cluster.items():
        name = _ALIASES.get(key, key)
        # Kubeflow lists jobs without tasks, too.
        if key == "ps" and addresses == []:
            continue
        if name not in TASK_TYPES:
            raise ClusterError(
                f"no task type {_shown(key)} in TF_CONFIG['cluster']; "
                + did_you_mean(key, TASK_TYPES)
                + (" Parameter servers are not supported." if key == "ps" else "")
            )
        if name in jobs:
            raise ClusterError(
                "TF_CONFIG['cluster'] has both 'chief' and 'master', which mean the same: "
                "a cluster has one chief. Remove one of them."
            )
        if isinstance(addresses, str) or not isinstance(addresses, Sequence):
            raise ClusterError(
                f"TF_CONFIG['cluster'][{key!r}] is {_shown(addresses)}, but it must be a list of "
                '"host:port" addresses.'
            )
        jobs[name] = tuple(addresses)
    return jobs


def _shown(value: object) -> str:
    """Returns a value in quotes for a message, cut off if it is long."""
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def is_host_name(text: str) -> bool:
    """Returns whether a text can be the name or the IPv4 address of a host."""
    return re.fullmatch(_NAME, text) is not None


def host_of(address: str) -> str:
    """Returns the host of `host:port`, without the brackets of an IPv6 address.

    >>> host_of("[fe80::1]:2222")
    'fe80::1'
    """
    return address.rpartition(":")[0].strip("[]")


def _check_addresses(jobs: Mapping[str, tuple[str, ...]]) -> None:
    """Raises ClusterError if an address is not `host:port`, or if two tasks have the same one."""
    location_of: dict[str, str] = {}
    for name, addresses in jobs.items():
        for index, address in enumerate(addresses):
            location = f"cluster[{name!r}][{index}]"
            match = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
            if match is None:
                raise ClusterError(
                    f"{location} is {_shown(address)}, but an address must be 'host:port', "
                    "such as '10.0.0.1:2222' or '[fe80::1]:2222'."
                )
            if not 1 <= (whole_number(match["port"]) or 0) <= 65535:
                raise ClusterError(
                    f"{location} is {_shown(address)}: port {match['port'][:_SHOWN]} is outside "
                    "1..65535."
                )
            if address in location_of:
                raise ClusterError(
                    f"{location} is {address!r}, which {location_of[address]} has already: "
                    "each worker needs an address of its own."
                )
            location_of[address] = location

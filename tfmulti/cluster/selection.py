"""Chooses the strategy, the replicas and the batch sizes of a run, by pure functions."""

from __future__ import annotations

from dataclasses import dataclass

from tfmulti.cluster.cluster import Cluster
from tfmulti.config.registry import STRATEGIES
from tfmulti.errors import ConfigError, DeviceError, did_you_mean


@dataclass(frozen=True)
class Selection:
    """The strategy that was chosen for a run, and the reason.

    Attributes:
        strategy: `one_device`, `mirrored` or `multi_worker_mirrored`.
        local_replicas: the number of replicas of this worker.
        why: the reason, in words.
        device_type: `CPU` or `GPU`.
    """

    strategy: str
    local_replicas: int
    why: str
    device_type: str = "CPU"


def check_cluster_use(strategy: str, cluster: Cluster | None, ignore_cluster: bool) -> None:
    """Checks that the strategy fits the cluster of the environment.

    Args:
        strategy: the value of `--strategy`.
        cluster: the cluster of this process, or None.
        ignore_cluster: whether the run trains on this machine alone.

    Raises:
        ConfigError: there is a cluster, but the strategy uses one machine. Or the strategy needs a
            cluster, but there is none or it is ignored.
    """
    if cluster is not None and not ignore_cluster and strategy in ("one_device", "mirrored"):
        raise ConfigError(
            f"this process belongs to a cluster of {cluster.size} workers, but --strategy "
            f"{strategy} "
            "trains on this machine alone. Use --strategy multi_worker_mirrored, or "
            "--ignore_cluster to train alone on purpose."
        )
    if strategy == "multi_worker_mirrored" and (cluster is None or ignore_cluster):
        raise ConfigError(
            "--strategy multi_worker_mirrored needs a cluster, but "
            + ("--ignore_cluster leaves it out." if ignore_cluster else "TF_CONFIG is not set.")
            + " Set TF_CONFIG on every worker, or use --strategy mirrored on one machine."
        )


def check_replicas(replicas: int | None, gpus: int) -> None:
    """Checks `--replicas` against the machine's GPUs.

    Raises:
        DeviceError: the machine has GPUs, but fewer than the replicas.
    """
    if replicas is not None and gpus and replicas > gpus:
        raise DeviceError(
            f"--replicas is {replicas}, but this machine has {gpus} visible "
            f"GPU{'s' if gpus > 1 else ''}. Use at most {gpus}, or set CUDA_VISIBLE_DEVICES='' "
            "to try it on logical CPU devices."
        )


def select(
    strategy: str,
    *,
    replicas: int | None,
    cluster: Cluster | None,
    gpus: int,
    ignore_cluster: bool = False,
) -> Selection:
    """Returns the strategy and the number of replicas for a `--strategy` value on this machine.

    Args:
        strategy: the value of `--strategy`.
        replicas: the value of `--replicas`, or None for all GPUs or one CPU device.
        cluster: the cluster of this process, or None.
        gpus: the number of visible GPUs.
        ignore_cluster: whether the run trains on this machine alone.

    Raises:
        ConfigError: there is no such strategy, or it does not fit the cluster.
        DeviceError: the number of replicas does not fit the strategy or the devices.

    >>> select("auto", replicas=None, cluster=None, gpus=4).why
    'auto chose mirrored: this machine has 4 GPUs'
    """
    if strategy not in STRATEGIES:
        raise ConfigError(f"no strategy {strategy!r}; {did_you_mean(strategy, STRATEGIES)}")
    check_cluster_use(strategy, cluster, ignore_cluster)
    check_replicas(replicas, gpus)
    if ignore_cluster:
        cluster = None
    why = f"--strategy {strategy} was asked for"
    if strategy == "auto":
        strategy, reason = _automatic(replicas, cluster, gpus)
        why = f"auto chose {strategy}: {reason}"
    device_type = "GPU" if gpus else "CPU"
    if strategy == "one_device":
        if replicas not in (None, 1):
            raise DeviceError(
                f"--replicas is {replicas}, but --strategy one_device uses one. "
                "Use --strategy mirrored."
            )
        count = 1
    else:
        count = replicas or gpus or 1
    if strategy == "multi_worker_mirrored" and not gpus and count > 1:
        raise DeviceError(
            f"--replicas is {count}, but without GPUs each worker of multi_worker_mirrored is one "
            "replica on its CPU. Start more workers, or use --strategy mirrored."
        )
    if strategy == "mirrored" and not gpus and replicas is None:
        why += "; no GPU found, so one CPU device (try --replicas 2 for two logical ones)"
    return Selection(strategy, count, why, device_type)


def _automatic(replicas: int | None, cluster: Cluster | None, gpus: int) -> tuple[str, str]:
    """Returns the strategy for `--strategy auto`, and the reason in words."""
    if cluster is not None:
        return "multi_worker_mirrored", (
            f"this process belongs to a cluster of {cluster.size} "
            f"worker{'s' if cluster.size > 1 else ''}"
        )
    if replicas is not None and replicas > 1:
        return "mirrored", f"--replicas {replicas} means several devices"
    if gpus > 1 and replicas is None:
        return "mirrored", f"this machine has {gpus} GPUs"
    if gpus:
        return "one_device", "one GPU is used and no cluster is described"
    return "one_device", "this machine has no GPU and no cluster is described"


@dataclass(frozen=True)
class BatchSizes:
    """The batch sizes of a run.

    Attributes:
        global_batch_size: the rows of one step over all replicas.
        per_replica_batch_size: the rows of the largest replica slice.
        divides: whether all replica slices have the same number of rows.
    """

    global_batch_size: int
    per_replica_batch_size: int
    divides: bool


def batch_sizes(
    global_batch_size: int | None, per_replica_batch_size: int | None, replicas: int
) -> BatchSizes:
    """Returns both batch sizes: the given one, and the other one computed from it.

    Args:
        global_batch_size: the given global batch size, or None.
        per_replica_batch_size: the given per-replica batch size, or None.
        replicas: the number of replicas of all workers.

    Raises:
        ConfigError: none or both of the two sizes are given.

    >>> batch_sizes(None, 32, replicas=4).global_batch_size
    128
    """
    if (global_batch_size is None) == (per_replica_batch_size is None):
        raise ConfigError(
            "give exactly one of --global_batch_size and --per_replica_batch_size: "
            "the other follows from the number of replicas."
        )
    if global_batch_size is None:
        assert per_replica_batch_size is not None
        return BatchSizes(per_replica_batch_size * replicas, per_replica_batch_size, True)
    largest_share = -(-global_batch_size // replicas)
    return BatchSizes(global_batch_size, largest_share, global_batch_size % replicas == 0)

"""Tests which strategy is chosen, and the reason that is given."""

from __future__ import annotations

from typing import Any

import pytest

from tfmulti.cluster.cluster import Cluster, Task
from tfmulti.cluster.selection import batch_sizes, select
from tfmulti.errors import ConfigError, DeviceError, UserError

CLUSTER = Cluster(("a:1", "b:1"), Task("worker", 0))


def choose(strategy: str, **changes: Any) -> Any:
    return select(strategy, **{"replicas": None, "cluster": None, "gpus": 0, **changes})


def test_a_misspelt_strategy_is_refused() -> None:
    """It must not train on one machine in silence, although there is a cluster."""
    with pytest.raises(
        ConfigError, match="no strategy 'multiworker'; did you mean 'multi_worker_mirrored'"
    ):
        choose("multiworker", cluster=CLUSTER)


@pytest.mark.parametrize(
    ("changes", "strategy", "count", "device", "why"),
    [
        ({}, "one_device", 1, "CPU", "no GPU"),
        ({"gpus": 1}, "one_device", 1, "GPU", "one GPU"),
        ({"gpus": 4}, "mirrored", 4, "GPU", "4 GPUs"),
        ({"gpus": 4, "replicas": 1}, "one_device", 1, "GPU", "one GPU"),
        ({"gpus": 4, "replicas": 2}, "mirrored", 2, "GPU", "--replicas 2"),
        ({"replicas": 3}, "mirrored", 3, "CPU", "--replicas 3"),
        ({"cluster": CLUSTER}, "multi_worker_mirrored", 1, "CPU", "cluster of 2 workers"),
        ({"cluster": CLUSTER, "gpus": 2}, "multi_worker_mirrored", 2, "GPU", "2 workers"),
        ({"cluster": CLUSTER, "ignore_cluster": True}, "one_device", 1, "CPU", "no GPU"),
    ],
)
def test_auto(changes: Any, strategy: str, count: int, device: str, why: str) -> None:
    chosen = choose("auto", **changes)
    assert (chosen.strategy, chosen.local_replicas, chosen.device_type) == (strategy, count, device)
    assert chosen.why.startswith(f"auto chose {strategy}: ")
    assert why in chosen.why


def test_mirrored_without_a_gpu_runs_on_the_cpu_and_says_so() -> None:
    chosen = choose("mirrored")
    assert (chosen.local_replicas, chosen.device_type) == (1, "CPU")
    assert "try --replicas 2" in chosen.why


@pytest.mark.parametrize(
    ("strategy", "changes", "error", "message"),
    [
        ("mirrored", {"cluster": CLUSTER}, ConfigError, "cluster of 2.*--ignore_cluster"),
        ("one_device", {"cluster": CLUSTER}, ConfigError, "cluster of 2 workers"),
        ("multi_worker_mirrored", {}, ConfigError, "TF_CONFIG is not set"),
        (
            "multi_worker_mirrored",
            {"cluster": CLUSTER, "ignore_cluster": True},
            ConfigError,
            "--ignore_cluster leaves it out",
        ),
        ("mirrored", {"gpus": 2, "replicas": 3}, DeviceError, "replicas is 3, .* 2 visible GPUs"),
        ("one_device", {"replicas": 2}, DeviceError, "replicas is 2, but --strategy one_device"),
        ("auto", {"cluster": CLUSTER, "replicas": 2}, DeviceError, "each worker.*is one replica"),
    ],
)
def test_mistakes_are_named(
    strategy: str, changes: Any, error: type[UserError], message: str
) -> None:
    with pytest.raises(error, match=message):
        choose(strategy, **changes)


def test_batch_sizes_follow_from_each_other() -> None:
    assert batch_sizes(128, None, 4).per_replica_batch_size == 32
    assert batch_sizes(None, 32, 4).global_batch_size == 128
    uneven = batch_sizes(30, None, 8)
    assert (uneven.per_replica_batch_size, uneven.divides) == (4, False)


@pytest.mark.parametrize("pair", [(None, None), (8, 2)])
def test_exactly_one_batch_size(pair: tuple[int | None, int | None]) -> None:
    with pytest.raises(ConfigError, match="exactly one"):
        batch_sizes(*pair, 2)

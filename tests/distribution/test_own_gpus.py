"""Tests which GPUs TensorFlow sees in one of several processes of a machine."""

from __future__ import annotations

import pytest
import tensorflow as tf

from tfmulti.cluster.cluster import Cluster, Task
from tfmulti.distribution.strategies import own_gpus
from tfmulti.errors import DeviceError


class Devices:
    """Stands in for TensorFlow's list of devices, since this machine has no GPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        self.visible = self.physical = [f"GPU:{number}" for number in range(count)]
        monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: self.physical)
        monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: self.visible)
        monkeypatch.setattr(tf.config, "set_visible_devices", self._set)

    def _set(self, devices: list[str], kind: str) -> None:
        assert kind == "GPU"
        self.visible = devices


def cluster(local_rank: int, local_size: int) -> Cluster:
    addresses = tuple(f"h:{port}" for port in range(1, local_size + 1))
    task = Task("worker", local_rank)
    return Cluster(addresses, task, local_rank=local_rank, local_size=local_size)


@pytest.mark.parametrize(
    ("count", "rank", "size", "expected"),
    [
        (4, 1, 2, ["GPU:2", "GPU:3"]),
        (4, 3, 4, ["GPU:3"]),
        (4, 0, 1, ["GPU:0", "GPU:1", "GPU:2", "GPU:3"]),
        (1, 3, 4, ["GPU:0"]),
        (0, 1, 2, []),
    ],
)
def test_tensorflow_sees_the_gpus_of_this_process_alone(
    monkeypatch: pytest.MonkeyPatch, count: int, rank: int, size: int, expected: list[str]
) -> None:
    devices = Devices(monkeypatch, count)
    assert own_gpus(cluster(rank, size)) == len(expected)
    assert devices.visible == expected


def test_tensorflow_hides_nothing_that_cannot_be_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch, 3)
    with pytest.raises(DeviceError, match="2 processes of this machine see 3 GPUs, which cannot"):
        own_gpus(cluster(0, 2))
    assert devices.visible == devices.physical
    assert own_gpus(None) == 3

"""When workers meet: the rules, and where it cannot be."""

from __future__ import annotations

import pytest

from tfmulti.config.local_sync import SyncOptions
from tfmulti.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0,), "sync_every is 0, but it must be at least 1"),
        ((-3,), "sync_every is -3, but it must be at least 1"),
        ((2, 0.0), "outer_learning_rate is 0.0, but it must be above 0"),
        ((2, float("nan")), "outer_learning_rate is nan, but it must be above 0"),
        ((2, 0.7, 1.0), "outer_momentum is 1.0, but it must be at least 0 and below 1"),
        ((2, 0.7, -0.1), "outer_momentum is -0.1, but"),
    ],
)
def test_mistakes_are_named(values: tuple[float, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        SyncOptions(*values)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_workers_have_one_replica_each() -> None:
    message = "--sync_every 10 needs workers of one replica each, but each of the 2 workers has 4"
    with pytest.raises(ConfigError, match=f"{message}.*--nproc-per-node 4"):
        SyncOptions(10).check_place(workers=2, local_replicas=4)
    SyncOptions(10).check_place(workers=1, local_replicas=4)  # no effect there
    SyncOptions().check_place(workers=2, local_replicas=4)

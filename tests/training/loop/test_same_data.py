"""Tests that one worker of many with other data is found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import keras
import numpy as np
import pytest

from tfmulti.distribution.strategies import Placement
from tfmulti.errors import DataError
from tfmulti.training.input.interface import Feed
from tfmulti.training.loop import loops, same_data
from tfmulti.training.loop.stop_votes import Votes
from tfmulti.training.step.step_result import StepResult

WORKERS = 12
MODEL = cast("keras.Model", SimpleNamespace(distribute_strategy=None))
NO_VOTES = Votes()


def executed(digests: list[float], monkeypatch: pytest.MonkeyPatch) -> StepResult:
    """Returns the result of an execution in which the workers' batches had these digests."""
    monkeypatch.setattr(loops, "placement_of", lambda strategy: Placement(0, WORKERS, 1))
    fields: dict[str, Any] = dict.fromkeys(StepResult._fields)
    values = SimpleNamespace(numpy=lambda: np.array(digests, np.float32))
    result = StepResult(**fields | {"votes": list(NO_VOTES), "digests": values})
    return loops.run(MODEL, lambda *_: result, None, 1, NO_VOTES)


@pytest.mark.parametrize("rank", range(WORKERS))
def test_one_worker_of_many_has_read_another_batch(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """The digest is the largest one, and differs by one."""
    digests = [2.0**24 - 1] * WORKERS
    assert executed(digests, monkeypatch).votes == NO_VOTES
    digests[rank] -= 1
    with pytest.raises(DataError, match="the workers read different batches"):
        executed(digests, monkeypatch)


def feed(digest: int | None) -> Feed:
    return cast("Feed", SimpleNamespace(data=SimpleNamespace(digest=lambda: digest)))


@pytest.mark.parametrize("rank", range(WORKERS))
@pytest.mark.parametrize("other", [[feed(8)], [feed(None)], [None]])
def test_one_worker_of_many_has_other_data(
    monkeypatch: pytest.MonkeyPatch, rank: int, other: list[Feed | None]
) -> None:
    """It also differs if it has no digest, or no data."""
    sent: list[bytes | None] = []
    monkeypatch.setattr(
        same_data, "gather_bytes", lambda strategy, data: (sent.append(data), sent)[1]
    )
    same_data.check_same_data(MODEL, feed(7))
    sent *= WORKERS - 1
    same_data.check_same_data(MODEL, feed(7))
    del sent[rank]
    monkeypatch.setattr(
        same_data, "gather_bytes", lambda strategy, data: [*sent[:rank], data, *sent[rank:]]
    )
    with pytest.raises(DataError, match="the workers have different data"):
        same_data.check_same_data(MODEL, *other)

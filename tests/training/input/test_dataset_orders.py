"""Tests that all calls take a Dataset's batches in the order of plain Keras."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.dataset_orders import DATASETS
from tests.support.forked import Forks
from tests.support.processes import ONE_THREAD, processes

pytestmark = pytest.mark.mirrored

LIMIT_S = 300
KINDS = ("one_device", "with_checkpoint", "two_replicas")


@pytest.fixture(scope="module")
def orders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Returns, for each kind and each Dataset, the codes of the batches of each call."""
    folder = tmp_path_factory.mktemp("orders")
    with processes(folder / "logs", Forks) as group:
        for kinds in (("plain", "one_device", "with_checkpoint"), ("two_replicas",)):
            out = str(folder / f"{kinds[0]}.json")
            group.start(["-m", "tests.support.dataset_orders", out, *kinds], ONE_THREAD)
        finished = group.wait(LIMIT_S)
        assert not any(done.returncode for done in finished), group.logs()
    return {k: v for f in folder.glob("*.json") for k, v in json.loads(f.read_text()).items()}


@pytest.mark.parametrize("name", list(DATASETS))
@pytest.mark.parametrize("kind", KINDS)
def test_the_order_is_that_of_plain_keras(orders: dict[str, Any], kind: str, name: str) -> None:
    expected, found = orders["plain"][name], orders[kind][name]
    assert list(map(len, found)) == list(map(len, expected))
    for call, codes in enumerate(expected):
        assert found[call] == pytest.approx(codes, abs=1e-5), f"call {call}"


def test_most_of_these_datasets_change_their_order(orders: dict[str, Any]) -> None:
    """Otherwise the test above could not see which iterator a pass has used."""
    changing = [name for name, calls in orders["plain"].items() if calls[0] != calls[-1]]
    assert len(changing) >= len(DATASETS) - 4

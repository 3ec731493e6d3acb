"""Behaviours: functions that train small models at one place and return what a test checks.

A behaviour is a plain function of a module of this package. Each worker of a place runs it once
and returns values that JSON can hold. A test names its behaviour and its places:

    @behaviour(usage.nan_on_one_replica_stops_all, at=SEVERAL)
    def test_nan_on_one_replica_stops_all(results: list[Any]) -> None:
        for epochs, loss in results:

The fixture `results` is a list with what the behaviour returned on each worker, `errors` a list
with the type and the message of what it raised there, and `one_device` what it returns on one
device. If a test has a parameter `case`, it is the argument of the behaviour.
All behaviours of the selected tests run together, in the same processes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.support.places import Places, run_at, workers_at

# The limit of one place, on a machine whose cores other processes use too.
LIMIT_S = 2400


def behaviour(*functions: Callable[..., Any], at: Sequence[str]) -> Callable[[Any], Any]:
    """Runs a test once for each of the functions at each of the places."""

    def parametrize(test: Any) -> Any:
        test = pytest.mark.parametrize("behaviour", functions)(test)
        return pytest.mark.parametrize("place", at)(test)

    return parametrize


class BehaviourPlaces(Places):
    """What behaviours returned or raised at each place."""

    def _run(self, place: str) -> list[dict[str, Any]]:
        folder = self._folder / place
        argv = ["-m", __name__, str(folder / "out_RANK.json"), place, *self._names[place]]
        run_at(place, argv, folder / "logs", limit_s=LIMIT_S)
        ranks = range(workers_at(place))
        return [json.loads((folder / f"out_{rank}.json").read_text()) for rank in ranks]


def name_of(function: Callable[..., Any], case: str | None) -> str:
    return ":".join([function.__module__, function.__name__, *([] if case is None else [case])])

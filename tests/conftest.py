"""Fixtures of several folders, and the markers of tests."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import numpy as np
import pytest

from tests.support.behaviours import BehaviourPlaces, name_of
from tests.support.launching import launched, left_in
from tests.support.places import ONE_DEVICE

# Other processes use these cores, so that an example may take longer than Hypothesis allows.
hypothesis.settings.register_profile("without a clock", deadline=None)
hypothesis.settings.load_profile("without a clock")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-table",
        action="store_true",
        help="write the differences that tests/exactness measures to docs/",
    )


TIERS = ("unit", "mirrored", "multiworker", "processes", "hosts", "exactness", "programs")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks each test with its tier, and keeps tests that share processes together."""
    for item in items:
        folder = item.nodeid.split("/")[1] if item.nodeid.startswith("tests/") else ""
        if folder in ("exactness", "programs"):
            item.add_marker(folder)
            item.add_marker(pytest.mark.xdist_group(folder))
        elif item.get_closest_marker("mirrored") or item.get_closest_marker("multiworker"):
            # They share the processes of behaviours: one worker of pytest-xdist runs all of them.
            item.add_marker(pytest.mark.xdist_group("replicas"))
        elif not any(item.get_closest_marker(tier) for tier in TIERS):
            item.add_marker("unit")


def pytest_collection_finish() -> None:
    # The garbage collector need not look through TensorFlow and two thousand tests each time.
    gc.freeze()


@pytest.fixture(scope="session")
def behaviours(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BehaviourPlaces]:
    """Gives what the behaviours of the selected tests returned or raised at their places."""
    wanted = []
    for item in request.session.items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if "behaviour" in params:
            name = name_of(params["behaviour"], params.get("case"))
            places = [params["place"]] + [ONE_DEVICE] * ("one_device" in item.fixturenames)
            wanted += [(place, name) for place in places]
    places = BehaviourPlaces(tmp_path_factory.mktemp("behaviours"), wanted)
    yield places
    places.close()


@pytest.fixture
def case() -> None:
    """Stands for the argument of a behaviour that takes none."""


Outcomes = Callable[[str], list[dict[str, Any]]]


@pytest.fixture
def outcomes(
    behaviours: BehaviourPlaces, behaviour: Callable[..., Any], case: str | None
) -> Outcomes:
    """Gives `outcomes(place)`: what the test's behaviour returned or raised on each worker."""
    return lambda place: [worker[name_of(behaviour, case)] for worker in behaviours[place]]


def _result(outcome: dict[str, Any]) -> Any:
    if "error" in outcome:
        pytest.fail(outcome["traceback"], pytrace=False)
    return outcome["result"]


@pytest.fixture
def results(outcomes: Outcomes, place: str) -> list[Any]:
    """Returns what the test's behaviour returned on each worker of the test's place."""
    return [_result(outcome) for outcome in outcomes(place)]


@pytest.fixture
def one_device(outcomes: Outcomes) -> Any:
    """Returns what the test's behaviour returned on one device."""
    return _result(outcomes(ONE_DEVICE)[0])


@pytest.fixture
def errors(outcomes: Outcomes, place: str) -> list[list[str]]:
    """Returns the type and the message of what the test's behaviour raised on each worker."""
    found = outcomes(place)
    assert all("error" in outcome for outcome in found), found
    return [outcome["error"] for outcome in found]


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Returns the arrays that a run of two workers without a fault writes."""
    folder = tmp_path_factory.mktemp("whole")
    done = launched(folder)
    assert done.returncode == 0, done.stderr
    return left_in(folder)

"""Defines the fixtures that several folders use, and the markers of tests."""

from __future__ import annotations

import functools
import gc
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
from xdist.scheduler import LoadScopeScheduling

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


CLUSTERS = ("slurm", "mpi", "ray", "exactness", "programs")
TIERS = ("unit", "mirrored", "multiworker", "processes", "hosts", *CLUSTERS)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives each test that has no marker of a tier the marker of its folder, or `unit`."""
    for item in items:
        if not any(item.get_closest_marker(tier) for tier in TIERS):
            folder = item.nodeid.split("/")[1]
            item.add_marker(folder if folder in TIERS else "unit")


@functools.cache
def _runs_of(path: str) -> str | None:
    """Returns a name of the processes that the tests of a file share, or None."""
    folder, name = path.split("/")[1], Path(path).stem
    if folder in ("exactness", "programs"):
        return folder
    if name in ("test_slurm", "test_ray"):
        return name
    marked = re.search(r"^pytestmark = pytest.mark.(mirrored|multiworker)$", _text(path), re.M)
    return "replicas" if marked else None


def _text(path: str) -> str:
    return (Path(__file__).parents[1] / path).read_text(encoding="utf-8")


class TogetherByRuns(LoadScopeScheduling):  # type: ignore[misc]
    """Keeps together, in one of pytest-xdist's processes, the tests that read the same runs.

    The scheduler sees no markers, and pytest-xdist's own groups do not work with pytest 9.
    """

    def _split_scope(self, nodeid: str) -> str:
        return _runs_of(nodeid.partition("::")[0]) or nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> TogetherByRuns:
    return TogetherByRuns(config, log)


def pytest_collection_finish() -> None:
    # The collector then does not look through TensorFlow and two thousand tests each time.
    gc.freeze()


@pytest.fixture(autouse=True)
def folder_stays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test that leaves another working folder to the tests after it."""
    before = Path.cwd()
    yield
    monkeypatch.undo()
    after = os.getcwd()
    os.chdir(before)
    assert after == str(before), f"this test changed the working folder to {after}"


@pytest.fixture(scope="session")
def behaviours(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[BehaviourPlaces]:
    """Yields the results and errors of the selected tests' behaviours, at their places."""
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
    """Yields a function of a place: the result or error of the test's behaviour on each worker."""
    return lambda place: [worker[name_of(behaviour, case)] for worker in behaviours[place]]


def _result(outcome: dict[str, Any]) -> Any:
    if "error" in outcome:
        pytest.fail(outcome["traceback"], pytrace=False)
    return outcome["result"]


@pytest.fixture
def results(outcomes: Outcomes, place: str) -> list[Any]:
    """Returns the results of the test's behaviour on the workers of the test's place."""
    return [_result(outcome) for outcome in outcomes(place)]


@pytest.fixture
def one_device(outcomes: Outcomes) -> Any:
    """Returns the result of the test's behaviour on one device."""
    return _result(outcomes(ONE_DEVICE)[0])


@pytest.fixture
def errors(outcomes: Outcomes, place: str) -> list[list[str]]:
    """Returns the type and the message of the behaviour's error on each worker."""
    found = outcomes(place)
    assert all("error" in outcome for outcome in found), found
    return [outcome["error"] for outcome in found]


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, np.ndarray]:
    """Returns the arrays that a run of two workers without a fault writes."""
    folder = tmp_path_factory.mktemp("whole")
    done = launched(folder, "", "--no-standby")
    assert done.returncode == 0, done.stderr
    return left_in(folder)

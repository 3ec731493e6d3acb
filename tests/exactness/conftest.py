from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.exactness import table
from tests.exactness.running import CasePlaces
from tests.support.cases import CASES


@pytest.fixture(scope="session")
def places(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CasePlaces]:
    """Yields the results of the selected cases, at their places and at the references."""
    wanted = (
        (place, str(params["case"]))
        for item in request.session.items
        if isinstance(item, pytest.Function) and "places" in item.fixturenames
        for params in [item.callspec.params]
        for place in (params["place"], CASES[params["case"]].compare)
    )
    found = CasePlaces(tmp_path_factory.mktemp("exactness"), wanted)
    yield found
    found.close()


@pytest.fixture(scope="session")
def measured(request: pytest.FixtureRequest) -> Iterator[table.Found]:
    """Yields a dictionary for the measured differences, which `--write-table` writes."""
    found: table.Found = {}
    yield found
    if request.config.getoption("--write-table"):
        table.write(found)

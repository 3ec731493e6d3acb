from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.programs.running import ProgramPlaces


@pytest.fixture(scope="session")
def left(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ProgramPlaces]:
    """Yields the results of the selected programs, at their places and on one device."""
    wanted = (
        (place, str(params["name"]))
        for item in request.session.items
        if isinstance(item, pytest.Function) and "left" in item.fixturenames
        for params in [item.callspec.params]
        for place in ("plain", *([params["place"]] if "place" in params else []))
    )
    found = ProgramPlaces(tmp_path_factory.mktemp("programs"), wanted)
    yield found
    found.close()

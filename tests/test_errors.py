"""Tests the texts that all errors share."""

from __future__ import annotations

import pytest

from tfmulti.errors import MOST_LISTED, did_you_mean

pytestmark = pytest.mark.unit


def test_a_long_list_of_names_is_shown_only_without_a_near_name() -> None:
    names = [f"flag_{number}" for number in range(MOST_LISTED)]
    assert did_you_mean("epoch", [*names, "epochs"]) == "did you mean 'epochs'?"
    assert did_you_mean("epoch", [*names[1:], "epochs"]).startswith("did you mean 'epochs'? Known")
    assert did_you_mean("nothing", [*names, "epochs"]).startswith("known: epochs, flag_0, ")

"""Tests the texts that all errors share, and those of errors that are nobody's mistake."""

from __future__ import annotations

import errno
import re

import pytest

from tfmulti import fit
from tfmulti.errors import MOST_LISTED, did_you_mean

pytestmark = pytest.mark.unit


def test_a_long_list_of_names_is_shown_only_without_a_near_name() -> None:
    names = [f"flag_{number}" for number in range(MOST_LISTED)]
    assert did_you_mean("epoch", [*names, "epochs"]) == "did you mean 'epochs'?"
    assert did_you_mean("epoch", [*names[1:], "epochs"]).startswith("did you mean 'epochs'? Known")
    assert did_you_mean("nothing", [*names, "epochs"]).startswith("known: epochs, flag_0, ")


def test_a_full_disk_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(argv: list[str]) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(fit, "fit", fails)
    assert fit.main(["tfmulti.fit"]) == 1
    line = r"tfmulti: the disk is full\. .* continues from its newest checkpoint\. \(docs: .*\)\n"
    assert re.fullmatch(line, capsys.readouterr().err)

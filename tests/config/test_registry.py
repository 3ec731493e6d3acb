"""Tests that names of data sets and functions are checked before anything is imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfmulti.config import registry
from tfmulti.config.fit_config import FitConfig
from tfmulti.errors import ConfigError


def test_a_missing_function_is_reported_before_its_batch_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_data_here.py").write_text("def load_digits():\n    raise SystemExit\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError, match=r"no function 'load_digit' .* did you mean 'load_digits'"
    ):
        FitConfig(dataset="own_data_here:load_digit")
    with pytest.raises(ConfigError, match="no module 'own_data_there'"):
        FitConfig(dataset="own_data_there:load_digits")
    with pytest.raises(ConfigError, match="no batch size was given for"):
        FitConfig(dataset="own_data_here:load_digits")


@pytest.mark.parametrize(
    "source",
    [
        "load = lambda: None",
        "from os import path as load",
        "from os.path import *",
        "globals()['load'] = print",
        "for load in (1, 2): pass",
        "def __getattr__(name): ...",
    ],
)
def test_a_function_that_may_be_made_later_is_not_refused(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"own_data_{abs(hash(source))}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    registry.check_dataset(f"{name}:load")

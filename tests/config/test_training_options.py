"""Tests the rules of the training options, which flags, help, checks and `prepare` share."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tfmulti.config.fit_config import FitConfig
from tfmulti.config.flags import help_text, make_flags
from tfmulti.config.training_options import TrainingOptions, changed
from tfmulti.errors import ConfigError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"microbatches": 0}, "microbatches is 0, but it must be at least 1"),
        ({"verify_steps": 0}, "verify_steps is 0, but it must be at least 1"),
        ({"reader_threads": -1}, "reader_threads is -1, but it must be at least 0"),
        ({"gradient_compression": "float8"}, "no gradient_compression 'float8' for gradient_comp"),
        ({"steps_per_execution": "many"}, "no steps_per_execution 'many' for steps_per_execution"),
        ({"steps_per_execution": 4}, "steps_per_execution is 4, but it must be of type str"),
        ({"sync_batch_norm": 1}, "sync_batch_norm is 1, but it must be of type bool"),
    ],
)
def test_mistakes_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}") as caught:
        changed(TrainingOptions(), values)
    assert "\n" not in str(caught.value)


def test_a_misspelled_option_is_one_line() -> None:
    words = "no option 'microbatch' of training; did you mean 'microbatches'"
    with pytest.raises(ConfigError, match=words):
        changed(TrainingOptions(), {"microbatch": 2})


def test_changes_replace_fields() -> None:
    options = changed(TrainingOptions(microbatches=4, seed=1), {"seed": 2})
    assert options == TrainingOptions(microbatches=4, seed=2)


def test_a_run_has_all_options_of_training() -> None:
    """One declaration serves prepare, flags and help."""
    config = FitConfig(microbatches=2, verify=True)
    options = config.training_options
    for item in dataclasses.fields(TrainingOptions):
        if item.name != "steps_per_execution":
            assert getattr(options, item.name) == getattr(config, item.name)
        assert f"--{item.name} (" in help_text("", make_flags())
    assert options.steps_per_execution == "auto"
    assert FitConfig(steps_per_execution=3).training_options.steps_per_execution is None


def test_help_begins_with_what_a_run_is() -> None:
    lines = help_text("", make_flags()).splitlines()
    names = [line.split()[0] for line in lines if line.startswith("  --")]
    assert names.index("--dataset") < names.index("--microbatches")

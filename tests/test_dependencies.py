"""Tests which versions of other packages tfmulti accepts."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tfmulti.keras_patches.versions import TESTED

SETUP = Path(__file__).parents[1] / "setup.cfg"


def accepted(name: str, version: str) -> bool:
    """Whether all of setup.cfg's requirements of a package accept a version."""
    setup = configparser.ConfigParser()
    setup.read(SETUP)
    lines = [setup["options"]["install_requires"], *setup["options.extras_require"].values()]
    all_requirements = [Requirement(line) for line in "\n".join(lines).split("\n") if line]
    found = [requirement for requirement in all_requirements if requirement.name == name]
    assert found
    return all(requirement.specifier.contains(version) for requirement in found)


@pytest.mark.parametrize(
    ("name", "version"),
    [
        ("pyarrow", "16.1.0"),
        ("opencv-python-headless", "4.11.0.86"),
        ("keras", "3.14.0"),
        ("keras", "3.17.0"),
        ("numpy", "1.25.2"),
        ("tensorflow", "2.22.0"),
    ],
)
def test_versions_with_known_holes_and_untried_ones_are_not_accepted(
    name: str, version: str
) -> None:
    assert not accepted(name, version)


@pytest.mark.parametrize("name", TESTED)
def test_the_tested_versions_are_accepted(name: str) -> None:
    assert accepted(name.lower(), f"{TESTED[name]}.0")

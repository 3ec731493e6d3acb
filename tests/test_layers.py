"""Tests the contract of imports, and which packages import no TensorFlow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import tfmulti

PACKAGE = Path(tfmulti.__file__).parent
STANDARD_LIBRARY_ALONE = ("errors", "config", "cluster", "launch")
WITHOUT_TENSORFLOW = ("data", "run.validation", "bench.__main__", "fit")
# Some modules may import more: flags need absl, and numbers need NumPy.
HEAVIER = {"config": ("config.flags",), "data": ("data.__main__", "data.sources.user")}


def modules(*packages: str) -> dict[str, Path]:
    """Returns the modules of packages, or all of them."""
    found = {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path
        for path in PACKAGE.rglob("*.py")
        if path.name != "__init__.py"
    }
    return {
        name: path
        for name, path in found.items()
        if not packages or any(f"{name}.".startswith(f"{package}.") for package in packages)
    }


def test_imports_keep_the_contract() -> None:
    """The contract stands in pyproject.toml, and is the only map of layers."""
    argv = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=PACKAGE.parent, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "5 kept, 0 broken" in done.stdout


def light(*packages: str) -> list[str]:
    """Returns the modules of packages, except for the modules that need more."""
    heavier = {name for names in HEAVIER.values() for name in names}
    return sorted(set(modules(*packages)) - heavier)


@pytest.mark.parametrize(
    ("names", "forbidden"),
    [
        (light(*STANDARD_LIBRARY_ALONE), ["numpy", "absl", "keras", "tensorflow", "matplotlib"]),
        (light(*WITHOUT_TENSORFLOW), ["keras", "tensorflow", "matplotlib"]),
    ],
)
def test_light_modules_stay_light(names: list[str], forbidden: list[str]) -> None:
    code = (
        f"import sys, json\nfor n in {names!r}: __import__('tfmulti.' + n)\n"
        f"print(json.dumps([m for m in {forbidden!r} if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def test_private_names_are_touched_in_one_place() -> None:
    words = (
        "keras.src",
        "tensorflow.python",
        "_distribute_strategy",
        "_compile_loss",
        "_loss_tracker",
        "_symbolic_build",
        "_all_reduce_sum",
    )
    guilty = [
        (name, word)
        for name, path in modules().items()
        for word in words
        if word in path.read_text() and not name.startswith("keras_patches.")
    ]
    assert not guilty


def test_public_names_are_lazy_and_all_there() -> None:
    code = "import sys, tfmulti; dir(tfmulti); print('tensorflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert set(tfmulti.__all__) <= set(dir(tfmulti))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tfmulti.nothing

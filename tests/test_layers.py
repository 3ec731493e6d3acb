"""Tests the contract of imports, and which packages import no TensorFlow."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
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


# Python documents these names, in spite of their underscore.
OF_PYTHON = {"_replace", "_fields", "_asdict", "_exit", "_current_frames", "_actions"}
# TensorFlow's graphs have no other name for the gradient of an operation. The package
# `distribution`, which uses it, is below `keras_patches`.
OF_GRAPHS = {"_gradient_op_type"}
OWN = ("self", "cls")
PRIVATE = re.compile(r"_[a-z]\w*|__internal__")


def attributes(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields the object and the name of each private attribute that a module touches."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.fullmatch(node.attr):
            yield ast.unparse(node.value), node.attr


def texts(tree: ast.AST) -> set[str]:
    """Returns the texts of a module that look like private names."""
    found = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    return {text for text in found if isinstance(text, str) and PRIVATE.fullmatch(text)}


def names_of_ours(tree: ast.AST) -> set[str]:
    """Returns the names that a module defines, and the attributes that its classes set."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) in OWN else set()
    return found


def test_private_names_are_touched_in_one_place() -> None:
    """Only `keras_patches` touches them, and the table of each of its modules lists them."""
    trees = {name: ast.parse(path.read_text()) for name, path in modules().items()}
    patches = {name: trees.pop(name) for name in modules("keras_patches")}
    tables = {name: ast.get_docstring(tree) or "" for name, tree in patches.items()}
    known = set(re.findall(r"`(?:[\w.]*\.)?(_[a-z]\w*)`", " ".join(tables.values())))
    defined = set.union(OF_PYTHON, OF_GRAPHS, *map(names_of_ours, trees.values()))
    ours = defined - known
    guilty = {(name, text) for name, tree in trees.items() for text in texts(tree) & known}
    for name, tree in trees.items():
        source = modules()[name].read_text()
        guilty |= {(name, word) for word in ("keras.src", "tensorflow.python") if word in source}
        for thing, attribute in attributes(tree):
            if attribute not in (defined if thing in OWN else ours):
                guilty.add((name, attribute))
    assert not guilty
    unlisted = {
        (name, word)
        for name, tree in patches.items()
        for word in {word for thing, word in attributes(tree) if thing not in OWN} | texts(tree)
        if word not in OF_PYTHON | names_of_ours(tree) and not word.startswith("_tfmulti")
        if not re.search(rf"\b{word}\b", tables[name])
    }
    assert not unlisted


def test_public_names_are_lazy_and_all_there() -> None:
    code = "import sys, tfmulti; dir(tfmulti); print('tensorflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
    assert set(tfmulti.__all__) <= set(dir(tfmulti))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = tfmulti.nothing

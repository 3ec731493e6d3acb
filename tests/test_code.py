"""Tests how the code is written: few parameters, and a docstring for each public name."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import tfmulti

PACKAGE = Path(tfmulti.__file__).parent
MOST_PARAMETERS = 6
# These have the parameters of functions of Keras, which they replace or resemble.
AS_KERAS = {
    "training.distributed_model.fit",
    "training.distributed_model.evaluate",
    "training.verification.verification.verify",
    "keras_patches.cpu_speed.kernels.attention",
}


def functions() -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yields each function of the package with its module and name."""
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield f"{module}.{node.name}", node


def test_no_function_has_many_parameters() -> None:
    assert len(AS_KERAS) <= 5
    many = set()
    for name, node in functions():
        given = node.args
        all_of_them = [*given.posonlyargs, *given.args, *given.kwonlyargs]
        if sum(arg.arg not in ("self", "cls") for arg in all_of_them) > MOST_PARAMETERS:
            many.add(name)
    assert many == AS_KERAS


def test_public_names_say_what_they_take_return_and_raise() -> None:
    """They have Google's sections: Args, and Returns if the first line does not say it."""
    lacking = []
    for name in tfmulti.__all__:
        thing = getattr(tfmulti, name)
        text = inspect.getdoc(thing) or ""
        if not text:
            lacking.append(f"{name} has no docstring")
        if inspect.isfunction(thing):
            named = [p for p in inspect.signature(thing).parameters if p != "self"]
            undescribed = [p for p in named if not re.search(rf"\n    \**{p}: ", text)]
            lacking += [f"{name} does not describe {p}" for p in undescribed]
            if not re.search(r"Returns?\b|Compares", text):
                lacking.append(f"{name} does not say what it returns")
            if "Raises:" not in text:
                lacking.append(f"{name} does not say what it raises")
    assert not lacking


def test_every_module_and_public_function_has_a_docstring() -> None:
    lacking = [
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]
    assert not lacking

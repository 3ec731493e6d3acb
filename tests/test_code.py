"""Tests how the code is written: few parameters, and a docstring for each public name."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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


def undescribed_parameters(thing: Any) -> list[str]:
    """Returns the parameters that a docstring describes neither under Args nor in its text."""
    text = inspect.getdoc(thing) or ""
    if dataclasses.is_dataclass(thing):
        # The help of a flag describes the field that it sets.
        described = {field.name for field in dataclasses.fields(thing) if field.metadata}
    else:
        described = {"self", "cls"}
    return [
        name
        for name in inspect.signature(thing).parameters
        if name not in described and not re.search(rf"(\n +|, )\**{name}(, \w+)*: |`{name}`", text)
    ]


def gaps_of(name: str, thing: Any) -> Iterator[str]:
    """Yields what the docstring of a public function, method or class lacks."""
    text = inspect.getdoc(thing) or ""
    if not text:
        yield f"{name} has no docstring"
    if isinstance(thing, property):
        return
    is_error = inspect.isclass(thing) and issubclass(thing, BaseException)
    # Keras documents the parameters of its hooks.
    if not is_error and not name.rpartition(".")[2].startswith("on_"):
        yield from (f"{name} does not describe {p}" for p in undescribed_parameters(thing))
    if inspect.isclass(thing):
        return
    returns = inspect.signature(thing).return_annotation
    if returns != "None" and not re.search(r"Returns?\b|Yields|Compares", text):
        yield f"{name} does not say what it returns"
    code = ast.parse(textwrap.dedent(inspect.getsource(thing)))
    raises = any(isinstance(node, ast.Raise) and node.exc for node in ast.walk(code))
    if (raises or "." not in name) and not re.search(r"Raises:|\braises\b", text):
        yield f"{name} does not say what it raises"


def test_public_names_say_what_they_take_return_and_raise() -> None:
    """Also the methods of public classes. Args, or the text, describes each parameter."""
    gaps: list[str] = []
    for name in tfmulti.__all__:
        thing = getattr(tfmulti, name)
        gaps += gaps_of(name, thing)
        for method in vars(thing) if inspect.isclass(thing) else ():
            member = getattr(thing, method)
            if not method.startswith("_") and (
                inspect.isroutine(member) or isinstance(member, property)
            ):
                gaps += gaps_of(f"{name}.{method}", member)
    assert not gaps


def undocumented_methods(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields the class and the name of each public method without a docstring of its own."""
    for owner in ast.walk(tree):
        if isinstance(owner, ast.ClassDef) and not owner.name.startswith("_"):
            for method in owner.body:
                if isinstance(method, ast.FunctionDef) and not ast.get_docstring(method):
                    yield owner.name, method.name


def test_every_module_and_public_method_has_a_docstring() -> None:
    """A method may inherit its docstring. Ruff finds functions and classes without one."""
    lacking = []
    for path in PACKAGE.rglob("*.py"):
        module = ".".join(("tfmulti", *path.relative_to(PACKAGE).with_suffix("").parts))
        tree = ast.parse(path.read_text())
        if not ast.get_docstring(tree):
            lacking.append(module)
        for owner, method in undocumented_methods(tree):
            if not method.startswith("_"):
                found = getattr(getattr(importlib.import_module(module), owner), method)
                if not inspect.getdoc(found):
                    lacking.append(f"{module}.{owner}.{method}")
    assert not lacking

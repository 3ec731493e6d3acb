"""Tells whether a function takes names of attributes from data: `getattr(self, self.kind)`."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Mapping

from tfmulti.training.state import relocation

# What reads an attribute by a name that is a text.
_BY_NAME = frozenset({"getattr", "vars", "__dict__", "attrgetter"})


@functools.cache
def takes_names_from_data(code: types.CodeType) -> bool:
    """Returns whether a code reads an attribute whose name is not in its source, even in part.

    Such a name is an argument of `getattr` or `attrgetter`, or what follows on `vars(…)` or
    `__dict__`.
    """
    if not _BY_NAME & relocation.names_in(code):
        return False
    try:
        source = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError, TypeError):
        return True
    nodes = list(ast.walk(source))
    values = _values_of_names(nodes)
    # What `vars(…)` and `__dict__` are asked for by a name.
    asked = {id(n.value): n.slice for n in nodes if isinstance(n, ast.Subscript)}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    for call in calls:
        if isinstance(call.func, ast.Attribute) and call.args:
            asked.setdefault(id(call.func.value), call.args[0])
    names: list[ast.expr | None] = []
    for call in calls:
        function = ast.unparse(call.func).rpartition(".")[2]
        if function == "getattr":
            names += call.args[1:2]
        elif function == "attrgetter":
            names += call.args
        elif function == "vars":
            names.append(asked.get(id(call)))
    dicts = (n for n in nodes if isinstance(n, ast.Attribute) and n.attr == "__dict__")
    names += [asked.get(id(node)) for node in dicts]
    return not all(_has_text(name, values) for name in names)


def _values_of_names(nodes: list[ast.AST]) -> dict[str, list[ast.expr]]:
    """Returns the expressions whose values, or entries, the local variables of a source get."""
    values: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, (ast.For, ast.comprehension)):
            targets, value = [node.target], node.iter
        else:
            continue
        for name in (part for target in targets for part in ast.walk(target)):
            if isinstance(name, ast.Name):
                values.setdefault(name.id, []).append(value)
    return values


def _has_text(node: ast.expr | None, values: Mapping[str, list[ast.expr]]) -> bool:
    """Returns whether a source has the text that an expression gives, or a part of it."""
    if isinstance(node, ast.Name):
        of_name = values.get(node.id, [])
        others = {name: of_other for name, of_other in values.items() if name != node.id}
        return bool(of_name) and all(_has_text(value, others) for value in of_name)
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return all(_has_text(entry, values) for entry in node.elts)
    if isinstance(node, (ast.JoinedStr, ast.BinOp)):
        return any(isinstance(part, ast.Constant) for part in ast.walk(node))
    return isinstance(node, ast.Constant)

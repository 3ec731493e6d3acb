"""Tells whether a function takes names of attributes from data: `getattr(self, self.kind)`."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Iterator, Mapping

from tfmulti.training.state.code_names import BY_NAME, names_in


@functools.cache
def takes_names_from_data(code: types.CodeType) -> bool:
    """Returns whether a code reads an attribute whose name is not in its source, even in part.

    Such a name is an argument of `getattr` or `attrgetter`, or what follows on `vars(…)` or
    `__dict__`.
    """
    if not BY_NAME & names_in(code):
        return False
    try:
        source = ast.parse(textwrap.dedent(inspect.getsource(code)))
        is_source = any(_names(code) == _names(c) for c in _inside(compile(source, "", "exec")))
    except Exception:  # The file may have been changed to anything since it was imported.
        return True
    if not is_source:
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
        elif function in ("attrgetter", "__getattribute__"):
            names += call.args
        elif function == "vars":
            names.append(asked.get(id(call)))
    dicts = (n for n in nodes if isinstance(n, ast.Attribute) and n.attr == "__dict__")
    names += [asked.get(id(node)) for node in dicts]
    return not all(_has_text(name, values) for name in names)


def _inside(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yields a code and the codes of the functions inside it."""
    yield code
    for part in code.co_consts:
        if isinstance(part, types.CodeType):
            yield from _inside(part)


def _names(code: types.CodeType) -> tuple[tuple[str, ...], set[str]]:
    """Returns the names of a code, which are the same if its function is compiled alone."""
    return code.co_varnames, {*code.co_names, *code.co_freevars} - {"__class__"}


def _values_of_names(nodes: list[ast.AST]) -> dict[str, list[ast.expr | None]]:
    """Returns what the local variables of a source get: expressions, or those of their entries.

    The list of a variable has None for a value that is not known, such as that of a parameter.
    """
    values: dict[str, list[ast.expr | None]] = {}
    known: set[int] = set()
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
                known.add(id(name))
    for node in nodes:
        if isinstance(node, ast.arg):
            values.setdefault(node.arg, []).append(None)
        elif (
            isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in known
        ):
            values.setdefault(node.id, []).append(None)
    return values


def _has_text(node: ast.expr | None, values: Mapping[str, list[ast.expr | None]]) -> bool:
    """Returns whether a source has the text that an expression gives, or a part of it.

    The part is one that `StepCode.may_read` knows: it begins or ends with `_`.
    """
    if isinstance(node, ast.Name):
        of_name = values.get(node.id, [])
        others = {name: of_other for name, of_other in values.items() if name != node.id}
        return bool(of_name) and all(_has_text(value, others) for value in of_name)
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return all(_has_text(entry, values) for entry in node.elts)
    if isinstance(node, (ast.JoinedStr, ast.BinOp)):
        parts = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
        return any(isinstance(p, str) and len(p) > 1 and "_" in (p[0], p[-1]) for p in parts)
    return isinstance(node, ast.Constant)

"""How a file is written: it opens with its job, stays small, keeps no state and does no work at import.

Knows one file at a time, except for the median length. Who may import whom is floors.py.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import tokenize
from collections.abc import Iterator, Mapping

from tests.house.source_tree import Module

MEDIAN_LINES = 130
LONGEST_LINES = 300

LONG_FILES: Mapping[str, str] = {}
"""Path of a file past LONGEST_LINES -> why it is one thing. An entry that is no longer needed is refused."""

_FRESH_CONTAINERS = ("dict", "list", "set", "bytearray", "defaultdict", "OrderedDict", "Counter", "deque")
_SILENCED_WITHOUT_REASON = re.compile(r"#\s*(type:\s*ignore|noqa)(\[[^\]]*\]|:\s*[A-Z0-9, ]+)?\s*$")


def habit_violations(tree: Mapping[str, Module], long_files: Mapping[str, str] = LONG_FILES) -> list[str]:
    """Every breach, as a line for people; empty when all files are in order."""
    lines = [line for module in tree.values() for line in _of_one_file(module)]
    return lines + list(_lengths(tree, long_files))


def _of_one_file(module: Module) -> Iterator[str]:
    if not ast.get_docstring(module.syntax):
        yield f"{module.path}:1: opens without saying its job; begin with a docstring"
    for statement in module.syntax.body:
        yield from _at_import(module.path, statement)
    for node in ast.walk(module.syntax):
        if isinstance(node, ast.Global):
            yield f"{module.path}:{node.lineno}: global {', '.join(node.names)}; pass it by hand"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "hasattr":
            yield f"{module.path}:{node.lineno}: hasattr; say in a type what is there"
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT and _SILENCED_WITHOUT_REASON.search(token.string):
            yield f"{module.path}:{token.start[0]}: {token.string} - give the reason in the same line"


def _at_import(path: str, statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, (ast.Call, ast.Await)):
        yield f"{path}:{statement.lineno}: runs {ast.unparse(statement)[:60]} at import"
    elif isinstance(statement, (ast.For, ast.While, ast.With, ast.Try)):
        yield f"{path}:{statement.lineno}: runs a {type(statement).__name__.lower()} statement at import"
    elif isinstance(statement, (ast.Assign, ast.AnnAssign)) and _is_fresh_container(statement.value):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        for target in targets:
            if isinstance(target, ast.Name) and not _is_constant(target.id):
                yield f"{path}:{statement.lineno}: {target.id} is mutable state at module level"


def _is_fresh_container(value: ast.expr | None) -> bool:
    if isinstance(value, (ast.Dict, ast.List, ast.Set, ast.DictComp, ast.ListComp, ast.SetComp)):
        return True
    if not isinstance(value, ast.Call):
        return False
    function = value.func.attr if isinstance(value.func, ast.Attribute) else ast.unparse(value.func)
    return function in _FRESH_CONTAINERS


def _is_constant(name: str) -> bool:
    return name.isupper() or (name.startswith("__") and name.endswith("__"))


def _lengths(tree: Mapping[str, Module], long_files: Mapping[str, str]) -> Iterator[str]:
    files = [module for module in tree.values() if not module.path.endswith("__init__.py")]
    if files and (median := statistics.median(module.line_count for module in files)) > MEDIAN_LINES:
        yield f"the median file has {median:.0f} lines; {MEDIAN_LINES} is the most: one noun a file"
    lengths = {module.path: module.line_count for module in files}
    for path, count in lengths.items():
        if count > LONGEST_LINES and not long_files.get(path):
            yield f"{path}: {count} lines; split it, or give the reason in LONG_FILES (tests/house/habits.py)"
    for path in long_files:
        if lengths.get(path, 0) <= LONGEST_LINES:
            yield f"{path}: needs no entry in LONG_FILES any more; remove it"

"""The Python files below a root as the house rules see them: names, imports, lines.

Knows syntax only: nothing is imported or run, and which import is allowed is not decided here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Import:
    """One imported module, wherever in the file it is imported."""

    name: str  # dotted; a module of the tree where the tree has it, else as written
    line: int
    at_start: bool  # runs when the file is imported: not inside a function, not for type checkers only


@dataclass(frozen=True, slots=True)
class Module:
    """One parsed file."""

    name: str  # dotted, a package by its own name
    path: str  # relative to the root, for people
    text: str
    syntax: ast.Module
    imports: tuple[Import, ...] = field(default=())

    @property
    def line_count(self) -> int:
        """Lines of the file."""
        return len(self.text.splitlines())


def read_tree(root: Path, *packages: str) -> dict[str, Module]:
    """Every module of `packages` below `root`, by dotted name.

    Raises:
        SyntaxError: a file is not Python.
    """
    files = {
        _dotted(path.relative_to(root)): path
        for package in packages
        for path in sorted((root / package).rglob("*.py"))
    }
    return {
        name: _parse(name, str(path.relative_to(root)), path.read_text(), set(files))
        for name, path in files.items()
    }


def packages_of(name: str) -> list[str]:
    """The packages that importing `name` runs first: `a.b.c` -> `a`, `a.b`."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def reachable(tree: Mapping[str, Module], start: str) -> dict[str, list[str]]:
    """Everything that `start` imports, directly or through the tree, lazily or not, and the way there.

    Returns:
        imported name -> the chain of names from `start` to it, both included.
    """
    ways: dict[str, list[str]] = {start: [start]}
    waiting = [start]
    while waiting:
        name = waiting.pop(0)
        if name not in tree:
            continue
        for target in [part.name for part in tree[name].imports] + packages_of(name):
            if target not in ways:
                ways[target] = [*ways[name], target]
                waiting.append(target)
    return ways


def _dotted(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _parse(name: str, path: str, text: str, known: set[str]) -> Module:
    syntax = ast.parse(text, path)
    return Module(name, path, text, syntax, tuple(_imports(syntax, known, at_start=True)))


def _imports(node: ast.AST, known: set[str], *, at_start: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, child.lineno, at_start) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = "." * child.level + (child.module or "")
            for alias in child.names:
                inner = f"{base}.{alias.name}"
                yield Import(inner if inner in known else base, child.lineno, at_start)
        else:
            deferred = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            typing_only = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            yield from _imports(child, known, at_start=at_start and not deferred and not typing_only)

"""The file tree of README.md: every tracked file with the first line of what it says of itself.

Knows where each kind of file says it. `make docs` runs this to write the tree; a test compares.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- file tree: make docs -->\n```\n", "```\n<!-- end of file tree -->"

_SPOKEN_FOR = {
    ".env.example": "what `docker compose` reads; copy to .env",
    ".gitignore": "what git does not keep",
    "LICENSE": "Apache-2.0",
    "docs/images/policies.png": "misses of eviction policies, drawn by benchmarks/policies.py",
    "pyproject.toml": "one project: dependencies, extras, build hook, tools",
}
"""Files that cannot say it themselves, or say it for another reader."""


def tracked(root: Path) -> list[str]:
    """Paths of the files that git keeps and that are still there."""
    answer = subprocess.run(["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=True)
    return sorted(path for path in answer.stdout.split("\0") if path and (root / path).is_file())


def tree(root: Path) -> str:
    """One line a file, directories before what is in them; empty `__init__.py` files are left out."""
    return "".join(f"{line}\n" for line in _lines(root, [Path(path) for path in tracked(root)], Path()))


def summary(root: Path, path: Path) -> str:
    """The first sentence that the file says of itself, as far as its first line goes, or ""."""
    if str(path) in _SPOKEN_FOR:
        return _SPOKEN_FOR[str(path)]
    try:
        text = (root / path).read_text()
    except UnicodeDecodeError:
        return ""
    if path.suffix == ".py":
        first = (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
    elif path.suffix == ".md":
        first = next((line for line in text.splitlines() if line.startswith("# ")), "")
    elif path.suffix == ".json":
        first = ""
    else:
        comments = (line for line in text.splitlines() if re.match(r"(#|//|/\*|<!-- )(?!!)", line))
        first = re.sub(r" *(\*/|-->)$", "", next(comments, ""))
    return re.sub(r"^(#|//|/\*|<!--)+ *(\d+\. )?", "", first).split(". ")[0].rstrip(".:")


def _lines(root: Path, paths: list[Path], directory: Path) -> Iterator[str]:
    indent = "  " * len(directory.parts)
    here = sorted({path.relative_to(directory).parts[0] for path in paths if path.is_relative_to(directory)})
    for name in here:
        path = directory / name
        if path in paths:
            said = summary(root, path)
            if said or name != "__init__.py":
                yield f"{indent + name:<34}{said}".rstrip()
        else:
            yield f"{indent}{name}/"
            yield from _lines(root, paths, path)


def with_tree(text: str, new: str) -> str:
    """`text` of the README with another tree in it."""
    before, rest = text.split(BEGIN, 1)
    return before + BEGIN + new + END + rest.split(END, 1)[1]


if __name__ == "__main__":
    README.write_text(with_tree(README.read_text(), tree(ROOT)))
    sys.stderr.write(f"wrote the file tree into {README.name}\n")

"""The documents are true of the tree: file tree, links, named files, commands and flags."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from services.command.serve.options import ServeSettings
from services.kvstore.settings import KvStoreSettings
from tests.house.file_tree import README, ROOT, summary, tracked, tree, with_tree

DOCUMENTS = [README, *sorted((ROOT / "docs").rglob("*.md"))]
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]


def test_the_file_tree_of_the_readme_is_the_tree() -> None:
    text = README.read_text()
    assert text == with_tree(text, tree(ROOT)), "run `make docs`"


def test_every_file_says_what_it_is_for() -> None:
    said = {path: summary(ROOT, Path(path)) for path in tracked(ROOT) if not path.endswith((".json", ".png"))}
    silent = [path for path, line in said.items() if not line and not path.startswith("tests/")]
    assert silent == []


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        assert target.startswith("http") or (document.parent / target.split("#")[0]).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_files_named_in_code_marks_exist(document: Path) -> None:
    """`services/x/y.py` and the like; a short name must be some file's."""
    names = {Path(path).name for path in tracked(ROOT)}
    for named in re.findall(r"`([\w./-]+\.(?:py|proto|md|yml|toml|Dockerfile|sh))`", document.read_text()):
        short = "/" not in named
        assert (named in names) if short else (ROOT / named).exists(), named


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAMES)
def test_flags_and_targets_exist(document: Path) -> None:
    text = document.read_text()
    flags = {
        f"--{name.replace('_', '-')}"
        for kind in (ServeSettings, KvStoreSettings)
        for name in kind.model_fields
    }
    flags |= {
        f"--no-{name.replace('_', '-')}"
        for kind in (ServeSettings, KvStoreSettings)
        for name, field in kind.model_fields.items()
        if field.annotation is bool
    }
    flags |= {
        "--build",
        "--cache-dir",
        "--extra-index-url",
        "--help",
        "--no-deps",
        "--strict",
        *("--backend", "--url", "--endpoint-type", "--streaming", "--extra-inputs"),
        *("--universal", "--no-header", "--no-annotate"),
        *("--policy", "--worker-urls", "--kv-event-block-size", "--kv-event-model"),
        *("--kv-event-source", "--kv-event-replay-source"),
    }  # of other programs
    for path in tracked(ROOT):
        if path.endswith(".py"):
            flags |= set(re.findall(r'add_argument\(\s*"(--[a-z-]+)"', (ROOT / path).read_text()))
    for flag in re.findall(r"(?<![\w-])--[a-z][a-z-]+", text):
        assert flag in flags, flag
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"`make ([a-z-]+)", text):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    for module in re.findall(r"python -m (services(?:\.\w+)+)", text):
        path = ROOT / module.replace(".", "/")
        assert (path / "__main__.py").exists() or path.with_suffix(".py").exists(), module


def test_the_readme_has_every_word_of_the_house() -> None:
    rows = README.read_text().split("## Words\n")[1].split("\n\n")[0].splitlines()[2:]
    words = [row.split("|")[1].strip() for row in rows]
    assert words == [
        "record",
        "group",
        "block",
        "open block",
        "page",
        "row",
        "lane",
        "host page",
        "hot slot",
        "capacity",
        "resolve",
        "seal",
        "step",
        "full / tiered",
    ]


def test_the_readme_names_the_model_types_that_are_served() -> None:
    [types] = re.findall(
        r"^SUPPORTED = \(([^)]*)\)", (ROOT / "services/decoder/models/spec.py").read_text(), re.MULTILINE
    )
    *most, last = re.findall(r'"(\w+)"', types)
    assert f"model types {', '.join(most)} and {last}" in README.read_text()

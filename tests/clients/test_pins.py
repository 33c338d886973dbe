"""The pins are exact and name no registry, and docs/openai_api.md tells the versions that are tested."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.clients.environments import PINS

DOCUMENT = Path(__file__).parents[2] / "docs/openai_api.md"
NAMED = {
    "openai, Python": ("openai.txt", "openai"),
    "openai, npm": ("openai_npm.json", "openai"),
    "LiteLLM": ("litellm.txt", "litellm"),
    "langchain-openai": ("langchain.txt", "langchain-openai"),
    "`llm`": ("llm.txt", "llm"),
    "Vercel `ai` with `@ai-sdk/openai-compatible`": ("vercel_ai.json", "ai", "@ai-sdk/openai-compatible"),
    "GuideLLM": ("guidellm.txt", "guidellm"),
    "AIPerf": ("aiperf.txt", "aiperf"),
}
"""A line of the table -> where its packages are pinned."""


def versions(name: str) -> dict[str, str]:
    """Package -> version, of one environment."""
    text = (PINS / name).read_text()
    if name.endswith(".json"):
        told: dict[str, str] = json.loads(text)["dependencies"]
        return told
    lines = [line.split(" ; ")[0] for line in text.splitlines() if not line.startswith("#")]
    return dict(line.split("==") for line in lines)


def test_every_package_is_pinned() -> None:
    pinned = {pins.name: versions(pins.name) for pins in PINS.iterdir()}
    assert {pins for pins, *_ in NAMED.values()} | {"node.txt"} == set(pinned)
    for name, packages in pinned.items():
        for package, version in packages.items():
            assert re.fullmatch(r"\d+(\.\w+)*", version), f"{name}: {package} {version}"


def test_the_document_tells_the_versions() -> None:
    [_, rest] = DOCUMENT.read_text().split("## Clients that are tested\n")
    rows = re.findall(r"^\| ([^|]+) \| ([\d., ]+) \|", rest.split("\n## ")[0], re.MULTILINE)
    wanted = {
        client: ", ".join(versions(pins)[package] for package in packages)
        for client, (pins, *packages) in NAMED.items()
    }
    assert dict(rows) == wanted

"""The version of hotset that runs. Knows only what was installed."""

from __future__ import annotations

from importlib import metadata


def version() -> str:
    """As pyproject.toml has it; `0+source` when run from a tree that was never installed."""
    try:
        return metadata.version("hotset")
    except metadata.PackageNotFoundError:
        return "0+source"

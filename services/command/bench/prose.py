"""Real prose of any length: the language reference that ships inside Python."""

from __future__ import annotations

from pydoc_data.topics import topics


def real_text() -> str:
    """All of it, some 110,000 tokens."""
    return "\n".join(topics[name] for name in sorted(topics))

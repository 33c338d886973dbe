"""`python -m deploy.grafana`: write every dashboard's JSON, one file each, into deploy/grafana/dashboards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from deploy.grafana.grafana_json import grafana_json
from deploy.grafana.hot_buffer import HOT_BUFFER
from deploy.grafana.serving import SERVING
from deploy.grafana.store import STORE

DIRECTORY = Path(__file__).resolve().parent / "dashboards"


def files() -> Mapping[str, str]:
    """What belongs into the directory: text by name of its file."""
    return {f"{board.uid}.json": grafana_json(board) for board in (SERVING, HOT_BUFFER, STORE)}


def main() -> None:
    """Write them; what does not belong there goes."""
    wanted = files()
    for stray in {path.name for path in DIRECTORY.glob("*.json")} - set(wanted):
        (DIRECTORY / stray).unlink()
    for name, text in wanted.items():
        (DIRECTORY / name).write_text(text)
        print(DIRECTORY / name)


if __name__ == "__main__":
    main()

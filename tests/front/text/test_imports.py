"""The front's text brings in neither torch nor transformers, though both are installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import services.decoder.front.text as package


def test_no_torch_and_no_transformers() -> None:
    modules = [f"{package.__name__}.{path.stem}" for path in Path(package.__path__[0]).glob("*.py")]
    assert len(modules) > 5
    code = (
        f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output == "[]\n"

"""The house stands: floors, imports from outside and habits of every file, and a checker that can fail."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from importlib.metadata import packages_distributions
from pathlib import Path
from sys import stdlib_module_names

import pytest

from tests.house.floors import floor_violations
from tests.house.habits import habit_violations
from tests.house.source_tree import Module, read_tree

ROOT = Path(__file__).resolve().parent.parent

COMPANIONS = {"pydantic-core": "pydantic", "starlette": "fastapi"}
"""Distribution -> the one that brings it, in the version it needs, and documents its use."""


@pytest.fixture(scope="module")
def house() -> Mapping[str, Module]:
    tree = read_tree(ROOT, "services")
    assert len(tree) > 20, "the services were not found; nothing was checked"
    return tree


def test_dependencies_point_down(house: Mapping[str, Module]) -> None:
    assert "\n".join(floor_violations(house)) == ""


def test_every_file_keeps_the_habits() -> None:
    files = read_tree(ROOT, "services", "deploy", "benchmarks")
    assert "\n".join(habit_violations(files)) == ""


@pytest.mark.parametrize(
    ("packages", "extras"),
    [
        (("services/contract", "services/kvstore", "services/command/serve"), ("ucx", "nixl", "events")),
        (("services",), ("decoder", "gpu", "ucx", "nixl", "events")),
    ],
    ids=["kvstore needs none but for its data plane and its events", "the decoder needs two more"],
)
def test_what_is_imported_is_declared(packages: tuple[str, ...], extras: tuple[str, ...]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"]]
    for extra in extras:
        wanted += project["optional-dependencies"][extra]
    declared = {_distribution(requirement) for requirement in wanted}
    providers = packages_distributions()
    for module in read_tree(ROOT, *packages).values():
        for part in module.imports:
            top = part.name.split(".")[0]
            if top in stdlib_module_names or top in ("services", "hotset"):
                continue
            names = {_distribution(name) for name in providers.get(top, [top])}
            found = {COMPANIONS.get(name, name) for name in names}
            assert found & declared, f"{module.path}:{part.line}: {part.name} comes from {sorted(found)}"


def _distribution(requirement: str) -> str:
    name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
    return re.sub(r"[-_.]+", "-", name).lower()


def _violations(root: Path, files: Mapping[str, str]) -> list[str]:
    """Of a made-up tree: `files` maps paths below `services/` to their text, a docstring put before it."""
    for path, text in files.items():
        file = root / "services" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        for package in [file.parent, *file.parent.relative_to(root).parents]:
            (root / package / "__init__.py").touch()
        file.write_text(f'"""A job."""\n{text}\n')
    return floor_violations(read_tree(root, "services"))


SOUND = {
    "contract/layout.py": "import numpy",
    "kvstore/store.py": "from services.contract import layout",
    "decoder/settings.py": "from services.contract.layout import X",
    "decoder/kernels/append.py": "import torch",
    "decoder/kv/pool.py": "import torch\nfrom services.decoder.kernels.append import append",
    "decoder/attention/heart.py": "from services.decoder.kv import pool",
    "decoder/models/llama.py": "import transformers\nfrom services.decoder.attention import heart",
    "decoder/engine/scheduler.py": "from services.decoder.settings import Settings",
    "decoder/engine/loop.py": "from services.decoder.models import llama",
    "decoder/front/app.py": "import fastapi\nfrom services.decoder import settings",
    "decoder/__main__.py": "from services.decoder.front.app import run",
    "command/plan/fit.py": "from services.decoder.engine.scheduler import S",
    "command/chat.py": "from services.contract.layout import X",
    "command/__main__.py": "def f():\n    from services.command.plan import fit",
}


def test_a_sound_tree_passes(tmp_path: Path) -> None:
    assert _violations(tmp_path, SOUND) == []


FAULTS = {
    "kernels look up": ("decoder/kernels/append.py", "import services.decoder.kv.pool", "may import"),
    "kv looks up": ("decoder/kv/pool.py", "from services.decoder.attention import heart", "may import"),
    "attention looks up, lazily": (
        "decoder/attention/heart.py",
        "def f():\n    from services.decoder.models import llama",
        "may import",
    ),
    "contract looks up": ("contract/layout.py", "from services.kvstore.store import S", "may import"),
    "kvstore meets the decoder": ("kvstore/store.py", "import services.decoder.settings", "may import"),
    "front meets engine": ("decoder/front/app.py", "import services.decoder.engine.loop", "may import"),
    "engine meets front": ("decoder/engine/loop.py", "from services.decoder import front", "may import"),
    "settings look sideways": (
        "decoder/settings.py",
        "import services.decoder.kernels.append",
        "may import",
    ),
    "torch in the store": ("kvstore/store.py", "import torch", "reaches torch"),
    "torch in the front, lazily": (
        "decoder/front/app.py",
        "def f():\n    import torch.nn",
        "reaches torch through services.decoder.front.app > torch.nn",
    ),
    "transformers in the front, through others": (
        "decoder/front/app.py",
        "from services.decoder.models import llama",
        "reaches transformers through services.decoder.front.app > services.decoder.models.llama",
    ),
    "torch in the scheduler, through a package": (
        "decoder/engine/scheduler.py",
        "from services.decoder.kv import pool",
        "reaches torch",
    ),
    "wire in kernels": ("decoder/kernels/append.py", "from hotset.v1 import kvstore_pb2", "tensors and ints"),
    "ucxx elsewhere": ("kvstore/store.py", "def f():\n    import ucxx", "only services.contract.transport"),
    "ucxx at once": ("contract/transport/ucx_library.py", "import ucxx", "inside a function"),
    "a command meets the engine": ("command/chat.py", "import services.decoder.engine.loop", "may import"),
    "a command meets the store": ("command/serve/launch.py", "import services.kvstore.store", "may import"),
    "a plan meets the front": ("command/plan/fit.py", "import services.decoder.front.app", "may import"),
    "torch in a command": ("command/doctor/facts.py", "def f():\n    import torch", "reaches torch"),
    "relative": ("decoder/kv/pool.py", "from . import other", "relative import"),
    "not there": ("decoder/kv/pool.py", "import services.decoder.kernels.gone", "does not have"),
    "tests in services": ("kvstore/store.py", "from tests import fake", "stand without it"),
    "no room": ("decoder/helpers.py", "", "lies in no room"),
    "circle": ("decoder/kv/a.py", "from services.decoder.kv import a", "circle"),
}


@pytest.mark.parametrize(("path", "text", "expected"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found(tmp_path: Path, path: str, text: str, expected: str) -> None:
    found = _violations(tmp_path, SOUND | {path: text})
    assert any(expected in line for line in found), found


def test_a_package_that_imports_torch_taints_its_files(tmp_path: Path) -> None:
    files = SOUND | {
        "decoder/models/names.py": "",
        "decoder/front/app.py": "import services.decoder.models.names",
    }
    assert _violations(tmp_path, files) == []
    (tmp_path / "services/decoder/models/__init__.py").write_text('"""Models."""\nimport torch\n')
    assert any("reaches torch" in line for line in floor_violations(read_tree(tmp_path, "services")))


def test_a_circle_only_for_type_checkers_is_allowed(tmp_path: Path) -> None:
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from services.decoder.kv import b"
    files = {"decoder/kv/a.py": guarded, "decoder/kv/b.py": "from services.decoder.kv import a"}
    assert _violations(tmp_path, files) == []


HABITS = {
    "no docstring": ("import os\n", "opens without"),
    "state": ('"""Job."""\ncache = {}\n', "mutable state"),
    "annotated state": ('"""Job."""\n_seen: list[int] = []\n', "mutable state"),
    "made by a call": (
        '"""Job."""\nimport collections\nseen = collections.defaultdict(int)\n',
        "mutable state",
    ),
    "global": ('"""Job."""\nN = 1\ndef f():\n    global N\n    N = 2\n', "global N"),
    "work at import": ('"""Job."""\nprint("hello")\n', "at import"),
    "loop at import": ('"""Job."""\nfor n in range(3):\n    pass\n', "at import"),
    "hasattr": ('"""Job."""\ndef f(x):\n    return hasattr(x, "y")\n', "hasattr"),
    "silenced type": ('"""Job."""\nX = 1  # type: ignore[misc]\n', "reason"),
    "silenced lint": ('"""Job."""\nX = 1  # noqa: E501\n', "reason"),
    "too long": ('"""Job."""\n' + "X = 1\n" * 300, "split it"),
}


@pytest.mark.parametrize(("text", "expected"), HABITS.values(), ids=HABITS)
def test_a_broken_habit_is_found(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "services/file.py").write_text(text)
    found = habit_violations(read_tree(tmp_path, "services"))
    assert any(expected in line for line in found), found


def test_good_habits_pass(tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    (tmp_path / "services/file.py").write_text(
        '"""Job."""\n__all__ = ["X"]\nNAMES = {"a": 1}\nX = 1  # noqa: N806  # a name of the paper\n'
    )
    assert habit_violations(read_tree(tmp_path, "services")) == []


def test_long_files_need_a_reason_and_the_list_does_not_rot(tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    for name in ("a", "b", "c"):
        (tmp_path / f"services/{name}.py").write_text('"""Job."""\n')
    (tmp_path / "services/long.py").write_text('"""Job."""\n' + "X = 1\n" * 300)
    tree = read_tree(tmp_path, "services")
    assert habit_violations(tree, {"services/long.py": "one table"}) == []
    assert any(
        "remove it" in line for line in habit_violations(tree, {"services/a.py": "why"}) if "a.py" in line
    )
    (tmp_path / "services/a.py").unlink()
    (tmp_path / "services/b.py").unlink()
    (tmp_path / "services/c.py").unlink()
    assert any(
        "median" in line
        for line in habit_violations(read_tree(tmp_path, "services"), {"services/long.py": "t"})
    )

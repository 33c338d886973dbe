"""`hotset doctor`: this machine as it is, and machines on which something is missing, as facts."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.command.__main__ import main
from services.command.doctor.checks import Check, judge
from services.command.doctor.command import lines
from services.command.doctor.facts import Driver, Facts, Gpu, absent, busy, look
from services.contract.mount import Mount

GIB = 2**30
H200 = Gpu("NVIDIA H200", (9, 0), 139 * GIB)
OLD = Gpu("Tesla V100", (7, 0), 32 * GIB)
SHM = Mount("tmpfs", 64 * GIB, 60 * GIB, Path("/dev/shm"), "advise")
GOOD = Facts(
    python=(3, 12),
    lacking=(),
    driver=Driver((13, 0), (H200,)),
    gpu_lacking=(),
    nvrtc="13.0",
    torch_cuda="13.0",
    memlock_bytes=None,
    open_files=65536,
    mount=SHM,
    memory_free_bytes=200 * GIB,
    busy_ports=(),
    ucx=("self", "tcp"),
)
WITHOUT_GPU: Mapping[str, Any] = {
    "driver": Driver(),
    "torch_cuda": "",
    "gpu_lacking": ("cuda-core",),
    "nvrtc": "",
}

FAULTS: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "an old Python": ({"python": (3, 10)}, "Python", "fail", "make run PYTHON="),
    "a new Python": ({"python": (3, 14)}, "Python", "fail", "3.11, 3.12 or 3.13"),
    "no packages": ({"lacking": ("torch", "fastapi")}, "packages", "fail", "pip install 'hotset[decoder]'"),
    "a broken driver": (
        {"driver": Driver((13, 0), trouble="cuInit fails")},
        "GPU driver",
        "fail",
        "nvidia-smi",
    ),
    "no card": ({"driver": Driver((13, 0))}, "GPU driver", "fail", "docker run --gpus all"),
    "an old driver": ({"driver": Driver((12, 4), (H200,))}, "GPU driver", "fail", "driver 580 or newer"),
    "an old card": ({"driver": Driver((13, 0), (OLD,))}, "GPU 0", "fail", "--device cpu"),
    "an old card beside a good one": (
        {"driver": Driver((13, 0), (OLD, H200))},
        "GPU 0",
        "note",
        "--device cuda:N",
    ),
    "torch for the CPU": ({"torch_cuda": ""}, "torch", "fail", "pip install torch"),
    "no CUDA packages": ({"gpu_lacking": ("cuda-core",)}, "kernels", "fail", "pip install 'hotset[gpu]'"),
    "no NVRTC": ({"nvrtc": ""}, "kernels", "fail", "nvidia-cuda-nvrtc"),
    "little memlock": ({"memlock_bytes": 8 * 2**20}, "memlock", "fail", "ulimit -l unlimited"),
    "no tmpfs": ({"mount": None}, "arena's tmpfs", "fail", "mount -t tmpfs"),
    "a disk": ({"mount": replace(SHM, file_system="ext4")}, "arena's tmpfs", "fail", "--arena-dir"),
    "a full tmpfs": (
        {"mount": replace(SHM, free_bytes=GIB // 2)},
        "arena's tmpfs",
        "fail",
        "mount -o remount,size=66048m /dev/shm",
    ),
    "a full machine": ({"memory_free_bytes": 2**20}, "arena's tmpfs", "note", "--arena-bytes"),
    "no huge pages": ({"mount": replace(SHM, huge="never")}, "huge pages", "note", "remount,huge=advise"),
    "few files": ({"open_files": 1024}, "open files", "note", "ulimit -n 65536"),
    "a busy port": ({"busy_ports": (8000,)}, "ports", "fail", "hotset serve --port 8001"),
    "a broken UCX": ({"ucx": (), "ucx_trouble": "ucx_info: gone"}, "UCX", "fail", "hotset[ucx]"),
}


def named(facts: Facts, *, need_gpu: bool = False) -> dict[str, Check]:
    return {check.name: check for check in judge(facts, GIB, need_gpu=need_gpu)}


def test_a_good_machine() -> None:
    checks = named(GOOD)
    assert {check.verdict for check in checks.values()} == {"ok"}
    assert not [check for check in checks.values() if check.advice]
    told = lines(list(checks.values()))
    assert "NVIDIA H200, 139 GiB, compute capability 9.0" in told
    assert told.endswith("Nothing is in the way: hotset serve")


@pytest.mark.parametrize(("facts", "name", "verdict", "advice"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_named_with_what_to_type(
    facts: dict[str, Any], name: str, verdict: str, advice: str
) -> None:
    checks = named(replace(GOOD, **facts))
    assert checks[name].verdict == verdict
    assert advice in checks[name].advice
    others = [check for check in checks.values() if check.name != name]
    assert {check.verdict for check in others} == {"ok"}, "one fault, one line"
    told = lines(list(checks.values()))
    assert f"> {checks[name].advice}" in told
    assert ("1 thing is in the way" in told) == (verdict == "fail")


def test_without_a_gpu_nothing_of_one_is_needed() -> None:
    facts = replace(GOOD, **WITHOUT_GPU, memlock_bytes=2**20)
    checks = named(facts)
    assert "fail" not in {check.verdict for check in checks.values()}
    assert checks["GPU driver"].verdict == "note"
    assert not {"kernels", "torch", "memlock", "huge pages"} & {*checks}
    assert named(facts, need_gpu=True)["GPU driver"].verdict == "fail"


def test_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    facts = look(Path("/dev/shm/hotset"), ())
    assert facts.python == sys.version_info[:2]
    assert facts.lacking == ()
    assert facts.mount is not None
    assert facts.mount.file_system == "tmpfs"
    assert facts.memory_free_bytes > 0
    assert facts.open_files > 0
    assert absent(("pytest", "no-such-package-anywhere")) == ("no-such-package-anywhere",)
    status = main(["doctor", "--json", "--arena-bytes", "4MiB", "--port", "0"])
    told = json.loads(capsys.readouterr().out)
    assert status == int(any(check["verdict"] == "fail" for check in told))
    assert {"Python", "packages", "ports"} <= {check["name"] for check in told}


def test_a_taken_port_is_in_the_way(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert busy(port)
        assert main(["doctor", "--port", str(port)]) == 1
        told = capsys.readouterr().out
    assert f"FAIL  ports          busy: {port}" in told
    assert f"> hotset serve --port {port + 1}" in told
    assert not busy(port)


def test_an_arena_that_is_too_large(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--arena-bytes", "900TiB"]) == 1
    assert "mount -o remount,size=" in capsys.readouterr().out
    assert main(["doctor", "--arena-dir", "/proc"]) == 1
    assert "it is proc" in capsys.readouterr().out


def test_a_size_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--arena-bytes", "much"])
    assert ended.value.code == 2
    assert "'much' is not a size" in capsys.readouterr().err

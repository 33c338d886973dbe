"""The health check of kvstore's container: whether the store serves, over open and over secured wires."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract.test_wire_security import TOKEN
from tests.kvstore.process import ROOT, KvStore
from tests.kvstore.test_security import Secured, certificates


def _check(**variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.kvstore.health"]
    kept = {"PYTHONPATH": f"{ROOT}:{ROOT / 'proto'}"}
    return subprocess.run(
        command, cwd=ROOT, env=kept | variables, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_store_that_serves_is_healthy_until_it_ends(shm: Path, tmp_path: Path) -> None:
    with KvStore(shm / "arena", logs=tmp_path) as store:
        store.ready()
        done = _check(HOTSET_LISTEN=store.grpc)
        assert (done.returncode, done.stderr) == (0, "")
        store.process.kill()
        store.process.wait()
        done = _check(HOTSET_LISTEN=store.grpc)
        assert done.returncode == 1
        assert f"no kvstore serves at {store.grpc}" in done.stderr


@pytest.mark.parametrize("with_certificates", [False, True], ids=["token", "certificates"])
def test_a_secured_store_is_asked_as_it_wants(with_certificates: bool, shm: Path, tmp_path: Path) -> None:
    wire = tmp_path / "wire"
    if with_certificates:
        certificates(wire, tmp_path / "authority")
    else:
        wire.mkdir()
    (wire / "token").write_text(TOKEN)
    with Secured(shm / "arena", wire, logs=tmp_path) as store:
        store.ready()
        assert _check(HOTSET_LISTEN=store.grpc, HOTSET_WIRE_DIR=str(wire)).returncode == 0
        if with_certificates:
            assert _check(HOTSET_LISTEN=store.grpc).returncode == 1


def test_one_that_listens_everywhere_is_asked_here_by_its_certificates_name(
    shm: Path, tmp_path: Path
) -> None:
    wire = certificates(tmp_path / "wire", tmp_path / "authority", "subjectAltName=DNS:kvstore.example")
    with Secured(shm / "arena", wire, "--listen=0.0.0.0:0", logs=tmp_path) as store:
        store.ready()
        listen = f"0.0.0.0:{store.grpc.rpartition(':')[2]}"
        done = _check(HOTSET_LISTEN=listen, HOTSET_WIRE_DIR=str(wire))
        assert (done.returncode, done.stderr) == (0, "")
        stranger = certificates(tmp_path / "stranger", tmp_path / "another authority")
        done = _check(HOTSET_LISTEN=listen, HOTSET_WIRE_DIR=str(stranger))
        assert done.returncode == 1
        assert "certificate verify failed" in done.stderr


def test_wrong_settings_are_told() -> None:
    done = _check(HOTSET_LISTEN="nowhere")
    assert done.returncode == 2
    assert "listen" in done.stderr

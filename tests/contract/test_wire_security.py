"""What a directory with a token and certificates makes of gRPC, and what it must not leave out."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.contract.errors import SetupError
from services.contract.wire_security import NO_SECURITY, Certificates, WireSecurity

TOKEN = "0123456789abcdef"


def test_no_directory_is_no_security() -> None:
    assert WireSecurity.read(None) == NO_SECURITY
    assert NO_SECURITY.metadata == ()


def test_a_token_travels_with_every_call(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert WireSecurity.read(tmp_path).metadata == (("authorization", f"Bearer {TOKEN}"),)


def test_certificates_are_all_three(tmp_path: Path) -> None:
    names = ("ca.pem", "cert.pem", "key.pem")
    for name in names[:2]:
        (tmp_path / name).write_text(name)
        with pytest.raises(SetupError, match="lacks some"):
            WireSecurity.read(tmp_path)
    (tmp_path / "key.pem").write_text("key.pem")
    assert WireSecurity.read(tmp_path).certificates == Certificates(*(name.encode() for name in names))


@pytest.mark.parametrize("token", ["", "short"])
def test_what_secures_nothing_is_refused(tmp_path: Path, token: str) -> None:
    (tmp_path / "token").write_text(token)
    with pytest.raises(SetupError):
        WireSecurity.read(tmp_path)
    with pytest.raises(SetupError):
        WireSecurity.read(tmp_path / "nowhere")

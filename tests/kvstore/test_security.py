"""Stores that only know each other by a token, or by certificates: pulls go on, strangers hear nothing."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from hotset.v1 import kvstore_pb2 as pb
from hotset.v1 import kvstore_pb2_grpc as rpc

from services.contract.errors import Unauthenticated, Unavailable
from services.contract.wire_security import WireSecurity
from services.decoder.engine.store_client import StoreClient
from tests.kvstore.pair import PAGES, Client, chain
from tests.kvstore.process import KvStore, error_of, eventually

ALTERNATIVE = "subjectAltName=IP:127.0.0.1"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def openssl(*arguments: str) -> None:
    subprocess.run(("openssl", *arguments), check=True, capture_output=True, timeout=30)


def certificates(directory: Path, authority: Path, alternative: str = ALTERNATIVE) -> Path:
    """A node's directory: a certificate signed by `authority`, which is made if absent."""
    if shutil.which("openssl") is None:
        pytest.skip("certificates are made with openssl")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    authority.mkdir(exist_ok=True)
    if not (authority / "ca.pem").exists():
        made = ("-keyout", str(authority / "ca.key"), "-out", str(authority / "ca.pem"))
        openssl("req", "-x509", *curve, *made, "-days", "2", "-subj", "/CN=test authority")
    directory.mkdir()
    request, extension = directory / "request", directory / "extension"
    openssl("req", *curve, "-keyout", str(directory / "key.pem"), "-out", str(request), "-subj", "/CN=node")
    extension.write_text(alternative)
    signer = ("-CA", str(authority / "ca.pem"), "-CAkey", str(authority / "ca.key"), "-CAcreateserial")
    signed = ("-out", str(directory / "cert.pem"), "-days", "2", "-extfile", str(extension))
    openssl("x509", "-req", "-in", str(request), *signer, *signed)
    shutil.copy(authority / "ca.pem", directory / "ca.pem")
    return directory


class Secured(KvStore):
    """A store whose test speaks to it as its peers do."""

    def __init__(self, directory: Path, wire: Path, *flags: str, logs: Path) -> None:
        super().__init__(
            directory, "--arena-bytes=6MiB", "--data-transport=tcp", f"--wire-dir={wire}", *flags, logs=logs
        )
        self.wire = wire

    def ready(self) -> Secured:
        super().ready()
        self.channel.close()
        security = WireSecurity.read(self.wire)
        self.channel = self._channel = grpc.intercept_channel(
            security.channel(self.grpc), _Says(security.metadata)
        )
        self.stub = rpc.KvStoreStub(self.channel)
        return self


class _Says(grpc.UnaryUnaryClientInterceptor):
    def __init__(self, metadata: tuple[tuple[str, str], ...]) -> None:
        self.metadata = metadata

    def intercept_unary_unary(self, continuation, details, request):  # type: ignore[no-untyped-def]  # grpc's own
        return continuation(details._replace(metadata=self.metadata), request)


def pulled(stack: ExitStack, shm: Path, logs: Path, wires: tuple[Path, Path]) -> int:
    """Pages that a store with the second directory finds at one with the first."""
    a = stack.enter_context(Secured(shm / "a", wires[0], logs=logs)).ready()
    b = stack.enter_context(Secured(shm / "b", wires[1], f"--peers={a.grpc}", logs=logs)).ready()
    Client(a).sequence_of(chain("x"), 1)
    return len(Client(b).match(chain("x")))


def token(directory: Path, text: str) -> Path:
    directory.mkdir()
    (directory / "token").write_text(text)
    return directory


def test_a_token_lets_in_who_knows_it(stack: ExitStack, shm: Path, tmp_path: Path) -> None:
    wire = token(tmp_path / "wire", "a secret of both")
    assert pulled(stack, shm, tmp_path, (wire, wire)) == PAGES


def test_another_token_or_none_hears_nothing(stack: ExitStack, shm: Path, tmp_path: Path) -> None:
    wire = token(tmp_path / "wire", "a secret of both")
    other = token(tmp_path / "other", "another secret...")
    assert pulled(stack, shm, tmp_path, (wire, other)) == 0
    store = stack.enter_context(Secured(shm / "c", wire, logs=tmp_path)).ready()
    stranger = rpc.KvStoreStub(grpc.insecure_channel(store.grpc))
    for call in (
        lambda: stranger.Stats(pb.StoreStatsRequest(), timeout=60),
        lambda: stranger.Drain(pb.DrainRequest(), timeout=60),
        lambda: stranger.Stats(
            pb.StoreStatsRequest(), timeout=5, metadata=(("authorization", "Bearer a secret"),)
        ),
    ):
        assert isinstance(error_of(call), Unauthenticated)
    eventually(
        lambda: store.metric("hotset_store_rpc_errors_total", method="Stats", status="UNAUTHENTICATED") == 2
    )
    engine = StoreClient(store.grpc, WireSecurity.read(wire))
    assert engine.stats().arena_path == str(store.arena)
    engine.close()


def test_certificates_on_both_sides(stack: ExitStack, shm: Path, tmp_path: Path) -> None:
    authority = tmp_path / "authority"
    wires = (certificates(tmp_path / "a", authority), certificates(tmp_path / "b", authority))
    assert pulled(stack, shm, tmp_path, wires) == PAGES


def test_who_has_no_certificate_of_ours_hears_nothing(stack: ExitStack, shm: Path, tmp_path: Path) -> None:
    wire = certificates(tmp_path / "a", tmp_path / "authority")
    alien = certificates(tmp_path / "b", tmp_path / "other authority")
    assert pulled(stack, shm, tmp_path, (wire, alien)) == 0
    store = stack.enter_context(Secured(shm / "c", wire, logs=tmp_path)).ready()
    for channel in (grpc.insecure_channel(store.grpc), WireSecurity.read(alien).channel(store.grpc)):
        stub = rpc.KvStoreStub(channel)
        error = error_of(lambda: stub.Stats(pb.StoreStatsRequest(), timeout=2))  # noqa: B023  # called at once
        assert isinstance(error, Unavailable)
        channel.close()
    assert store.stats().arena_path == str(store.arena)


def test_a_directory_that_secures_nothing_is_refused(shm: Path, tmp_path: Path) -> None:
    with KvStore(shm / "a", f"--wire-dir={tmp_path}", logs=tmp_path) as store:
        assert "neither a token nor" in store.refused()

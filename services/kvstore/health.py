"""`python -m services.kvstore.health`: whether the kvstore of this container serves, as an exit status.

Asks where the environment's settings say it listens, so flags given to the store are not seen here; one
that listens everywhere is asked on this machine, by whatever name its certificate has.
"""

from __future__ import annotations

import socket
import ssl
import sys
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.contract.errors import SetupError
from services.contract.wire_security import WireSecurity
from services.kvstore.settings import KvStoreSettings

_SECONDS = 3.0
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}


def problem(listen: str, wire_dir: Path | None) -> str:
    """Why the store that listens at `listen`, host:port or unix:/path, does not serve; "" if it does.

    Raises:
        SetupError: `wire_dir` cannot be read.
    """
    security, address, certified = WireSecurity.read(wire_dir), listen, ""
    host, _, port = listen.rpartition(":")
    if host in _EVERYWHERE:
        address = f"{_EVERYWHERE[host]}:{port}"
        if wire_dir is not None and security.certificates is not None:
            try:
                certified = _certified(_EVERYWHERE[host].strip("[]"), int(port), wire_dir)
            except OSError as error:
                return str(error)
    with security.channel(address, certified=certified) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=_SECONDS, wait_for_ready=False
            )
        except grpc.RpcError as error:
            return str(error)
    return "" if answer.status == health_pb2.HealthCheckResponse.SERVING else "it does not serve now"


def _certified(host: str, port: int, wire_dir: Path) -> str:
    """The first name on the certificate of the store there, which need not be one of this machine's own.

    Raises:
        OSError: nobody listens, or it is not one of our authority's.
    """
    context = ssl.create_default_context(cafile=wire_dir / "ca.pem")
    context.load_cert_chain(wire_dir / "cert.pem", wire_dir / "key.pem")
    context.check_hostname = False
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection((host, port), timeout=_SECONDS) as plain,
        context.wrap_socket(plain) as secured,
    ):
        names: Any = (secured.getpeercert() or {}).get("subjectAltName", ())
    return str(names[0][1]) if names else ""


def main() -> int:
    """Exit status: 0 it serves, 1 it does not, 2 the settings are wrong."""
    try:
        settings = KvStoreSettings.from_command_line(sys.argv[1:], program="services.kvstore.health")
        found = problem(settings.listen, settings.wire_dir)
    except SetupError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if found:
        sys.stderr.write(f"error: no kvstore serves at {settings.listen}: {found}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

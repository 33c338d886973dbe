"""`python -m services.kvstore.health`: whether the kvstore of this container serves, as an exit status.

Asks where the environment's settings say it listens, so flags given to the store are not seen here.
"""

from __future__ import annotations

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from services.contract.errors import SetupError
from services.contract.wire_security import WireSecurity
from services.kvstore.settings import KvStoreSettings

_SECONDS = 3.0


def problem(address: str, security: WireSecurity) -> str:
    """Why the store at `address`, host:port or unix:/path, does not serve; "" if it does."""
    with security.channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=_SECONDS, wait_for_ready=False
            )
        except grpc.RpcError as error:
            return str(error)
    return "" if answer.status == health_pb2.HealthCheckResponse.SERVING else "it does not serve now"


def main() -> int:
    """Exit status: 0 it serves, 1 it does not, 2 the settings are wrong."""
    try:
        settings = KvStoreSettings.from_command_line(sys.argv[1:], program="services.kvstore.health")
        found = problem(settings.listen, WireSecurity.read(settings.wire_dir))
    except SetupError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    if found:
        sys.stderr.write(f"error: no kvstore serves at {settings.listen}: {found}\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

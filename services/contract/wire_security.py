"""How gRPC between services is secured, if at all: a shared token, and TLS with certificates on both sides.

Knows files, channels and metadata; no service and no call. One directory has all of it, the same on every
node but for the certificate:

    token                        what every call must carry; one line, 16 characters or more
    ca.pem, cert.pem, key.pem    whom to believe; who this node is: names its address; the key to that

A token alone goes over the network as it is: enough against mistakes, not against listeners.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import grpc

from services.contract.channel import CLIENT_OPTIONS
from services.contract.errors import SetupError, Unauthenticated

_HEADER = "authorization"
_LEAST_TOKEN = 16
_OPEN_TO_ALL = "/grpc.health."  # those who only ask whether it lives
_TLS_FILES = ("ca.pem", "cert.pem", "key.pem")

_Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM, as read."""

    authority: bytes
    certificate: bytes
    key: bytes


@dataclass(frozen=True, slots=True)
class WireSecurity:
    """What a service knows; by default nothing, and then nothing is asked for."""

    token: str = ""
    certificates: Certificates | None = None

    @classmethod
    def read(cls, directory: Path | None) -> WireSecurity:
        """What `directory` holds; None is no security.

        Raises:
            SetupError: it holds nothing, some but not all of the certificates, or a token that is too short.
        """
        if directory is None:
            return cls()
        try:
            token = _read(directory / "token").decode().strip()
            found = [_read(directory / name) for name in _TLS_FILES]
        except (OSError, UnicodeDecodeError) as error:
            raise SetupError(f"cannot read {directory} (--wire-dir): {error}") from error
        if any(found) and not all(found):
            raise SetupError(f"{directory} (--wire-dir) lacks some of {', '.join(_TLS_FILES)}")
        if not token and not any(found):
            raise SetupError(f"{directory} (--wire-dir) has neither a token nor {', '.join(_TLS_FILES)}")
        if token and len(token) < _LEAST_TOKEN:
            raise SetupError(f"{directory / 'token'} has fewer than {_LEAST_TOKEN} characters")
        return cls(token, Certificates(*found) if all(found) else None)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call to another service carries."""
        return ((_HEADER, f"Bearer {self.token}"),) if self.token else ()

    def channel(self, address: str, *, certified: str = "") -> grpc.Channel:
        """A lazy channel to a service.

        Args:
            address: host:port or unix:/path.
            certified: the name on the service's certificate, if it is not the address.
        """
        if self.certificates is None:
            return grpc.insecure_channel(address, options=CLIENT_OPTIONS)
        renamed = (("grpc.ssl_target_name_override", certified),) if certified else ()
        return grpc.secure_channel(address, self._client(), options=(*CLIENT_OPTIONS, *renamed))

    def aio_channel(self, address: str) -> grpc.aio.Channel:
        """The same for asyncio."""
        if self.certificates is None:
            return grpc.aio.insecure_channel(address, options=CLIENT_OPTIONS)
        return grpc.aio.secure_channel(address, self._client(), options=CLIENT_OPTIONS)

    def listen(self, server: grpc.aio.Server, address: str) -> int:
        """Let `server` listen; the port that was bound.

        Raises:
            RuntimeError: the address cannot be had.
        """
        if self.certificates is None:
            return server.add_insecure_port(address)
        told = self.certificates
        credentials = grpc.ssl_server_credentials(
            [(told.key, told.certificate)], root_certificates=told.authority, require_client_auth=True
        )
        return server.add_secure_port(address, credentials)

    def _client(self) -> grpc.ChannelCredentials:
        told = self.certificates
        assert told is not None, "asked for only where there are certificates"
        return grpc.ssl_channel_credentials(told.authority, told.key, told.certificate)


NO_SECURITY = WireSecurity()


class TokenCheck(grpc.aio.ServerInterceptor):
    """Refuses calls without the token; stands inside the error interceptor, to raise."""

    def __init__(self, security: WireSecurity) -> None:
        self._wanted = dict(security.metadata).get(_HEADER)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """The method's handler, or one that refuses."""
        handler = await continuation(handler_call_details)
        if self._wanted is None or handler is None or handler_call_details.method.startswith(_OPEN_TO_ALL):
            return handler
        given = dict(handler_call_details.invocation_metadata or ()).get(_HEADER, "")
        if hmac.compare_digest(str(given).encode(), self._wanted.encode()):
            return handler

        async def refuse(request: Any, context: Any) -> Any:
            raise Unauthenticated("the call carries no token, or not this service's; see --wire-dir")

        return grpc.unary_unary_rpc_method_handler(
            refuse, handler.request_deserializer, handler.response_serializer
        )


def _read(path: Path) -> bytes:
    """A file's bytes; nothing where there is none."""
    return path.read_bytes() if path.exists() else b""

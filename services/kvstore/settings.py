"""What an operator may say to kvstore.

Reads nothing but flags, environment and the file; opens no arena.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from services.contract.base_settings import ServiceSettings
from services.contract.byte_size import ByteSize

_LISTEN = re.compile(r"unix:/.+|(\[[0-9a-fA-F:.]+\]|[^\[\]:/\s]+):(\d{1,5})")


class KvStoreSettings(ServiceSettings):
    """hotset kvstore: owns the host pages that decoders keep their KV in."""

    table: ClassVar[str] = "kvstore"

    arena_dir: Path = Field(
        Path("/dev/shm/hotset"), description="directory on a tmpfs that holds the arena; made if missing"
    )
    arena_bytes: ByteSize = Field(
        2**30, ge=4 * 2**20, le=2**50, description="length of the arena file, bytes (512MiB, 40GiB, ...)"
    )
    keep_arena: bool = Field(False, description="leave the arena and its pages in place on a clean exit")
    listen: str = Field("127.0.0.1:7700", description="gRPC address, host:port (0 = any) or unix:/path")
    metrics_host: str = Field("127.0.0.1", min_length=1, description="address of the metrics server")
    metrics_port: int = Field(
        7701, ge=0, le=65535, description="port of the metrics server; 0 = any free one"
    )
    lease_seconds: float = Field(
        10.0,
        gt=0.1,
        le=3600,
        description="seconds a client may be silent; after a restart, seconds it has to come back",
    )
    drain_seconds: float = Field(3.0, ge=0, le=7, description="seconds clients get to detach after SIGTERM")
    data_transport: Literal["off", "mapped", "tcp", "ucx", "nixl"] = Field(
        "off",
        description="how bytes of pages move between stores; the same on all of them (docs/transport.md)",
    )
    data_listen: str = Field(
        "127.0.0.1:0", description="address of the transport tcp, host:port (0 = any); peers must reach it"
    )
    ucx_tls: str = Field("tcp,sm,self", min_length=1, description="lanes that UCX may use, as UCX_TLS")
    ucx_devices: str = Field(
        "lo", min_length=1, description="network devices that UCX listens on, as UCX_NET_DEVICES; or all"
    )
    ucx_lanes: Literal["any", "shm", "rdma", "tcp"] = Field(
        "any", description="lanes that UCX must use; a connection over others is refused"
    )
    wire_dir: Path | None = Field(
        None,
        description="directory with the token and certificates of gRPC between services (docs/transport.md)",
    )
    peers: str = Field(
        "",
        description="gRPC addresses of other stores to fetch prefixes from, host:port, with commas between",
    )
    etcd: str = Field(
        "", description="etcd's addresses, host:port, with commas between, by which stores find each other"
    )
    etcd_prefix: str = Field(
        "/hotset/stores/",
        min_length=2,
        description="of the keys of stores that are each other's peers",
    )
    etcd_wire_dir: Path | None = Field(
        None, description="directory with certificates for etcd, where it asks for them (docs/transport.md)"
    )
    advertise: str = Field(
        "", description="gRPC address told to other stores by etcd; by default that of --listen"
    )
    pull_seconds: float = Field(
        0.5, gt=0, le=1.5, description="seconds that a match may wait for bytes of other stores"
    )
    kv_events: str = Field(
        "",
        description="ZeroMQ address to publish KV events at, in vLLM's format, tcp://host:port (0 = any) or "
        "ipc:///path; none = off",
    )
    kv_events_replay: str = Field(
        "", description="ZeroMQ address at which subscribers ask for events that they missed; none = off"
    )
    kv_events_topic: str = Field("", description="topic of the KV events; kv@ID@MODEL for some routers")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe log lines kept"
    )

    @property
    def peer_addresses(self) -> tuple[str, ...]:
        """The peers one by one."""
        return _one_by_one(self.peers)

    @property
    def etcd_addresses(self) -> tuple[str, ...]:
        """The endpoints of etcd one by one."""
        return _one_by_one(self.etcd)

    @field_validator("peers", "etcd", "advertise")
    @classmethod
    def _are_addresses(cls, value: str) -> str:
        for address in _one_by_one(value):
            if _LISTEN.fullmatch(address) is None:
                raise ValueError(f"{address!r} is neither host:port nor unix:/path")
        return value

    @field_validator("kv_events", "kv_events_replay")
    @classmethod
    def _is_zmq_address(cls, value: str) -> str:
        scheme, _, rest = value.partition("://")
        if value and not (scheme == "ipc" and rest.startswith("/")):
            match = _LISTEN.fullmatch(rest)
            if scheme != "tcp" or match is None or int(match[2] or 65536) > 65535:
                raise ValueError(f"{value!r} is neither tcp://host:port nor ipc:///path")
        return value

    @model_validator(mode="after")
    def _replays_what_it_publishes(self) -> Self:
        if self.kv_events_replay and not self.kv_events:
            raise ValueError("kv_events_replay repeats what kv_events publishes; set that too")
        return self

    @field_validator("etcd_prefix")
    @classmethod
    def _is_no_address(cls, value: str) -> str:
        if not value.startswith("/") or not value.endswith("/") or not value.isascii():
            raise ValueError(f"{value!r} does not begin and end with a slash")
        return value

    @field_validator("data_listen")
    @classmethod
    def _is_host_and_port(cls, value: str) -> str:
        if value.startswith("unix:"):
            raise ValueError("the transport tcp listens on host:port")
        return cls._is_address(value)

    @field_validator("listen")
    @classmethod
    def _is_address(cls, value: str) -> str:
        match = _LISTEN.fullmatch(value)
        if match is None or int(match[2] or 0) > 65535:
            raise ValueError(f"{value!r} is neither host:port (127.0.0.1:7700, [::1]:7700) nor unix:/path")
        return value


def _one_by_one(addresses: str) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, addresses.split(","))))

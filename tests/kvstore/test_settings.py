from __future__ import annotations

from pathlib import Path

import pytest

from services.contract.errors import SetupError
from services.kvstore.settings import KvStoreSettings


def read(*arguments: str) -> KvStoreSettings:
    return KvStoreSettings.from_command_line(arguments, program="services.kvstore")


def test_defaults() -> None:
    got = read()
    assert (got.arena_dir, got.arena_bytes) == (Path("/dev/shm/hotset"), 2**30)
    assert (got.listen, got.metrics_host, got.metrics_port) == ("127.0.0.1:7700", "127.0.0.1", 7701)
    assert not got.keep_arena


def test_flags() -> None:
    got = read("--arena-bytes", "40GiB", "--keep-arena", "--listen", "unix:/run/kv.sock", "--arena-dir", "/x")
    assert (got.arena_bytes, got.keep_arena, got.listen) == (40 * 2**30, True, "unix:/run/kv.sock")


def test_the_worst_end_is_in_time() -> None:
    """Draining, last calls and the metrics server's half second stay under 10 s."""
    with pytest.raises(SetupError, match="drain_seconds"):
        read("--drain-seconds", "8")


@pytest.mark.parametrize(
    "listen", ["127.0.0.1:0", "0.0.0.0:7700", "[::1]:7700", "localhost:65535", "unix:/a b/c"]
)
def test_addresses(listen: str) -> None:
    assert read("--listen", listen).listen == listen


@pytest.mark.parametrize(
    "listen",
    ["", "7700", ":7700", "host", "host:", "host:65536", "::1:7700", "unix:", "unix:x", "http://h:1"],
)
def test_addresses_that_are_none(listen: str) -> None:
    with pytest.raises(SetupError, match="neither host:port"):
        read(f"--listen={listen}")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("arena-bytes", "1MiB"),
        ("arena-bytes", "lots"),
        ("metrics-port", "65536"),
        ("metrics-host", ""),
        ("lease-seconds", "0"),
        ("lease-seconds", "nan"),
        ("lease-seconds", "inf"),
        ("drain-seconds", "-1"),
        ("log-level", "loud"),
    ],
)
def test_values_that_are_refused(flag: str, value: str) -> None:
    with pytest.raises(SetupError, match=flag.replace("-", "_")):
        read(f"--{flag}={value}")

"""gRPC channel options of both services, so that the two ends of every wire agree.

Knows no service and opens nothing.
"""

from __future__ import annotations

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Longest message either way: a step's update of a million page references has 8 MB."""

ChannelOptions = tuple[tuple[str, int], ...]

_SIZES: ChannelOptions = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

SERVER_OPTIONS: ChannelOptions = (
    *_SIZES,
    # gRPC shares a port between servers by default; a second service on a taken port must fail instead.
    ("grpc.so_reuseport", 0),
)

CLIENT_OPTIONS: ChannelOptions = (
    *_SIZES,
    # A peer that restarts is found again within a second, not after gRPC's two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Not a pause, whatever its name: how long one attempt to connect may take, on a busy machine or far away.
    ("grpc.min_reconnect_backoff_ms", 5000),
    ("grpc.max_reconnect_backoff_ms", 1000),
)

"""A subscriber of KV events as vLLM's consumers are: the published schema, numbers, gaps filled by replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

import msgspec
import zmq

from tests.front.live import PATIENCE_SECONDS, until

END = -1


class Event(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[object, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(Event):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Subscriber:
    """Use as a context manager. `batches` grows as `listen` and `ask` are called."""

    def __init__(self, address: str, replay: str = "", topic: str = "", high_water: int = 1000) -> None:
        self.batches: dict[int, Batch] = {}
        self.topics: set[bytes] = set()
        self._replay = replay
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.SUB)
        self.socket.set_hwm(high_water)
        self.socket.connect(address)
        self.socket.subscribe(topic)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    def listen(self) -> list[int]:
        """Take what has come; the new batches' numbers."""
        numbers = []
        while self.socket.poll(20):
            topic, number, payload = self.socket.recv_multipart()
            self.topics.add(topic)
            numbers.append(self._take(number, payload))
        return numbers

    def ask(self, first: int) -> list[int]:
        """Batches from `first` on again; their numbers."""
        socket = self.dealer()
        socket.send_multipart((b"", first.to_bytes(8, "big")))
        numbers: list[int] = []
        while socket.poll(int(PATIENCE_SECONDS * 1000)):
            empty, number, payload = socket.recv_multipart()
            assert empty == b""
            if int.from_bytes(number, "big", signed=True) == END:
                assert payload == b""
                socket.close(linger=0)
                return numbers
            numbers.append(self._take(number, payload))
        raise AssertionError(f"no end of the replay; it brought {numbers}")

    def dealer(self) -> zmq.Socket[bytes]:
        """A socket to ask on."""
        socket = self._context.socket(zmq.DEALER)
        socket.set_hwm(0)
        socket.connect(self._replay)
        return socket

    @property
    def events(self) -> list[Event]:
        """All that is known, in order; no batch may be missing in between."""
        assert sorted(self.batches) == list(range(len(self.batches)))
        return [event for number in sorted(self.batches) for event in self.batches[number].events]

    def until(self, true: Callable[[], object], what: str) -> None:
        """Ask and look until it is so."""

        def now() -> object:
            self.ask(len(self.batches))
            return true()

        until(now, what)

    def present(self) -> dict[int | bytes, list[int]]:
        """Hash -> tokens of the blocks that the worker still has."""
        blocks: dict[int | bytes, list[int]] = {}
        for event in self.events:
            match event:
                case BlockStored():
                    (name,) = event.block_hashes
                    assert name not in blocks
                    assert len(event.token_ids) == event.block_size
                    assert event.parent_block_hash is None or event.parent_block_hash in blocks
                    blocks[name] = event.token_ids
                case BlockRemoved():
                    for name in event.block_hashes:
                        del blocks[name]
                case AllBlocksCleared():
                    blocks.clear()
        return blocks

    def _take(self, name: bytes, payload: bytes) -> int:
        number = int.from_bytes(name, "big")
        batch = msgspec.msgpack.decode(payload, type=Batch)
        assert batch.data_parallel_rank == 0
        assert self.batches.setdefault(number, batch) == batch, "one number stands for two batches"
        return number

"""Pieces of pages for decoders that cannot map the arena: whose, in which life, in which order."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from services.contract.errors import HotsetError, InvalidRequest, NotFound, StaleReference, StateConflict
from services.contract.slot_request import PIECE, Pieces, Wanted, read_request, write_head, write_request
from services.contract.transport.protocol import Request
from services.kvstore.data_service import DataService
from services.kvstore.page_bytes import PageBytes
from services.kvstore.page_refs import PageRef
from services.kvstore.page_source import PageSource
from services.kvstore.slot_bytes import SlotBytes
from services.kvstore.slot_desk import SlotDesk
from tests.kvstore.world import PAGE_COUNT, REMOTE, World

REGION_BYTES = 2 * 4 * 12288  # of a page in each of two layers


def at_once(work: Callable[[], object]) -> object:
    return work()


class Decoder:
    """A remote client, and what stands behind the store's responders."""

    def __init__(self, world: World, name: str = "decoder") -> None:
        self.world, self.client = world, world.client(name, REMOTE)
        self.client.attach()
        self.desk = SlotDesk(world.store.parts, at_once)  # type: ignore[arg-type]  # returns what work returns
        self.service = DataService(world.store.parts, PageSource(world.store.parts), self.desk)
        layout = world.store.parts.arena.layout
        assert layout is not None
        self.bytes = PageBytes(world.store.parts.arena.buffer, layout)
        self.number = 0

    @property
    def session(self) -> int:
        assert self.client.session is not None
        return self.client.session.session_id

    def read(self, pieces: Pieces, room: int | None = None, session: int | None = None) -> bytes:
        out = memoryview(bytearray(int(pieces["size"].sum()) if room is None else room))
        asked = Request(session or self.session, memoryview(read_request(pieces)))
        return bytes(out[: self.service.answer(asked, out)])

    def write(
        self,
        pieces: Pieces,
        data: bytes,
        *,
        number: int | None = None,
        epoch: int | None = None,
        session: int | None = None,
    ) -> None:
        assert self.client.session is not None
        body = write_request(
            self.client.session.epoch if epoch is None else epoch,
            self.number + 1 if number is None else number,
            pieces,
            data,
        )
        assert self.service.answer(Request(session or self.session, memoryview(body)), memoryview(b"")) == 0
        if number is None:
            self.number += 1

    def page(self, ref: PageRef) -> bytes:
        out = bytearray(self.bytes.page_bytes)
        self.bytes.pack(np.array([ref.page]), memoryview(out))
        return bytes(out)


def pieces(*rows: tuple[PageRef, int, int, int]) -> Pieces:
    """(page, region, offset, size) each."""
    return np.array([(ref.page, ref.generation, *rest) for ref, *rest in rows], PIECE)


@pytest.fixture
def decoder(world: World) -> Decoder:
    return Decoder(world)


def test_what_is_written_is_read(decoder: Decoder) -> None:
    dice = random.Random(5)
    pages = decoder.client.allocate(4)
    shadow = {ref: bytearray(decoder.page(ref)) for ref in pages}
    for _ in range(40):
        rows, data = [], b""
        taken: set[tuple[PageRef, int, int]] = set()
        for _ in range(dice.randint(1, 30)):
            slot = dice.choice(pages), dice.randrange(2), dice.randrange(8)
            if slot in taken:  # no byte twice in one write
                continue
            taken.add(slot)
            page, region, part = slot
            size = dice.choice((1, 16, 512, 1152, 4096, dice.randint(1, 12288)))
            offset = part * 12288 + dice.randint(0, 12288 - size)
            some = dice.randbytes(size)
            rows.append((page, region, offset, size))
            data += some
            begin = region * REGION_BYTES + offset
            shadow[page][begin : begin + size] = some
        asked = pieces(*rows)
        decoder.write(asked, data)
        assert decoder.read(asked) == data
        dice.shuffle(rows)
        at = [(page, region * REGION_BYTES + offset, size) for page, region, offset, size in rows]
        assert decoder.read(pieces(*rows)) == b"".join(shadow[page][b : b + size] for page, b, size in at)
    assert {ref: decoder.page(ref) for ref in pages} == shadow
    assert decoder.desk.read_pieces > decoder.desk.written_pieces > 0


def _refused(decoder: Decoder, kind: type[HotsetError], match: str, asked: Pieces, **more: int) -> None:
    """Both ways; and no byte has changed."""
    everything = bytes(decoder.world.store.parts.arena.buffer)
    with pytest.raises(kind, match=match):
        decoder.read(asked, **more)
    with pytest.raises(kind, match=match):
        decoder.write(asked, bytes(int(asked["size"].sum())), **more)
    assert bytes(decoder.world.store.parts.arena.buffer) == everything


def test_only_pages_of_the_session_in_this_life(decoder: Decoder) -> None:
    (page,) = decoder.client.allocate()
    decoder.write(pieces((page, 0, 0, 16)), b"0123456789abcdef")
    other = Decoder(decoder.world, "other")
    (others,) = other.client.allocate()
    later = PageRef(page.page, page.generation + 1)
    _refused(decoder, StateConflict, "not held", pieces((page, 0, 0, 16), (others, 0, 0, 16)))
    _refused(decoder, StaleReference, "generation", pieces((page, 0, 0, 16), (later, 0, 0, 16)))
    _refused(decoder, NotFound, "is over", pieces((page, 0, 0, 16)), session=12345)
    decoder.client.update(releases=[page])
    with pytest.raises(StateConflict, match="not held"):
        decoder.read(pieces((page, 0, 0, 16)))


@pytest.mark.parametrize(
    ("region", "offset", "size"),
    [
        (2, 0, 1),
        (0, REGION_BYTES, 1),
        (1, REGION_BYTES - 15, 16),
        (0, 0, 0),
        (0, 2**32 - 1, 1),
        (0, 1, 2**17),
    ],
)
def test_only_bytes_that_there_are(decoder: Decoder, region: int, offset: int, size: int) -> None:
    (page,) = decoder.client.allocate()
    _refused(decoder, InvalidRequest, "no page has", pieces((page, 0, 0, 1), (page, region, offset, size)))
    _refused(decoder, InvalidRequest, "no page has", pieces((PageRef(PAGE_COUNT, 1), 0, 0, 1)))


def test_sealed_pages_are_read_and_not_written(decoder: Decoder) -> None:
    (page,) = decoder.client.allocate()
    decoder.write(pieces((page, 1, 7, 3)), b"abc")
    decoder.client.seal(page)
    assert decoder.read(pieces((page, 1, 7, 3))) == b"abc"
    with pytest.raises(StateConflict, match="sealed"):
        decoder.write(pieces((page, 1, 7, 3)), b"xyz")
    reader = Decoder(decoder.world, "reader")  # holds it too, as whoever finds a prefix does
    assert reader.client.match(bytes([page.page]) * 16) == (page,)
    assert reader.read(pieces((page, 1, 7, 3))) == b"abc"
    with pytest.raises(StateConflict, match="sealed"):
        reader.write(pieces((page, 1, 7, 3)), b"xyz")


def test_a_write_is_done_once_and_in_its_turn(decoder: Decoder) -> None:
    (page,) = decoder.client.allocate()
    here = pieces((page, 0, 0, 4))
    decoder.write(here, b"1111", number=1)
    decoder.write(here, b"2222", number=2)
    decoder.write(here, b"1111", number=1)  # late, or sent again: answered, and nothing happens
    assert decoder.read(here) == b"2222"
    decoder.write(here, b"4444", number=4)  # number 3 was given up
    decoder.write(here, b"3333", number=3)
    assert decoder.read(here) == b"4444"


def test_a_write_of_an_earlier_epoch_comes_too_late(decoder: Decoder) -> None:
    (page,) = decoder.client.allocate()
    here = pieces((page, 0, 0, 4))
    decoder.write(here, b"1111")
    assert decoder.client.session is not None
    before = decoder.client.session.epoch
    decoder.client.attach(held=[page])
    with pytest.raises(StaleReference, match="at epoch"):
        decoder.write(here, b"2222", epoch=before)
    decoder.write(here, b"3333", number=1)  # they are counted anew
    assert decoder.read(here) == b"3333"


def test_pages_that_change_hands_while_they_are_read(
    decoder: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    (page,) = decoder.client.allocate()
    other = Decoder(decoder.world, "other")
    gather = SlotBytes.gather

    def slowly(self: SlotBytes, asked: Pieces, out: memoryview) -> int:
        decoder.client.update(releases=[page])
        other.client.allocate(PAGE_COUNT)
        return gather(self, asked, out)

    monkeypatch.setattr(SlotBytes, "gather", slowly)
    with pytest.raises(StaleReference):
        decoder.read(pieces((page, 0, 0, 16)))


def _spoiled(decoder: Decoder) -> Sequence[bytes]:
    (page,) = decoder.client.allocate()
    here = pieces((page, 0, 0, 4))
    write = write_request(1, 1, here, b"1111")
    return [
        b"",
        b"1234567",
        bytes(8),
        write_head(Wanted.PAGES),
        write_head(Wanted.READ),
        write_head(Wanted.READ) + bytes(19),
        read_request(here)[:-1],
        write[:20],
        write[:-1],
        write + b"1",
        write[:16] + b"\xff\xff\xff\xff" + write[20:],
        (9).to_bytes(4, "little") + write[4:],
    ]


def test_what_is_no_request_is_refused(decoder: Decoder) -> None:
    for body in _spoiled(decoder):
        with pytest.raises(InvalidRequest):
            decoder.service.answer(Request(decoder.session, memoryview(body)), memoryview(bytearray(100)))


def test_too_little_room_for_an_answer(decoder: Decoder) -> None:
    (page,) = decoder.client.allocate()
    with pytest.raises(InvalidRequest, match="room for 15"):
        decoder.read(pieces((page, 0, 0, 16)), room=15)

"""Tiered and full on a made-up arena whose every byte is garbage: what is written, loaded, and never leaks.

The arena starts as NaN everywhere, so a byte read that nobody wrote shows in any sum.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from services.contract.errors import SetupError
from services.contract.layout import ArenaLayout
from services.decoder.attention.everything import Everything
from services.decoder.attention.heart import Heart
from services.decoder.attention.quest import Quest
from services.decoder.attention.selector import Selector
from services.decoder.kernels.counter import Counter
from services.decoder.kernels.twins import Twins
from services.decoder.kv.arena_map import ArenaMap
from services.decoder.kv.arena_path import DirectPath
from services.decoder.kv.batch import PrefillChunk, decode_batch
from services.decoder.kv.bounds_index import BoundsIndex
from services.decoder.kv.full import Full
from services.decoder.kv.history import Window
from services.decoder.kv.hot_buffer import HotBuffer
from services.decoder.kv.hot_class import HotClass, Resize
from services.decoder.kv.residence import Residence
from services.decoder.kv.shape import KvShape
from services.decoder.kv.tiered import Tiered
from tests.decoder import made_up

pytestmark = pytest.mark.usefixtures("one_thread")

MAX_BLOCKS = made_up.MAX_PAGES * 3
ROWS = 4
WINDOW = 24  # tokens: two pages


class Rig:
    """Rows of made-up keys and values on one residence."""

    def __init__(self, path: Path, mode: str, groups: int = 3, capacity: int = 4) -> None:
        self.shape = made_up.shape(groups)
        self.path = path
        self.classes: list[HotClass] = []
        self.arena = made_up.arena(self.shape, path)
        self.tables = made_up.tables(ROWS)
        arena_path = DirectPath(Twins(), self.arena, self.shape, WINDOW, made_up.CPU)
        window = Window(Twins(), self.shape, WINDOW, made_up.CPU)
        self.residence: Residence
        if mode == "tiered":
            self.classes = [
                HotClass(1, ROWS * blocks, 1, blocks, blocks) for blocks in (MAX_BLOCKS, capacity)
            ]
            hot = HotBuffer(self.shape, ROWS, MAX_BLOCKS, self.classes, made_up.CPU)
            for pool in hot.pools:
                pool.fill_(float("nan"))
            self.residence = Tiered(Twins(), self.arena, hot, self.tables, arena_path)
        else:
            self.residence = Full(Twins(), self.arena, self.shape, 21, self.tables, arena_path, window)
            for layer in range(2):
                self.residence.pool(layer).fill_(float("nan"))

    def prefill(self, row: int, key: Tensor, value: Tensor, cuts: tuple[int, ...] = ()) -> None:
        """Write [tokens, kv_heads, head_dim] in chunks, the same in both layers (the second negated)."""
        edges = [0, *cuts, key.shape[0]]
        for start, end in pairwise(edges):
            chunk = PrefillChunk.build(self.shape, self.tables, row, start, end)
            for layer, sign in enumerate((1, -1)):
                self.residence.write(layer, chunk, sign * key[start:end], sign * value[start:end])
        self.seat(row, key.shape[0])

    def seat(self, row: int, tokens: int) -> None:
        """With as many parcels as the row can own."""
        self.residence.resize(
            [
                Resize(number, row, list(range(row * of.most, (row + 1) * of.most)))
                for number, of in enumerate(self.classes)
            ]
        )
        self.residence.seat(row, tokens)

    def decode(self, row: int, at: int, key: Tensor, value: Tensor, selected: list[int]) -> list[Tensor]:
        """One token, [kv_heads, head_dim], at position `at`; returns each layer's selected blocks as
        attention would see them: [groups, top_k, block_tokens, 2, heads, head_dim].
        """
        batch = decode_batch(self.shape, self.tables, [row], [at])
        chosen = torch.tensor([selected] * self.shape.groups, dtype=torch.int32)
        seen = []
        for layer, sign in enumerate((1, -1)):
            placement = self.residence.resolve(layer, batch, chosen)
            new = sign * key.unsqueeze(0), sign * value.unsqueeze(0)
            self.residence.append(layer, batch, placement, *new, None)
            assert ((placement.slots < 0) == (chosen < 0)).all()
            seen.append(self.residence.pool(layer)[placement.slots.long()])
        return seen

    def file_records(self, layer: int) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
        """All records of a layer, read from the file and not through the map."""
        layout, shape = self.arena.layout, self.shape
        count = layout.page_count * shape.page_tokens * shape.groups * shape.record_elements
        offset = layout.layer_offset("kv", layer)
        flat = np.fromfile(self.path, np.float32, count, offset=offset)
        return flat.reshape(-1, shape.record_elements)


def made(tokens: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    both = torch.randn(2, tokens, 3, 8, generator=torch.Generator().manual_seed(seed))
    return both[0], both[1]


@pytest.fixture(params=["tiered", "full"])
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("groups", [1, 3])
def test_the_file_holds_exactly_the_records(tmp_path: Path, mode: str, groups: int) -> None:
    rig = Rig(tmp_path / "arena", mode, groups)
    key, value = made(34)
    row, prompt = 2, 25
    rig.prefill(row, key[:prompt], value[:prompt], cuts=(8, 12))
    for at in range(prompt, 34):
        rig.decode(row, at, key[at], value[at], [at // 4, 0, -1])
    for layer, sign in enumerate((1, -1)):
        stored = rig.file_records(layer)
        heads, written = 3 // groups, []
        for token in range(34):
            for group in range(groups):
                place = made_up.place(rig.shape, rig.tables.host_pages[row], group, token)
                own = slice(group * heads, (group + 1) * heads)
                expected = torch.cat([key[token, own].flatten(), value[token, own].flatten()]) * sign
                assert stored[place].tolist() == expected.tolist()
                written.append(place)
        untouched = np.delete(stored, written, axis=0)
        assert np.isnan(untouched).all(), "a byte outside the row's records was written"


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("start", [0, 4, 12, 20, 24, 28, 36, 48, 52])
def test_history_returns_what_was_written_in_windows(
    tmp_path: Path, mode: str, groups: int, start: int
) -> None:
    rig = Rig(tmp_path / "arena", mode, groups)
    key, value = made(60)
    if start:
        rig.prefill(1, key[:start], value[:start], cuts=(4, 24) if start > 24 else ())
    chunk = PrefillChunk.build(rig.shape, rig.tables, 1, start, 60)
    at = 0
    for window in rig.residence.history(1, chunk):
        run = slice(at, min(at + WINDOW, start))
        assert torch.equal(window.key, -key[run])
        assert torch.equal(window.value, -value[run])
        at = run.stop
    assert at == start


@pytest.mark.parametrize("prompt", [1, 3, 4, 5, 12, 13, 31])
def test_decode_sees_the_row_and_zeros_behind_it(tmp_path: Path, mode: str, prompt: int) -> None:
    """From any prompt length on: every chosen block holds its tokens, and nothing of another beyond."""
    rig = Rig(tmp_path / "arena", mode)
    key, value = made(prompt + 20)
    rig.prefill(0, key[:prompt], value[:prompt])
    for at in range(prompt, prompt + 20):
        opened = at // 4
        selected = [opened, *(sorted({0, at // 8, opened // 2} - {opened}))][:3]
        selected += [-1] * (3 - len(selected))
        for layer, seen in enumerate(rig.decode(0, at, key[at], value[at], selected)):
            for column, block in enumerate(selected):
                tokens = range(block * 4, min(block * 4 + 4, at + 1)) if block >= 0 else range(0)
                for offset, token in enumerate(tokens):
                    got = seen[:, column, offset]  # [groups, 2, heads, head_dim]
                    expected = torch.stack([key[token], value[token]], 1).unsqueeze(2) * (1 - 2 * layer)
                    assert torch.equal(got, expected)
                if block == opened:
                    assert (seen[:, column, len(tokens) :] == 0).all()
    rig.residence.check_integrity()


def test_seat_loads_the_filled_part_of_the_open_block_and_no_more(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "arena", "tiered")
    key, value = made(10)
    rig.prefill(3, key, value)
    assert isinstance(rig.residence, Tiered)
    hot = rig.residence.hot
    for layer, sign in enumerate((1, -1)):
        for group in range(3):
            lane = 3 * 3 + group
            tables = hot.tables[layer]
            assert int((tables.block_to_slot[lane] >= 0).sum()) == 1
            slot = hot.open_slots(3)[layer][group]
            assert int(tables.slot_to_block[slot]) == 2
            block = rig.residence.pool(layer)[slot]  # [block_tokens, 2, 1, head_dim]
            assert torch.equal(block[:2, 0, 0], sign * key[8:10, group])
            assert torch.equal(block[:2, 1, 0], sign * value[8:10, group])
            assert (block[2:] == 0).all()
    assert int(rig.residence.counters[:, : Counter.NANOSECONDS].sum()) == 0, "seating chooses nothing"


def test_a_page_used_again_leaks_nothing(tmp_path: Path, mode: str) -> None:
    """Row 0 fills its pages and leaves; row 1 gets the same pages and a shorter prompt."""
    rig = Rig(tmp_path / "arena", mode)
    old, new = made(40, seed=1), made(9, seed=2)
    rig.prefill(0, old[0][:38], old[1][:38])
    for at in range(38, 40):
        rig.decode(0, at, old[0][at], old[1][at], [0, 3, 9])
    rig.residence.leave(0)
    rig.tables.put(1, 0, rig.tables.host_pages[0].tolist(), rig.tables.device_pages[0].tolist())
    rig.prefill(1, new[0][:7], new[1][:7])
    rig.residence.check_integrity()
    for at in range(7, 9):
        seen = rig.decode(1, at, new[0][at], new[1][at], [at // 4, 0, -1])
        open_block = seen[0][:, 0, :, 0, 0]  # [groups, block_tokens, head_dim]
        filled = at % 4 + 1
        assert torch.equal(open_block[:, :filled], new[0][at - at % 4 : at + 1].transpose(0, 1))
        assert (open_block[:, filled:] == 0).all()


def test_leaving_gives_back_every_slot_and_twice_is_harmless(tmp_path: Path, mode: str) -> None:
    rig = Rig(tmp_path / "arena", mode)
    key, value = made(5)
    rig.residence.leave(2)
    for row in range(ROWS):
        rig.prefill(row, key, value)
    total = rig.residence.hot_slots().total
    assert rig.residence.hot_slots().used == total
    for row in (*range(ROWS), 0):
        rig.residence.leave(row)
    assert rig.residence.hot_slots() == (total, 0)
    rig.residence.check_integrity()


def test_full_counts_every_choice_as_a_hit(tmp_path: Path) -> None:
    rig = Rig(tmp_path / "arena", "full")
    key, value = made(30)
    rig.prefill(0, key[:29], value[:29])
    rig.decode(0, 29, key[29], value[29], [7, 1, -1])
    counted = rig.residence.counters[:, : Counter.NANOSECONDS].tolist()
    assert counted == [[6, 6, 0, 0, 0]] * 2


def naive_output(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Dense attention of [query heads, head_dim] over [n, kv_heads, head_dim]."""
    wide = query.shape[0] // key.shape[1]
    key, value = key.repeat_interleave(wide, 1), value.repeat_interleave(wide, 1)
    weight = torch.einsum("hd,nhd->hn", query, key).softmax(1)
    return torch.einsum("hn,nhd->hd", weight, value)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("selector", ["quest", "everything"])
def test_the_heart_with_a_budget_of_everything_is_dense_attention(
    tmp_path: Path, mode: str, groups: int, selector: str
) -> None:
    """Two rows side by side, prefilled in chunks, through page edges; a hot buffer of the longest row."""
    rig = Rig(tmp_path / "arena", mode, groups, capacity=MAX_BLOCKS)
    shape = rig.shape
    selectors: list[Selector] = [Everything(), Everything()]
    if selector == "quest":
        bounds = BoundsIndex(Twins(), rig.arena, shape, 21, 2, made_up.CPU)
        bounds.pool.fill_(float("nan"))
        selectors = [Quest(Twins(), shape, bounds.layer(layer), MAX_BLOCKS) for layer in range(2)]
    heart = Heart(Twins(), shape, rig.residence, selectors)
    query = torch.randn(2, 50, 6, 8)
    data = [made(50, seed=row) for row in range(2)]
    prompts, rows = (29, 10), (3, 1)
    for i, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        for start, end in ((0, 8), (8, prompt)):
            chunk = PrefillChunk.build(shape, rig.tables, row, start, end)
            run = slice(start, end)
            for layer in range(2):
                out = heart.prefill(layer, chunk, query[i, run], data[i][0][run], data[i][1][run], 1.0)
            for token in range(start, end):
                past = (side[: token + 1] for side in data[i])
                assert torch.allclose(out[token - start], naive_output(query[i, token], *past), atol=1e-5)
        rig.seat(row, prompt)
    for step in range(20):
        at = [prompt + step for prompt in prompts]
        batch = decode_batch(shape, rig.tables, rows, at)
        new = [torch.stack([side[i][at[i]] for i in range(2)]) for side in zip(*data, strict=True)]
        now = torch.stack([query[i, at[i]] for i in range(2)])
        for layer in range(2):
            out = heart.decode(layer, batch, now, new[0], new[1], 1.0)
        for i in range(2):
            past = (side[: at[i] + 1] for side in data[i])
            assert torch.allclose(out[i], naive_output(now[i], *past), atol=1e-5)


@pytest.mark.parametrize("groups", [1, 3])
def test_the_heart_with_a_small_budget_attends_to_quests_choice(
    tmp_path: Path, mode: str, groups: int
) -> None:
    """Scored, chosen and attended to by plain loops over the keys themselves."""
    rig = Rig(tmp_path / "arena", mode, groups)
    shape, top_k, row, prompt = rig.shape, 3, 2, 30
    bounds = BoundsIndex(Twins(), rig.arena, shape, 21, 2, made_up.CPU)
    bounds.pool.fill_(float("nan"))
    heart = Heart(
        Twins(), shape, rig.residence, [Everything(), Quest(Twins(), shape, bounds.layer(1), top_k)]
    )
    key, value = made(60)
    query = torch.randn(60, 6, 8)
    chunk = PrefillChunk.build(shape, rig.tables, row, 0, prompt)
    heart.prefill(1, chunk, query[:prompt], key[:prompt], value[:prompt], 1.0)
    rig.seat(row, prompt)
    for at in range(prompt, 60):
        batch = decode_batch(shape, rig.tables, [row], [at])
        now = slice(at, at + 1)
        out = heart.decode(1, batch, query[now], key[now], value[now], 1.0)[0]
        opened = at // 4
        for group in range(groups):
            kv_heads = range(group * 3 // groups, (group + 1) * 3 // groups)
            scores = []
            for block in range(opened):
                own = key[block * 4 : block * 4 + 4]
                least, most = own.amin(0).repeat_interleave(2, 0), own.amax(0).repeat_interleave(2, 0)
                best = torch.maximum(query[at] * least, query[at] * most).sum(1)
                scores.append(sum(float(best[2 * kv] + best[2 * kv + 1]) for kv in kv_heads))
            chosen = sorted(range(opened), key=lambda block: -scores[block])[: top_k - 1]
            tokens = [t for t in range(at + 1) if t // 4 in chosen or t // 4 == opened]
            expected = naive_output(query[at], key[tokens], value[tokens])
            heads = slice(2 * kv_heads.start, 2 * kv_heads.stop)
            assert torch.allclose(out[heads], expected[heads], atol=1e-5)


def test_bounds_of_full_pages_are_saved_where_the_layout_says(tmp_path: Path) -> None:
    shape, path = made_up.shape(), tmp_path / "arena"
    arena = made_up.arena(shape, path)
    index = BoundsIndex(Twins(), arena, shape, 21, 2, made_up.CPU)
    index.pool.copy_(torch.randn(index.pool.shape))
    index.save([])
    index.save([(4, 20), (22, 0)])
    layout = arena.layout
    for layer in range(2):
        stored = np.fromfile(
            path, np.float32, 23 * shape.index_elements, offset=layout.layer_offset("index", layer)
        ).reshape(23, -1)
        assert stored[4].tolist() == index.layer(layer).device[20].flatten().tolist()
        assert stored[22].tolist() == index.layer(layer).device[0].flatten().tolist()
        assert np.isnan(np.delete(stored, [4, 22], axis=0)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_maps_of_a_file_see_each_others_bytes_at_the_layouts_offsets(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    shape = KvShape(2, 3, 8, 3, 4, 12, dtype)
    first = made_up.arena(shape, tmp_path / "arena")
    second = ArenaMap(tmp_path / "arena", first.layout, shape, torch.device("cpu"))
    for layer in range(2):
        blocks = first.kv_blocks(layer)
        assert blocks.shape == (23 * 3 * 3, 4 * 2 * 8)
        blocks[5] = torch.arange(64, dtype=dtype) + layer
        first.index(layer)[7] = 3.0 + layer
        assert torch.equal(second.kv_blocks(layer)[5], blocks[5])
        assert (second.index(layer)[7] == 3.0 + layer).all()
        raw = (tmp_path / "arena").read_bytes()
        at = first.layout.layer_offset("kv", layer) + 5 * shape.block_bytes
        assert raw[at : at + shape.block_bytes] == blocks[5].view(torch.uint8).numpy().tobytes()


def test_a_missing_or_short_arena_is_refused(tmp_path: Path) -> None:
    shape = made_up.shape()
    layout: ArenaLayout = made_up.layout(shape)
    with pytest.raises(SetupError, match=r"cannot map the arena .*: No such file.*kvstore's node"):
        ArenaMap(tmp_path / "nothing", layout, shape, torch.device("cpu"))
    (tmp_path / "short").write_bytes(bytes(layout.arena_bytes - 1))
    with pytest.raises(SetupError, match=rf"is {layout.arena_bytes - 1} bytes, kvstore said"):
        ArenaMap(tmp_path / "short", layout, shape, torch.device("cpu"))

"""The sizes of records, blocks and pages of one model, and the planes that follow from them.

Knows numbers only. docs/records.md draws the same in bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from services.contract.errors import SetupError
from services.contract.planes import ENTRY_ALIGNMENT, Plane, PlaneLayer
from services.decoder.kernels.index_code import TAIL_BYTES
from services.decoder.kernels.record_code import coded_bytes


@dataclass(frozen=True, slots=True)
class KvShape:
    """What every layer keeps of a token: a key and a value per KV head, or one latent record that is both."""

    layers: int
    kv_heads: int
    head_dim: int
    groups: int  # selections a row: kv_heads or 1
    block_tokens: int
    page_tokens: int
    dtype: torch.dtype
    latent: int = 0  # numbers of a key that are its value too; 0 = values have their own
    index_dim: int = 0  # of a block in a model's own index (DSA: a token's key); 0 = bounds of blocks, if any
    anchors: tuple[int, ...] = ()  # by layer, the one whose choice it follows; empty = its own
    index_coded: bool = False  # DSA's keys are kept in eight bits, kernels/index_code.py
    record_coded: bool = False  # latent records are kept in eight bits, kernels/record_code.py

    def __post_init__(self) -> None:
        if self.kv_heads % self.groups or self.page_tokens % self.block_tokens:
            raise ValueError(f"groups must divide kv_heads and block_tokens page_tokens: {self}")
        if self.block_bytes % ENTRY_ALIGNMENT:
            raise SetupError(
                f"a block of {self.block_bytes} bytes is not a multiple of {ENTRY_ALIGNMENT}; "
                "raise --block-tokens"
            )

    @property
    def heads(self) -> int:
        """KV heads of a group."""
        return self.kv_heads // self.groups

    @property
    def record_elements(self) -> int:
        """Elements of a record: the group's keys, then its values."""
        if self.record_coded:
            return coded_bytes(self.latent, self.head_dim - self.latent)
        return (1 if self.latent else 2) * self.heads * self.head_dim

    @property
    def record_dtype(self) -> torch.dtype:
        """Of a record's elements."""
        return torch.uint8 if self.record_coded else self.dtype

    @property
    def block_elements(self) -> int:
        """Elements of a block of one group."""
        return self.block_tokens * self.record_elements

    @property
    def block_bytes(self) -> int:
        """Bytes of a block of one group: what resolve fetches for a miss."""
        return self.block_elements * self.record_dtype.itemsize

    @property
    def blocks_per_page(self) -> int:
        """Blocks of one group in a page."""
        return self.page_tokens // self.block_tokens

    @property
    def page_elements(self) -> int:
        """Elements of a page in one layer, all groups."""
        return self.groups * self.page_tokens * self.record_elements

    @property
    def entry_elements(self) -> int:
        """Elements of a block in a selector's index: its bounds, all KV heads, or its token's index key."""
        if self.index_coded:
            return self.index_dim + TAIL_BYTES
        return self.index_dim or self.kv_heads * 2 * self.head_dim

    @property
    def entry_dtype(self) -> torch.dtype:
        """Of an index's elements."""
        return torch.uint8 if self.index_coded else self.dtype

    @property
    def index_elements(self) -> int:
        """Elements of a page in a selector's index, of one layer."""
        return self.blocks_per_page * self.entry_elements

    def chooses(self, layer: int) -> bool:
        """Whether a layer makes a choice of its own, and so has an index where one is kept."""
        return not self.anchors or self.anchors[layer] == layer

    def followers(self, layer: int) -> list[int]:
        """The layers that follow this one's choice."""
        return [other for other, anchor in enumerate(self.anchors) if anchor == layer != other]

    def as_blocks(self, pool: Tensor) -> Tensor:
        """A pool as attention reads it.

        Args:
            pool: [pool slots, block elements].

        Returns:
            [pool slots, block_tokens, 2, heads of a group, head_dim]; of latent records
            [pool slots, block_tokens, record elements].
        """
        if self.latent:
            return pool.view(-1, self.block_tokens, self.record_elements)
        return pool.view(-1, self.block_tokens, 2, self.heads, self.head_dim)

    def as_pages(self, layer: Tensor) -> Tensor:
        """One layer's records, in whole pages: [pages, groups, page_tokens, record elements]."""
        return layer.view(-1, self.groups, self.page_tokens, self.record_elements)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold `tokens` tokens."""
        return -(-tokens // self.page_tokens)

    def planes(self, *, with_index: bool) -> tuple[Plane, ...]:
        """What the store keeps of every page; the index plane holds what the layers that choose look at."""
        records = PlaneLayer(self.groups, self.blocks_per_page, self.block_bytes)
        kv = Plane("kv", (records,) * self.layers)
        if not with_index:
            return (kv,)
        entries = PlaneLayer(1, self.blocks_per_page, self.entry_elements * self.entry_dtype.itemsize)
        nothing = PlaneLayer(0, 0, 0)
        layers = (entries if self.chooses(layer) else nothing for layer in range(self.layers))
        return kv, Plane("index", tuple(layers))

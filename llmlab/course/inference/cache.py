"""Three KV caches: one that grows by concatenation, one allocated in full at the start, and a paged one.

    B  batch     T  new tokens     S  all tokens, those in the cache first
    H  key-value heads     D  size of a head
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from ..architectures.gpt import Cache
from .blocks import BlockPool, CacheFull, Table

Layer = tuple[Tensor, Tensor]


class KVCache(Cache, Protocol):
    """The methods of a cache that generation calls, in addition to `length` and `update`. QuantizedCache has them too.
    """

    def expect(self, ids_BT: Tensor) -> None:
        """Make room before the model reads the tokens, or raise CacheFull and change nothing."""

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens; speculative decoding drops the rejected ones."""

    def release(self) -> None:
        """Free all memory."""


class GrowingCache:
    """A cache that grows by concatenation: each new token copies the whole layer, and both copies are in memory."""

    def __init__(self) -> None:
        self.layers: list[Any] = []  # a Layer of each block; QuantizedCache has its codes here

    @property
    def length(self) -> int:
        """The number of tokens in the cache, per sequence."""
        return self.layers[0][0].shape[2] if self.layers else 0

    def expect(self, ids_BT: Tensor) -> None:
        """Accept any number of tokens."""

    def update(self, layer: int, k_BHTD: Tensor, v_BHTD: Tensor) -> Layer:
        """Append the new tokens' keys and values of `layer`; return those of all tokens, (B, H, S, D) each."""
        if layer == len(self.layers):
            self.layers.append((k_BHTD, v_BHTD))
        else:
            pairs = zip(self.layers[layer], (k_BHTD, v_BHTD), strict=True)
            k_BHSD, v_BHSD = (torch.cat(old_and_new, dim=2) for old_and_new in pairs)
            self.layers[layer] = k_BHSD, v_BHSD
        return self.layers[layer]

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self.layers = [(k_BHSD[:, :, :length], v_BHSD[:, :, :length]) for k_BHSD, v_BHSD in self.layers]

    def release(self) -> None:
        self.layers = []


class StaticCache:
    """A cache allocated at the start for `capacity` tokens per sequence: no copies, but unused places take memory."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self.layers: list[Layer] = []

    def expect(self, ids_BT: Tensor) -> None:
        """Raise CacheFull if the tokens do not fit after those in the cache."""
        if self.length + ids_BT.shape[1] > self.capacity:
            raise CacheFull(
                f"{self.length} tokens in the cache and {ids_BT.shape[1]} new ones: it has room for {self.capacity}"
            )

    def update(self, layer: int, k_BHTD: Tensor, v_BHTD: Tensor) -> Layer:
        """Write the new tokens' keys and values of `layer` in place; return views of all tokens, (B, H, S, D) each."""
        if layer == len(self.layers):
            empty = (new.new_empty(*new.shape[:2], self.capacity, new.shape[3]) for new in (k_BHTD, v_BHTD))
            self.layers.append((next(empty), next(empty)))  # latent attention's two differ in width
        if layer == 0:  # the model has read `length` for its positions; from here on it counts the new tokens too
            self.length += k_BHTD.shape[2]
        for stored, new in zip(self.layers[layer], (k_BHTD, v_BHTD), strict=True):
            stored[:, :, self.length - new.shape[2] : self.length] = new
        k_BHSD, v_BHSD = (stored[:, :, : self.length] for stored in self.layers[layer])
        return k_BHSD, v_BHSD

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens; the others are overwritten later."""
        self.length = length

    def release(self) -> None:
        self.layers, self.length = [], 0


class PagedCache:
    """A cache in the blocks of a pool that all requests share: memory is allocated one block at a time.

    `rows` are the tables of the sequences in the next batch, which may differ in length.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool, self.rows = pool, list[Table]()
        self.layers: list[Layer] = []  # (blocks · block size, H, D) each
        self.length = 0

    def expect(self, ids_BT: Tensor) -> None:
        """Make room for the tokens in each row's table. Raises CacheFull, with nothing changed, if they do not fit."""
        self.rows = self.rows or [Table() for _ in ids_BT]
        self.begins = [len(table.tokens) for table in self.rows]
        written, copies = [], []
        try:
            for table, ids in zip(self.rows, ids_BT.tolist(), strict=True):
                slots, copy = self.pool.extend(table, ids)
                written.append(slots)
                copies += [copy] if copy else []
        except CacheFull:
            self.undo()
            raise
        for source, target in copies:
            for pages in (page for layer in self.layers for page in layer):
                blocks = pages.unflatten(0, (-1, self.pool.size))
                blocks[target] = blocks[source]
        lengths = [len(table.tokens) for table in self.rows]
        read = [self.pool.slots(table) + [0] * (max(lengths) - len(table.tokens)) for table in self.rows]
        self.written_BT = torch.tensor(written, device=ids_BT.device)
        self.read_BS = torch.tensor(read, device=ids_BT.device)  # shorter rows are padded with slot 0, and masked
        self.length = max(self.begins)

    def positions(self) -> Tensor:
        """Return the position of each new token in its own sequence, (B, T)."""
        begins_B = torch.tensor(self.begins, device=self.written_BT.device)
        return begins_B[:, None] + torch.arange(self.written_BT.shape[1], device=begins_B.device)

    def mask(self) -> Tensor:
        """Return which of the S slots each new token may look at: bool (B, 1, T, S)."""
        return torch.arange(self.read_BS.shape[1], device=self.read_BS.device) <= self.positions()[:, None, :, None]

    def update(self, layer: int, k_BHTD: Tensor, v_BHTD: Tensor) -> Layer:
        """Write the new tokens' keys and values of `layer` to their slots; return those of all, (B, H, S, D) each.

        A real engine's attention kernel reads the blocks in place; here they are gathered into a copy.
        """
        if layer == len(self.layers):
            slots = len(self.pool.holders) * self.pool.size
            empty = (new.new_zeros(slots, new.shape[1], new.shape[3]) for new in (k_BHTD, v_BHTD))
            self.layers.append((next(empty), next(empty)))
        if layer == 0:
            self.length += k_BHTD.shape[2]
        for pages, new in zip(self.layers[layer], (k_BHTD, v_BHTD), strict=True):
            pages[self.written_BT] = new.transpose(1, 2)
        k_BHSD, v_BHSD = (pages[self.read_BS].transpose(1, 2) for pages in self.layers[layer])
        return k_BHSD, v_BHSD

    def written(self) -> None:
        """Mark the new tokens as written, after the model has run: full blocks can now be shared."""
        for table in self.rows:
            self.pool.written(table)

    def undo(self) -> None:
        """Drop the tokens of `expect` if the model failed to write them."""
        for table, begin in zip(self.rows, self.begins, strict=True):
            self.pool.crop(table, begin)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens of each row."""
        for table in self.rows:
            self.pool.crop(table, length)
        self.length = length

    def release(self) -> None:
        """Free the rows' blocks."""
        for table in self.rows:
            self.pool.release(table)
        self.rows, self.length = [], 0

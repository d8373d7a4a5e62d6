"""Three places for keys and values: one that grows by copying, one made whole at the start, one in blocks.

All have what `models.gpt.Cache` asks for (`length`, `update`) and three things more. `expect(ids)` is called with the
tokens about to be read, before the model runs: what cannot be held is refused there, with nothing changed.
`crop(length)` drops the last tokens, as speculative decoding needs. `release()` gives all memory back.

    B  batch     T  tokens being read     S  tokens held and being read     H  key-value heads     D  size of a head
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..architectures.gpt import Cache
from .blocks import BlockPool, CacheFull, Table

__all__ = ["GrowingCache", "KVCache", "PagedCache", "StaticCache"]

Layer = tuple[Tensor, Tensor]


class KVCache(Cache, Protocol):
    """What generation asks of a cache; `inference.QuantizedCache` has it too."""

    def expect(self, ids_BT: Tensor) -> None:
        """Make room for the tokens about to be read, or refuse them with nothing changed."""

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens."""

    def release(self) -> None:
        """Give all memory back."""


class GrowingCache:
    """Made longer by concatenation: every token copies all that is held, and old and new live side by side for it."""

    def __init__(self) -> None:
        self.layers: list[Layer] = []

    @property
    def length(self) -> int:
        """Tokens of each sequence held."""
        return self.layers[0][0].shape[2] if self.layers else 0

    def expect(self, ids_BT: Tensor) -> None:
        """Accept any number of tokens."""

    def update(self, layer: int, k_BHTD: Tensor, v_BHTD: Tensor) -> Layer:
        """Append the new tokens' keys and values of `layer`; return all of it, (B, H, S, D) each."""
        if layer == len(self.layers):
            self.layers.append((k_BHTD, v_BHTD))
        else:
            held = zip(self.layers[layer], (k_BHTD, v_BHTD), strict=True)
            k_BHSD, v_BHSD = (torch.cat(old_and_new, dim=2) for old_and_new in held)
            self.layers[layer] = k_BHSD, v_BHSD
        return self.layers[layer]

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens."""
        self.layers = [(k_BHSD[:, :, :length], v_BHSD[:, :, :length]) for k_BHSD, v_BHSD in self.layers]

    def release(self) -> None:
        """Drop all."""
        self.layers = []


class StaticCache:
    """Made whole at the start for `capacity` tokens a sequence: nothing is copied, the unused rest is paid for."""

    def __init__(self, capacity: int) -> None:
        self.capacity, self.length = capacity, 0
        self.layers: list[Layer] = []

    def expect(self, ids_BT: Tensor) -> None:
        """Raise CacheFull where the tokens do not fit behind those held."""
        if self.length + ids_BT.shape[1] > self.capacity:
            raise CacheFull(f"{self.length} tokens held and {ids_BT.shape[1]} new ones: the cache has {self.capacity}")

    def update(self, layer: int, k_BHTD: Tensor, v_BHTD: Tensor) -> Layer:
        """Write the new tokens' keys and values of `layer` in place; return views of all held, (B, H, S, D) each."""
        if layer == len(self.layers):
            whole = (new.new_empty(*new.shape[:2], self.capacity, new.shape[3]) for new in (k_BHTD, v_BHTD))
            self.layers.append((next(whole), next(whole)))  # latent attention's two differ in width
        if layer == 0:  # the model has read `length` for its positions; from here on it counts the new tokens too
            self.length += k_BHTD.shape[2]
        for held, new in zip(self.layers[layer], (k_BHTD, v_BHTD), strict=True):
            held[:, :, self.length - new.shape[2] : self.length] = new
        k_BHSD, v_BHSD = (held[:, :, : self.length] for held in self.layers[layer])
        return k_BHSD, v_BHSD

    def crop(self, length: int) -> None:
        """Forget what is behind the first `length` tokens; it is written over later."""
        self.length = length

    def release(self) -> None:
        """Drop all."""
        self.layers, self.length = [], 0


class PagedCache:
    """In the blocks of a pool, which several caches' worth of requests share: memory is taken a block at a time.

    `rows`: the table of each sequence in the batch that is read next; they may be of different lengths.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool, self.rows = pool, list[Table]()
        self.layers: list[Layer] = []  # (blocks · block size, H, D) each
        self.length = 0

    def expect(self, ids_BT: Tensor) -> None:
        """Make room for the tokens in each row's table. Raises CacheFull, with nothing changed, where there is none."""
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
        held = [self.pool.slots(table) + [0] * (max(lengths) - len(table.tokens)) for table in self.rows]
        self.written_BT = torch.tensor(written, device=ids_BT.device)
        self.held_BS = torch.tensor(held, device=ids_BT.device)  # a shorter row is filled up with slot 0, masked
        self.length = max(self.begins)

    def positions(self) -> Tensor:
        """Return the place of each expected token in its own sequence, (B, T)."""
        begins_B = torch.tensor(self.begins, device=self.written_BT.device)
        return begins_B[:, None] + torch.arange(self.written_BT.shape[1], device=begins_B.device)

    def mask(self) -> Tensor:
        """Return which of the S slots each expected token may look at: bool (B, 1, T, S)."""
        return torch.arange(self.held_BS.shape[1], device=self.held_BS.device) <= self.positions()[:, None, :, None]

    def update(self, layer: int, k_BHTD: Tensor, v_BHTD: Tensor) -> Layer:
        """Write the new tokens' keys and values of `layer` to their slots; return each row's, (B, H, S, D) each.

        A real engine's kernel reads the blocks where they lie; this one gathers them, a copy.
        """
        if layer == len(self.layers):
            slots = len(self.pool.holders) * self.pool.size
            empty = (new.new_zeros(slots, new.shape[1], new.shape[3]) for new in (k_BHTD, v_BHTD))
            self.layers.append((next(empty), next(empty)))
        if layer == 0:
            self.length += k_BHTD.shape[2]
        for pages, new in zip(self.layers[layer], (k_BHTD, v_BHTD), strict=True):
            pages[self.written_BT] = new.transpose(1, 2)
        k_BHSD, v_BHSD = (pages[self.held_BS].transpose(1, 2) for pages in self.layers[layer])
        return k_BHSD, v_BHSD

    def written(self) -> None:
        """Say that the model has run: the rows' full blocks can now be shared."""
        for table in self.rows:
            self.pool.written(table)

    def undo(self) -> None:
        """Take back what was expected and has not been written."""
        for table, begin in zip(self.rows, self.begins, strict=True):
            self.pool.crop(table, begin)

    def crop(self, length: int) -> None:
        """Keep the first `length` tokens of each row."""
        for table in self.rows:
            self.pool.crop(table, length)
        self.length = length

    def release(self) -> None:
        """Give back the rows' blocks."""
        for table in self.rows:
            self.pool.release(table)
        self.rows, self.length = [], 0

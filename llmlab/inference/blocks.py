"""Which block holds which tokens: PagedAttention's block tables (Kwon et al. 2023), without the tensors.

A request's tokens lie in blocks of equal size, anywhere in the pool, so no request needs a contiguous stretch and at
most one block a request is partly empty. A block is counted by how many requests hold it. A full block is found again
by its tokens and all tokens before it, so requests with the same beginning share it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..base.errors import SpecError

__all__ = ["BlockPool", "CacheFull", "Table"]

Prefix = tuple[int, ...]


class CacheFull(RuntimeError):
    """No block is left: a request must wait, or another must go."""


@dataclass
class Table:
    """One request's blocks in the order of its tokens, and those tokens."""

    blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class BlockPool:
    """`count` blocks of `size` tokens each. `holders[b]`: how many tables hold block b; a free one has 0."""

    def __init__(self, count: int, size: int = 16):
        """Raise SpecError unless both are positive."""
        if count < 1 or size < 1:
            raise SpecError(f"{count} blocks of {size} tokens: give at least 1 block of at least 1 token")
        self.size = size
        self.holders = [0] * count
        self.free = list(range(count - 1, -1, -1))  # a stack: the block freed last is taken first
        self.full: dict[Prefix, int] = {}  # all tokens up to a full block's end -> that block
        self.prefix_of: dict[int, Prefix] = {}

    def needed(self, tokens: int) -> int:
        """Return how many blocks hold `tokens`."""
        return -(-tokens // self.size)

    def start(self, tokens: list[int]) -> Table:
        """Return a table that already holds the full blocks which others filled with the beginning of `tokens`.

        At least one token is left out: the model must read something to predict what follows.
        """
        table = Table()
        for end in range(self.size, len(tokens), self.size):
            block = self.full.get(tuple(tokens[:end]))
            if block is None:
                break
            self.holders[block] += 1
            table.blocks.append(block)
        table.tokens = list(tokens[: len(table.blocks) * self.size])
        return table

    def extend(self, table: Table, tokens: list[int]) -> tuple[list[int], tuple[int, int] | None]:
        """Make room for `tokens` after those of `table`.

        Returns the slot of each (block times size plus place), and the (from, to) blocks to copy first, if the last
        one is shared and not full (copy on write). Raises CacheFull, with nothing changed, where the pool is too small.
        """
        begin, copy = len(table.tokens), None
        shared = begin % self.size != 0 and self.holders[table.blocks[-1]] > 1
        missing = self.needed(begin + len(tokens)) - len(table.blocks) + shared
        if missing > len(self.free):
            raise CacheFull(f"{missing} blocks wanted, {len(self.free)} of {len(self.holders)} free")
        if shared:
            copy = (table.blocks[-1], self._take())
            self.holders[copy[0]] -= 1
            table.blocks[-1] = copy[1]
        elif begin % self.size:
            self._forget(table.blocks[-1])  # a crop may have left a block that was once full: it is written again
        table.tokens += tokens
        while len(table.blocks) < self.needed(len(table.tokens)):
            table.blocks.append(self._take())
        return self.slots(table, begin), copy

    def slots(self, table: Table, begin: int = 0) -> list[int]:
        """Return where the tokens of `table` from `begin` on lie."""
        return [table.blocks[i // self.size] * self.size + i % self.size for i in range(begin, len(table.tokens))]

    def written(self, table: Table) -> None:
        """Tell the pool that what `extend` made room for is there: full blocks can now be shared."""
        for place in range(len(table.tokens) // self.size - 1, -1, -1):
            block = table.blocks[place]
            if block in self.prefix_of:
                break  # this one and those before it are known
            prefix = tuple(table.tokens[: (place + 1) * self.size])
            if prefix not in self.full:
                self.full[prefix], self.prefix_of[block] = block, prefix

    def fork(self, table: Table) -> Table:
        """Return a second table on the same blocks; nothing is copied until one of the two writes."""
        for block in table.blocks:
            self.holders[block] += 1
        return Table(list(table.blocks), list(table.tokens))

    def crop(self, table: Table, length: int) -> None:
        """Drop the tokens after the first `length`, and the blocks that only they needed."""
        for block in table.blocks[self.needed(length) :]:
            self._drop(block)
        del table.blocks[self.needed(length) :], table.tokens[length:]

    def release(self, table: Table) -> None:
        """Give back all blocks of `table`, which is empty afterwards."""
        self.crop(table, 0)

    def _take(self) -> int:
        block = self.free.pop()
        self.holders[block] = 1
        return block

    def _drop(self, block: int) -> None:
        self.holders[block] -= 1
        if self.holders[block] == 0:
            self._forget(block)
            self.free.append(block)

    def _forget(self, block: int) -> None:
        if (prefix := self.prefix_of.pop(block, None)) is not None:
            del self.full[prefix]

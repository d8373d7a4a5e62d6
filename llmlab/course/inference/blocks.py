"""PagedAttention's block tables (Kwon et al. 2023): they map tokens to blocks, without the tensors themselves.

A request's tokens lie in blocks of equal size, anywhere in the pool, so no request needs contiguous memory and at most
one block per request is partly empty. Each block has a reference count: the number of requests that use it. A full
block is found by its tokens and all tokens before it, so requests that begin with the same tokens share it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...base.errors import SpecError

Prefix = tuple[int, ...]


class CacheFull(RuntimeError):
    """Too few blocks are free, so the request must wait, or another one must be preempted."""


@dataclass
class Table:
    """One request's blocks in the order of its tokens, and those tokens."""

    blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class BlockPool:
    """`count` blocks of `size` tokens each. `holders[b]` is the number of tables that use block b, 0 if it is free."""

    def __init__(self, count: int, size: int = 16):
        """Raise SpecError unless both are positive."""
        if count < 1 or size < 1:
            raise SpecError(f"{count} blocks of {size} tokens: give at least 1 block of at least 1 token")
        self.size = size
        self.holders = [0] * count
        self.free = list(range(count - 1, -1, -1))  # a stack: the block freed last is used first
        self.full: dict[Prefix, int] = {}  # all tokens up to the end of a full block -> that block
        self.prefix_of: dict[int, Prefix] = {}

    def needed(self, tokens: int) -> int:
        """Return how many blocks `tokens` tokens need."""
        return -(-tokens // self.size)

    def start(self, tokens: list[int]) -> Table:
        """Return a new table that shares the full blocks in which the beginning of `tokens` is already stored.

        At least one token is not in it: the model must read something to predict the next one.
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

        Returns the slot of each token (block · size + place in the block), and the pair of blocks (from, to) to copy
        first if the last block is shared and not full (copy on write). Raises CacheFull, with nothing changed, if too
        few blocks are free.
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
            self._forget(table.blocks[-1])  # a crop may have cut a block that was full: its tokens are about to change
        table.tokens += tokens
        while len(table.blocks) < self.needed(len(table.tokens)):
            table.blocks.append(self._take())
        return self.slots(table, begin), copy

    def slots(self, table: Table, begin: int = 0) -> list[int]:
        """Return the slots of the tokens of `table`, from token `begin` on."""
        return [table.blocks[i // self.size] * self.size + i % self.size for i in range(begin, len(table.tokens))]

    def written(self, table: Table) -> None:
        """Mark the tokens of `table` as written, so that other requests may share its full blocks."""
        for place in range(len(table.tokens) // self.size - 1, -1, -1):
            block = table.blocks[place]
            if block in self.prefix_of:
                break  # this block and those before it are marked already
            prefix = tuple(table.tokens[: (place + 1) * self.size])
            if prefix not in self.full:
                self.full[prefix], self.prefix_of[block] = block, prefix

    def fork(self, table: Table) -> Table:
        """Return a second table with the same blocks; nothing is copied until one of the two is extended."""
        for block in table.blocks:
            self.holders[block] += 1
        return Table(list(table.blocks), list(table.tokens))

    def crop(self, table: Table, length: int) -> None:
        """Drop all tokens after the first `length`, and the blocks that only they needed."""
        for block in table.blocks[self.needed(length) :]:
            self._drop(block)
        del table.blocks[self.needed(length) :], table.tokens[length:]

    def release(self, table: Table) -> None:
        """Free all blocks of `table`, which is empty afterwards."""
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

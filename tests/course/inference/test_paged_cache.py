"""The paged cache's tensors: under arrivals, forks and departures each request reads its own tokens, and no other's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from llmlab.course.inference import BlockPool, PagedCache, StaticCache
from llmlab.course.inference.blocks import CacheFull, Table

BLOCKS, SIZE, HEADS, WIDTH = 10, 2, 1, 3


def keys(table: Table, new: int) -> Tensor:
    """Keys of the last `new` tokens, (1, H, new, D): each says which text it is the last token of."""
    texts = [table.tokens[: i + 1] for i in range(len(table.tokens) - new, len(table.tokens))]
    return torch.tensor([[[hash(tuple(t)) % 9973, len(t), t[-1]] for t in texts]], dtype=torch.float64)[:, None][0]


@settings(max_examples=60)
@given(data=st.data())
def test_no_request_loses_or_reads_anothers_tokens(data: st.DataObject) -> None:
    """Random arrivals with beginnings in common, tokens written, forks, cancellations, and too few blocks for all."""
    cache = PagedCache(BlockPool(BLOCKS, SIZE))
    tables: list[Table] = []
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=7)
    for _ in range(data.draw(st.integers(1, 14), "moves")):
        move = data.draw(st.sampled_from(["arrive", "write", "fork", "cancel"]) if tables else st.just("arrive"))
        if move == "fork":
            tables.append(cache.pool.fork(data.draw(st.sampled_from(tables))))
        elif move == "cancel":
            cache.pool.release(tables.pop(data.draw(st.integers(0, len(tables) - 1))))
        else:
            new = data.draw(tokens)
            table = cache.pool.start(new) if move == "arrive" else data.draw(st.sampled_from(tables))
            new = new[len(table.tokens) :] if move == "arrive" else new
            if move == "arrive":
                tables.append(table)
            read(cache, table, new)
    for table in tables:
        cache.pool.release(table)
    assert len(cache.pool.free) == BLOCKS and not cache.pool.full


def read(cache: PagedCache, table: Table, new: list[int]) -> None:
    """Let a model of two layers read `new`: what each layer gets back must be the whole text's keys, in order."""
    before = list(table.tokens)
    cache.rows = [table]
    try:
        cache.expect(torch.tensor([new]))
    except CacheFull:
        assert table.tokens == before
        return
    for layer in range(2):
        k = keys(table, len(new))[None] + layer
        found_k, found_v = cache.update(layer, k, -k)
        expected = keys(table, len(before) + len(new))[None] + layer
        assert torch.equal(found_k, expected) and torch.equal(found_v, -expected)
    cache.written()


def test_a_full_pool_refuses_a_batch_and_takes_back_the_rows_it_had_begun() -> None:
    cache = PagedCache(BlockPool(3, 2))
    with pytest.raises(CacheFull, match="2 blocks wanted, 1 of 3 free"):
        cache.expect(torch.ones(2, 4, dtype=torch.long))
    assert len(cache.pool.free) == 3


def test_a_full_static_cache_says_how_much_it_has() -> None:
    cache = StaticCache(4)
    cache.expect(torch.ones(1, 4, dtype=torch.long))
    with pytest.raises(CacheFull, match="5 new ones: it has room for 4"):
        cache.expect(torch.ones(1, 5, dtype=torch.long))

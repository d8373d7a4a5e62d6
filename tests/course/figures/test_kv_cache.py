"""The drawings of the KV cache show the bytes and blocks that they are given."""

from llmlab.course.figures.kv_cache import draw_block_tables, draw_budget, draw_heads

GIB = 2**30


def test_requests_that_fit_are_counted_and_none_where_nothing_is_left():
    budgets = {"large": {"weights": 15 * GIB, "other": 2 * GIB, "cache": 7 * GIB + 1},
               "small": {"weights": 15 * GIB, "other": 2 * GIB, "cache": -3 * GIB}}  # fmt: skip
    alt = draw_budget(budgets, 2 * GIB).alt
    assert "large: 7.0 GiB for 3 requests" in alt and "small: 0.0 GiB for 0 requests" in alt


def test_bytes_of_a_token_and_layer():
    assert "MLA: 1.12 KiB" in draw_heads({"GQA": (32, 8, 4096), "MLA": (128, 0, 1152)}).alt


def test_shared_blocks_are_drawn_once():
    tables = {"one": ([0, 1], [1, 2, 3]), "two": ([0, 2], [1, 2, 4])}
    assert "6 tokens: 6 places in blocks, 8 in pieces" in draw_block_tables(tables, [2, 1, 1, 0], 2, 4).alt

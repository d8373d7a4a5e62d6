"""The drawings of the KV cache show the bytes and blocks that they are given."""

from llmlab.course.figures.kv_cache import draw_budget

GIB = 2**30


def test_requests_that_fit_are_counted_and_none_where_nothing_is_left():
    budgets = {"large": {"weights": 15 * GIB, "other": 2 * GIB, "cache": 7 * GIB + 1},
               "small": {"weights": 15 * GIB, "other": 2 * GIB, "cache": -3 * GIB}}  # fmt: skip
    alt = draw_budget(budgets, 2 * GIB).alt
    assert "large: 7.0 GiB for 3 requests" in alt and "small: 0.0 GiB for 0 requests" in alt

"""The figures of the page on training stacks say in their alternative text what they draw."""

from llmlab.course.figures.stacks import draw_logits, draw_shards


def test_the_shards_are_counted():
    alt = draw_shards({"whole": {"weights": 4, "optimizer": 1}, "sharded": {"weights": 1, "optimizer": 1}}, 4).alt
    assert "whole: 4 of 4 shards of weights, 1 of 4 shards of optimizer" in alt
    assert "sharded: 1 of 4 shards of weights" in alt


def test_the_copies_of_the_logits_are_listed_in_bytes():
    copies = {"one": [("logits", 2), ("gradient", 4)], "two": [("logits", 2), ("a chunk", 0.5)]}
    assert draw_logits(copies, {"one": 6 << 30, "two": 5 << 29}).alt.endswith(
        "one: logits 2, gradient 4; two: logits 2, a chunk 0.5."
    )

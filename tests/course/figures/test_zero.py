"""The drawings on ZeRO show the bytes and times that they are given."""

from llmlab.course.figures.zero import SHARDED_PARTS, draw_prefetch, draw_sharded_steps, draw_shards, draw_weights


def test_shards_sum_their_bytes():
    kinds = ("weights", "gradients", "optimizer")
    stages = {"DDP": dict(zip(kinds, (2, 2, 12), strict=True)), "ZeRO-3": dict(zip(kinds, (0.5, 0.5, 3), strict=True))}
    alt = draw_shards(stages).alt
    assert "DDP: 16 bytes" in alt and "ZeRO-3: 4 bytes" in alt


def test_prefetching_hides_all_gathers_but_the_first():
    times = {"gather": 1.0, "forward": 4.0, "backward": 12.0, "reduce": 1.0}
    alt = draw_prefetch(times, 416 * 2**20).alt
    assert "without prefetching: 3 blocks in 15.0 ms" in alt
    assert "forward, the next block is prefetched: 3 blocks in 13.0 ms" in alt


def test_weights_are_compared_with_the_whole_model():
    assert "of 100 of the model. start: 50; end: 50" in draw_weights([("start", 50), ("end", 50)], 100).alt


def test_steps_have_copies_too():
    steps = {"ZeRO-3": dict(zip(SHARDED_PARTS, (0.5, 0.01, 0.04, 0.03, 0.0, 0.04), strict=True))}
    assert "500 + 10 + 40 + 30 + 0 + 40 = 620 ms" in draw_sharded_steps(steps, shares=True).alt

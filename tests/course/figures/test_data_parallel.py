"""The drawings on data parallelism show the numbers that they are given."""

from itertools import pairwise

import pytest

from llmlab.course.figures.data_parallel import (
    PARTS,
    draw_overlap,
    draw_replicas,
    draw_ring,
    draw_steps,
    ring_states,
)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_ring_sums_one_chunk_on_each_rank_and_then_copies_it(ranks):
    states = ring_states(ranks)
    assert len(states) == 2 * (ranks - 1) + 1
    scattered = states[ranks - 1]
    assert [row.index(ranks) for row in scattered] == list(range(ranks))
    assert all(row.count(ranks) == 1 for row in scattered)
    assert states[-1] == [[ranks] * ranks] * ranks
    for before, after in pairwise(states):
        changed = [sum(a != b for a, b in zip(*rows, strict=True)) for rows in zip(before, after, strict=True)]
        assert changed == [1] * ranks  # each rank receives one chunk


def test_the_ring_is_drawn():
    assert draw_ring().alt


def test_replicas_sum_their_parts():
    parts = {"weights": 2 * 2**30, "gradients": 2 * 2**30, "master": 2**31, "AdamW": 4 * 2**30}
    assert "same 10.0 GiB" in draw_replicas(parts, 3.5 * 2**30).alt


def test_overlap_ends_where_the_formula_says():
    alt = draw_overlap(forward=1.0, backward=2.0, message=0.25, buckets=4).alt
    assert "after backward: 8000 ms" in alt  # 2 × (3 + 1)
    assert "in buckets: 6500 ms" in alt  # 2 × (3 + 0.25)
    assert "first micro-batch: 6250 ms" in alt


@pytest.mark.parametrize("shares", [False, True])
def test_steps_sum_their_parts(shares):
    steps = {"8 GPUs": dict(zip(PARTS, (0.5, 0.01, 0.02, 0.1, 0.0), strict=True)),
             "64 GPUs": dict(zip(PARTS, (0.05, 0.01, 0.02, 0.1, 0.02), strict=True))}  # fmt: skip
    assert "8 GPUs: 500 + 10 + 20 + 100 + 0 = 630 ms" in draw_steps(steps, shares).alt

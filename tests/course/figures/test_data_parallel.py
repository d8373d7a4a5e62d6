"""The drawings on data parallelism show the numbers that they are given."""

from itertools import pairwise

import pytest

from llmlab.course.figures.data_parallel import ring_states


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

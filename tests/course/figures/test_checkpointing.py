"""What the drawings of checkpointing add up is what the formula says."""

import pytest

from llmlab.course.figures.checkpointing import policies
from llmlab.course.techniques.checkpointing import peak_bytes

MiB = 2**20


def total(policy):
    return sum(kept + recomputed for kept, recomputed in policy.blocks)


@pytest.mark.parametrize("spacing", [2, 4, 8])
def test_a_drawn_segment_holds_the_bytes_of_the_formula(spacing):
    """The formula counts the input of the recomputed segment twice, the drawing once."""
    everything, each, segments, selective = policies(16, 324 * MiB, 8 * MiB, 46 * MiB, spacing)
    assert total(everything) == 16 * 324 * MiB
    assert total(each) == peak_bytes(16, 1, 8 * MiB, 324 * MiB) - 8 * MiB
    assert total(segments) == peak_bytes(16, spacing, 8 * MiB, 324 * MiB) - 8 * MiB
    assert total(each) < total(selective) < total(everything)

"""The sizes at which a trace is derived, and its range."""

from math import gcd

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmlab.traces.points import points, range_of


@given(st.integers(1, 64), st.integers(1, 9000), st.integers(0, 2))
def test_the_points_of_a_trace_are_on_the_same_side_of_every_known_threshold(batch, tokens, fixed):
    found = points(batch, tokens, fixed)
    if found is None:
        return
    assert len({*found}) == len(found) >= (4, 3, 1)[fixed]
    assert {range_of(*point, fixed) for point in found} == {range_of(batch, tokens, fixed)}
    for sequences, length in found:
        assert (sequences > 1) == (batch > 1) and gcd(length, 64) == gcd(tokens, 64)
        assert 1 / 2 < sequences * length / (batch * tokens) < 2
        assert (sequences * length > 3072) == (batch * tokens > 3072)  # cuda/Embedding.cu


def test_three_numbers_of_sequences_check_a_line_and_two_do_not():
    """From 1024 to 2048 tokens are four to six sequences of 300 tokens, and two or three of 512."""
    assert points(6, 300, fixed=1) == [(4, 300), (5, 300), (6, 300)]
    assert points(2, 512, fixed=1) is None


@pytest.mark.parametrize(("batch", "tokens"), [(1, 1024), (1, 4096), (4, 2048), (8, 500)])
def test_four_points_determine_a_polynomial_of_three_monomials(batch, tokens):
    at = points(batch, tokens)
    rows = [[1, sequences * length, sequences * length**2] for sequences, length in at]
    assert len(rows) == 4 and np.linalg.matrix_rank(rows) == 3


def test_lengths_are_between_the_images_tokens_and_the_models_positions():
    """16 of the lengths from 1024 to 2047 are multiples of 64, eight of those from 1500 on, and two up to 1100."""
    assert points(1, 1024) == [(1, 1024), (1, 1536), (1, 1984), (1, 1280)]
    assert points(1, 1024, least=1500) == [(1, 1536), (1, 1792), (1, 1984), (1, 1664)]
    assert points(1, 1024, most=1100) is None and points(1, 1024, most=1216)[2] == (1, 1216)

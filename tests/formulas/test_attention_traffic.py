"""Bytes of attention: the formulas are what the simulator counts, and what the tiled loops read."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlab.base.errors import SpecError
from llmlab.course.techniques import flash_attention
from llmlab.formulas.time.attention_traffic import (
    STATISTIC,
    flash_traffic,
    least_traffic,
    standard_traffic,
)
from llmlab.simulation.simulator import simulator

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the simulated device must not be mistaken for one")


def kernels(step, S, d):
    """(backward, bytes) of each kernel of a head's attention on a simulated A100, by operator."""
    with simulator("A100-80GB") as sim:
        q, k, v = (torch.randn(1, S, d, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        with sim.operators() as seen:
            out = step(q, k, v)
            out.backward(torch.empty_like(out))
    return [(kernel.name, kernel.backward, kernel.bytes) for kernel in seen if kernel.kind != "none"]


def test_standard_attention_is_two_products_and_a_softmax_and_backward_four_and_one():
    S, d, b = 1024, 64, 2
    seen = kernels(lambda q, k, v: torch.softmax(torch.bmm(q, k.mT), -1) @ v, S, d)
    counted = standard_traffic(S, d, b)
    assert sum(moved for _, backward, moved in seen if not backward) == counted.forward
    # PyTorch's softmax backward first makes grad × output, a kernel of its own: two readings and a writing more.
    extra = 3 * S * S * b
    copied = [moved for name, _, moved in seen if name == "aten::copy_"]  # the gradient of kᵀ, written as k's
    assert copied == [2 * S * d * b]
    assert sum(moved for _, backward, moved in seen if backward) == counted.backward + extra + sum(copied)


def test_the_least_is_each_tensor_once():
    S, d = 1024, 64
    with simulator("A100-80GB") as sim:
        q, k, v = (torch.randn(1, 1, S, d, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        with sim.operators() as seen:
            out = F.scaled_dot_product_attention(q, k, v)
            out.backward(torch.empty_like(out))
    forward, backward = (sum(kernel.bytes for kernel in seen if kernel.backward == when) for when in (False, True))
    state = 16  # the random number generator's
    assert forward - least_traffic(S, d).forward in range(2 * state + 1)
    assert backward - least_traffic(S, d).backward in range(2 * state + 1)


@settings(max_examples=25)
@given(S=st.integers(1, 100), M=st.integers(7, 120), causal=st.booleans())
def test_tiles_read_what_the_loops_read(S, M, causal):
    """`masked` is called once for each tile of scores, with its rows and columns: from these follow all readings."""
    d, b = 4, 8
    tiles = []
    keep = flash_attention.masked

    def noting(scores, rows, columns, is_causal):
        tiles.append((rows.stop - rows.start, columns.stop - columns.start))
        return keep(scores, rows, columns, is_causal)

    q, k, v = (torch.randn(1, 1, S, d, dtype=torch.float64) for _ in range(3))
    flash_attention.masked = noting
    try:
        out, lse = flash_attention.flash_forward(q, k, v, causal, M)
        keys_forward = sum(columns for _, columns in tiles)
        tiles.clear()
        flash_attention.flash_backward(q, k, v, out, lse, out, causal, M)
        queries_backward = sum(rows for rows, _ in tiles)
    finally:
        flash_attention.masked = keep
    counted = flash_traffic(S, d, b, M, causal)
    assert counted.forward == 2 * S * d * b + STATISTIC * S + 2 * d * b * keys_forward
    sums = 2 * S * d * b + STATISTIC * S
    keys = 4 * S * d * b + (2 * d * b + 2 * STATISTIC) * queries_backward
    queries = 3 * S * d * b + 2 * STATISTIC * S + 2 * d * b * keys_forward
    assert counted.backward == sums + keys + queries


def test_a_tile_as_long_as_the_sequence_reads_each_tensor_once_forward():
    assert flash_traffic(512, 64, 2, 512).forward == least_traffic(512, 64, 2).forward


def test_larger_tiles_move_less_and_causal_ones_half():
    small, large = (flash_traffic(8192, 64, 2, M) for M in (64, 128))
    assert small.forward / large.forward == pytest.approx(2, rel=0.02)
    assert flash_traffic(8192, 64, 2, 64, True).forward / small.forward == pytest.approx(0.5, rel=0.02)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: standard_traffic(0, 64), "S=0 is not a whole number"),
        (lambda: flash_traffic(64, 64, M=0), "M=0 is not a whole number"),
    ],
)
def test_errors(call, message):
    with pytest.raises(SpecError, match=message):
        call()

"""flex_attention on a simulated GPU: compiled it writes no scores, without torch.compile it writes them all."""

import warnings

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

import llmlab as lab
from llmlab.base.errors import NotAvailable

B, H, HKV, T, D = 2, 8, 2, 1024, 64
OUT, KEYS, ROWS = B * H * T * D * 2, B * HKV * T * D * 2, B * H * T * 4  # bytes: bf16, bf16, a number a row in fp32


@pytest.fixture
def sim():
    with warnings.catch_warnings(), lab.simulator("A100-40GB") as sim:
        warnings.simplefilter("ignore")
        yield sim


def inputs(**changes):
    heads = {"q": H, "k": HKV, "v": HKV}
    return [torch.empty(B, heads[name], T, D, dtype=torch.bfloat16, device="cuda", **changes) for name in heads]


def masked():
    return create_block_mask(lambda b, h, q, k: q >= k, None, None, T, T, device="cuda")


def test_compiled_it_keeps_its_output_and_a_number_a_row(sim):
    attend, mask = torch.compile(flex_attention), masked()
    q, k, v = inputs(requires_grad=True)
    sim.reset_peak()
    before = sim.allocated
    out = attend(q, k, v, score_mod=lambda score, *place: score * 2, block_mask=mask, enable_gqa=True)
    assert sim.allocated - before == OUT + ROWS
    assert sim.peak_allocated - before == OUT + 2 * ROWS  # the greatest scores, which nobody asked for
    sim.reset_peak()
    out.backward(torch.ones_like(out))
    # With the gradient: the sums of output x gradient, then the gradients of queries, keys and values.
    assert sim.peak_allocated - before == OUT + ROWS + OUT + ROWS + OUT + 2 * KEYS
    assert [each.grad.shape for each in (q, k, v)] == [each.shape for each in (q, k, v)]
    assert any(note.code == "triton-kernels" and "flex_attention" in note for note in sim.notes)


def test_its_statistics_have_a_gradient_too(sim):
    q, k, v = inputs(requires_grad=True)
    out, aux = torch.compile(flex_attention)(q, k, v, enable_gqa=True, return_aux=AuxRequest(lse=True))
    assert aux.lse.shape == (B, H, T) and aux.lse.dtype == torch.float32
    before = sim.allocated
    sim.reset_peak()
    (out.sum() + aux.lse.sum()).backward()
    assert q.grad is not None and sim.peak_allocated - before >= OUT + 2 * KEYS + 2 * ROWS


def test_the_output_lies_as_the_queries_do(sim):
    q = torch.empty(B, T, H, D, device="cuda").transpose(1, 2)
    assert torch.compile(flex_attention)(q, q, q).stride() == q.stride()


def test_without_compile_it_writes_the_scores(sim):
    scores = B * H * T * T * 4
    q, k, v = inputs(requires_grad=True)
    mask = masked()
    sim.reset_peak()
    before = sim.allocated
    out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
    forward = sim.peak_allocated - before
    sim.reset_peak()
    out.sum().backward()
    assert forward > 3 * scores and sim.peak_allocated - before > 5 * scores
    assert sim.allocated - before < scores and q.grad.shape == q.shape
    assert any(note.code == "flex-attention-eager" for note in sim.notes)


def test_a_bias_that_learns_is_refused(sim):
    bias = torch.zeros(T, device="cuda", requires_grad=True)
    with pytest.raises(NotAvailable, match=r"score_mod takes from outside.*test_flex_attention.py"):
        flex_attention(*inputs(), score_mod=lambda score, b, h, q, k: score + bias[k], enable_gqa=True)

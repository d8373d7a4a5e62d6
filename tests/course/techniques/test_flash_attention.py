"""FlashAttention in plain PyTorch equals SDPA up to rounding, and saves only the tensors that the paper says."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from llmlab.base.errors import SpecError
from llmlab.course.techniques.flash_attention import flash_attention, online_softmax, sdpa_backend, standard_attention


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def heads(B, H, K, T, D, dtype=torch.float64):
    shapes = (B, H, T, D), (B, K, T, D), (B, K, T, D)
    return [normal(*shape, seed=seed).to(dtype).requires_grad_() for seed, shape in enumerate(shapes)]


@given(st.integers(1, 50), st.integers(1, 60), st.integers(0, 1000))
def test_online_softmax_is_softmax_whatever_the_tile(length, tile, seed):
    x = normal(length, seed=seed) * 30
    for _m, _total in online_softmax(x, tile):
        pass
    assert torch.allclose(torch.exp(x - _m) / _total, torch.softmax(x, 0))


def test_online_softmax_corrects_the_old_sum_when_the_maximum_grows():
    steps = [(m.item(), total.item()) for m, total in online_softmax(torch.tensor([0.0, 0.0, 1.0, 1.0]), 2)]
    assert steps == [(0.0, 2.0), (1.0, pytest.approx(2 + 2 / 2.718281828))]


def test_a_first_tile_that_is_masked_out_is_no_nan():
    """-inf - (-inf) is NaN: the maximum so far has to stay finite."""
    *_, (m, total) = online_softmax(torch.tensor([-torch.inf, -torch.inf, 1.0, 1.0]), 2)
    assert (m.item(), total.item()) == (1.0, 2.0)


def test_online_softmax_does_not_overflow():
    *_, (m, total) = online_softmax(torch.tensor([1000.0, 1001.0]), 1)  # exp(1000) is infinite in fp32 and in fp64
    assert (m.item(), total.item()) == (1001.0, pytest.approx(1 + 1 / 2.718281828))


@given(
    T=st.integers(1, 40), D=st.integers(1, 9), K=st.integers(1, 3), G=st.integers(1, 3), tile=st.integers(1, 48),
    causal=st.booleans(),
)  # fmt: skip
def test_outputs_and_gradients_are_sdpas(T, D, K, G, tile, causal):
    ours, theirs = heads(2, K * G, K, T, D), heads(2, K * G, K, T, D)
    y = flash_attention(*ours, causal, tile)
    wanted = F.scaled_dot_product_attention(*theirs, is_causal=causal, enable_gqa=True)
    assert torch.allclose(y, wanted, atol=1e-12)
    gradient = normal(*y.shape, seed=7)
    for a, b in zip(torch.autograd.grad(y, ours, gradient), torch.autograd.grad(wanted, theirs, gradient), strict=True):
        assert torch.allclose(a, b, atol=1e-11)


def test_gradcheck_agrees():
    assert torch.autograd.gradcheck(lambda q, k, v: flash_attention(q, k, v, True, 3), heads(1, 4, 2, 7, 3))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.float16, 5e-3), (torch.bfloat16, 4e-2)])
def test_half_precision_is_rounded_once(dtype, tolerance):
    """Relative to the largest value: ten roundings of the dtype; in fp32 also sums of 50 terms, 2^-24 per term."""
    ours = heads(1, 4, 2, 50, 16, dtype)
    exact = [t.detach().double().requires_grad_() for t in ours]
    y, wanted = flash_attention(*ours, tile=16), standard_attention(*exact)
    gradients, exact_gradients = torch.autograd.grad(y.sum(), ours), torch.autograd.grad(wanted.sum(), exact)
    for a, b in zip((y, *gradients), (wanted, *exact_gradients), strict=True):
        assert a.dtype == dtype
        assert (a - b).abs().max() <= tolerance * b.abs().max()


def saved_for_backward(function, *inputs):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = function(*inputs)
    return saved, out


def test_backward_is_left_q_k_v_the_output_and_logsumexp_and_nothing_else():
    q, k, v = heads(1, 4, 2, 64, 8, torch.float16)
    saved, out = saved_for_backward(lambda *inputs: flash_attention(*inputs, tile=16), q, k, v)
    *first_four, lse = saved
    assert [t.data_ptr() for t in first_four] == [t.data_ptr() for t in (q, k, v, out)]
    assert lse.shape == (1, 4, 64) and lse.dtype == torch.float32
    scores = q.float() @ k.float().repeat_interleave(2, 1).mT / 8**0.5
    scores = scores.masked_fill(torch.ones(64, 64, dtype=torch.bool).triu(1), -torch.inf)
    assert torch.allclose(lse, scores.logsumexp(-1), atol=1e-5)


def test_what_is_saved_grows_with_t_and_standard_attentions_with_t_squared():
    def kept(function, T):
        saved, _ = saved_for_backward(function, *heads(1, 2, 2, T, 8))
        return sum(t.nbytes for t in {t.data_ptr(): t for t in saved}.values())

    assert kept(flash_attention, 512) == 2 * kept(flash_attention, 256)
    assert kept(standard_attention, 512) > 3.5 * kept(standard_attention, 256)


def test_no_tile_of_scores_is_larger_than_the_tile():
    """Neither forward nor backward makes a T x T tensor."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Shapes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() > 2 and D not in out.shape[-2:]:
                largest.append(out.shape[-2] * out.shape[-1])
            return out

    D, largest = 5, []
    q, k, v = (t.detach() for t in heads(1, 2, 2, 64, D))
    with Shapes():
        standard_attention(q, k, v)
    assert max(largest) == 64 * 64
    largest.clear()
    q.requires_grad_()
    with Shapes():
        flash_attention(q, k, v, tile=16).sum().backward()
    assert max(largest) == 16 * 16


def test_flash_does_two_products_forward_and_five_backward_and_standard_two_and_four():
    from torch.utils.flop_counter import FlopCounterMode

    def products(function, T, causal):
        q, k, v = heads(1, 1, 1, T, 8)
        with FlopCounterMode(display=False) as forward:
            out = function(q, k, v, causal)
        with FlopCounterMode(display=False) as backward:
            out.sum().backward()
        return forward.get_total_flops() / (2 * T * T * 8), backward.get_total_flops() / (2 * T * T * 8)

    tiled = lambda q, k, v, causal: flash_attention(q, k, v, causal, 32)  # noqa: E731
    assert products(standard_attention, 256, False) == products(standard_attention, 256, True) == (2, 4)
    assert products(tiled, 256, False) == (2, 5)
    share = (1 + 32 / 256) / 2  # of the tiles: the mask leaves out the later ones
    assert products(tiled, 256, True) == (2 * share, 5 * share)


def test_torch_says_which_backend_it_takes():
    q, k, v = (t.detach().float() for t in heads(1, 4, 2, 8, 8))
    assert sdpa_backend(q, q, q, causal=True) == sdpa_backend(q, k, v) == "flash_attention"  # the CPU's
    assert sdpa_backend(q, q, q.transpose(2, 3).contiguous().transpose(2, 3)) == "math"  # channels are not adjacent


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q[:, :3], k, v), "3 query heads cannot share 2 key heads; k must divide a"),
        (lambda q, k, v: (q, k, v[..., :2]), r"give q \(B, a, S, d\), k and v \(B, k, S, d\)"),
        (lambda q, k, v: (q, k.float(), v), "give one floating-point dtype"),
    ],
)
def test_errors(change, message):
    with pytest.raises(SpecError, match=message):
        flash_attention(*change(*heads(1, 4, 2, 6, 3)))

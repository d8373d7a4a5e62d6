"""Every rung of every kernel is the formula in fp64, forward and backward, in each dtype, at odd shapes, any strides.

Without a GPU, Triton's rungs run in its interpreter (tests/conftest.py); with one they are compiled.
"""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

import llmlab.course.kernels as kernels
from llmlab.base.errors import NotAvailable, SpecError
from llmlab.course.kernels import rungs
from llmlab.course.kernels.ladder import rms_norm

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Largest error, relative to the largest value: ten roundings of 2^-11 and 2^-8; in fp32 sums of up to 150 terms, whose
# order and whose exp() depend on the processor, at 2^-24 per term and as much again.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))
TRITON = pytest.mark.skipif(sys.platform != "linux", reason="Triton has wheels for Linux alone")
RUNGS = pytest.mark.parametrize("rung", [0, 1, pytest.param(3, marks=TRITON), pytest.param(4, marks=TRITON)])


def normal(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def assert_equal(call, reference, inputs, dtype, floor=1e-30):
    """`call` on leaves in `dtype` gives what `reference` gives on the same values in fp64, and so do the gradients.

    `floor`: errors are a part of at least this, where a gradient is exactly zero.
    """
    leaves = [x.to(DEVICE, dtype).requires_grad_() for x in inputs]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    found, wanted = call(*leaves), reference(*exact)
    found, wanted = (one if isinstance(one, tuple) else (one,) for one in (found, wanted))
    gradients = [normal(*one.shape, seed=9).to(DEVICE, one.dtype) for one in found]
    torch.autograd.backward(found, gradients)
    torch.autograd.backward(wanted, [g.double() for g in gradients])
    pairs = [*zip(found, wanted, strict=True), *((a.grad, b.grad) for a, b in zip(leaves, exact, strict=True))]
    for at, (ours, theirs) in enumerate(pairs):
        assert ours.shape == theirs.shape
        error = (ours.double() - theirs).abs().max() / theirs.abs().max().clamp(min=floor)
        assert error <= TOLERANCE[dtype], f"tensor {at} of {len(pairs)}: {error:.1e} of its largest value"
    assert all(leaf.grad.dtype == dtype for leaf in leaves)


# ---------------------------------------------------------------- rows and values


@RUNGS
@DTYPES
@pytest.mark.parametrize("shape", [(3, 5, 37), (1, 1), (2, 64)], ids=str)
def test_softmax(rung, dtype, shape):
    exact = lambda x: torch.softmax(x * 4, -1)  # noqa: E731
    assert_equal(lambda x: kernels.softmax(x * 4, rung=rung), exact, [normal(*shape)], dtype)


@RUNGS
@DTYPES
@pytest.mark.parametrize("shape", [(3, 5, 37), (1, 16), (11, 3)], ids=str)
def test_rms_norm(rung, dtype, shape, monkeypatch):
    monkeypatch.setattr(rms_norm, "PROGRAMS", 4)  # more rows than programs, without hundreds of them

    def exact(x, weight):
        return x / (x.square().mean(-1, keepdim=True) + 0.1).sqrt() * weight

    inputs = [normal(*shape), normal(shape[-1], seed=1)]
    assert_equal(lambda x, weight: kernels.rms_norm(x, weight, 0.1, rung=rung), exact, inputs, dtype)


@RUNGS
@DTYPES
@pytest.mark.parametrize("shape", [(3, 5, 137), (1, 1)], ids=str)
def test_swiglu(rung, dtype, shape):
    inputs = [normal(*shape), normal(*shape, seed=1)]
    exact = lambda gate, up: gate / (1 + torch.exp(-gate)) * up  # noqa: E731
    assert_equal(lambda gate, up: kernels.swiglu(gate, up, rung=rung), exact, inputs, dtype)


@RUNGS
@DTYPES
@pytest.mark.parametrize("leading", [(), (1,), (2,)], ids=str)
def test_rope(rung, dtype, leading):
    B, H, K, T, D = 2, 3, 1, 5, 6
    # The two halves differ here, unlike Llama's, so that a kernel that mixes them up fails.
    cos, sin = (normal(*leading, T, D, seed=seed).to(DEVICE, dtype) for seed in (3, 4))

    def exact(q, k):
        def turn(x):
            rotated = torch.cat((-x[..., D // 2 :], x[..., : D // 2]), -1)
            return x * cos.double().expand(B, T, D)[:, None] + rotated * sin.double().expand(B, T, D)[:, None]

        return turn(q), turn(k)

    inputs = [normal(B, H, T, D), normal(B, K, T, D, seed=1)]
    assert_equal(lambda q, k: kernels.rope(q, k, cos, sin, rung=rung), exact, inputs, dtype)


@RUNGS
def test_rope_turns_by_the_angle_and_keeps_lengths(rung):
    angle = torch.arange(4.0, device=DEVICE)[:, None].repeat(1, 2)
    q = torch.tensor([1.0, 0.0], device=DEVICE).expand(1, 1, 4, 2)
    turned, _ = kernels.rope(q, q, angle.cos(), angle.sin(), rung=rung)
    assert torch.allclose(turned[0, 0], torch.stack((angle[:, 0].cos(), angle[:, 0].sin()), -1))


# ---------------------------------------------------------------- losses

TARGETS = torch.tensor([3, -100, 0, 36, 5], device=DEVICE)


@RUNGS
@DTYPES
def test_cross_entropy_leaves_ignored_rows_out(rung, dtype):
    exact = lambda x: F.cross_entropy(x, TARGETS)  # noqa: E731
    assert_equal(lambda x: kernels.cross_entropy(x, TARGETS, rung=rung), exact, [normal(5, 37)], dtype)


@RUNGS
@DTYPES
@pytest.mark.parametrize("chunk", [2, 128], ids="chunk={}".format)
def test_linear_cross_entropy(rung, dtype, chunk):
    assert_equal(
        lambda hidden, weight: kernels.linear_cross_entropy(hidden, weight, TARGETS, rung=rung, chunk=chunk),
        lambda hidden, weight: F.cross_entropy(hidden @ weight.T, TARGETS),
        [normal(5, 16), normal(37, 16, seed=1)],
        dtype,
    )


@TRITON
@DTYPES
@pytest.mark.parametrize(("function", "rung"), [("softmax", 4), ("cross_entropy", 3), ("cross_entropy", 4)])
def test_a_row_of_llama_3s_vocabulary(function, rung, dtype):
    """128,256 columns: 16 tiles, the last one not full."""
    x, target = normal(1, 128256) * 5, torch.tensor([128255], device=DEVICE)
    if function == "softmax":
        assert_equal(lambda x: kernels.softmax(x, rung=rung), lambda x: torch.softmax(x, -1), [x], dtype)
    else:
        ours = lambda x: kernels.cross_entropy(x, target, rung=rung)  # noqa: E731
        assert_equal(ours, lambda x: F.cross_entropy(x, target), [x], dtype)


@TRITON
def test_a_first_tile_that_is_masked_out_is_no_nan():
    x = torch.zeros(1, 70000, device=DEVICE)
    x[:, :8192] = -torch.inf
    y = kernels.softmax(x, rung=4)
    assert torch.equal(y, torch.softmax(x, -1))


@TRITON
@pytest.mark.parametrize("rung", [3, 4])
def test_a_target_outside_the_vocabulary_is_nan_and_no_other_rows_memory(rung):
    logits = torch.zeros(2, 5, device=DEVICE)
    assert kernels.cross_entropy(logits, torch.tensor([0, 5], device=DEVICE), rung=rung).isnan()


@RUNGS
def test_no_counted_row_is_a_nan_loss_and_no_gradient_as_in_pytorch(rung):
    nothing = torch.full((5,), -100, device=DEVICE)
    logits, hidden, weight = (normal(n, 7).float().to(DEVICE).requires_grad_() for n in (5, 5, 11))
    loss = kernels.cross_entropy(logits, nothing, rung=rung)
    fused = kernels.linear_cross_entropy(hidden, weight, nothing, rung=rung, chunk=2)
    assert loss.isnan() and fused.isnan()
    gradients = torch.autograd.grad(loss, logits) + torch.autograd.grad(fused, (hidden, weight))
    assert not any(gradient.any() for gradient in gradients)  # NaN is true


@RUNGS
def test_what_fp16_cannot_hold_is_not_lost_before_the_loss_is_scaled(rung):
    """A probability of 6e-6 over 64 rows is 1e-7, nearly fp16's smallest number, until GradScaler's factor comes."""
    rows, scale = 64, 4096.0
    hidden, weight = normal(rows, 16).half(), normal(37, 16, seed=1).half() / 64
    hidden[:, 0], weight[0, 0] = 12, 1  # nearly all of the probability
    targets = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
    leaves = [t.to(DEVICE).requires_grad_() for t in (hidden, weight)]
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    loss = kernels.linear_cross_entropy(*leaves, targets, rung=rung, chunk=16)
    _, found = torch.autograd.grad(loss * scale, leaves)
    _, wanted = torch.autograd.grad(F.cross_entropy(exact[0] @ exact[1].T, targets) * scale, exact)
    others = found[1:].double(), wanted[1:]
    assert (others[0] - others[1]).abs().max() <= 0.02 * others[1].abs().max()


@TRITON
def test_inplace_writes_the_gradient_over_the_logits_and_refuses_a_second_backward():
    leaf = normal(5, 37).float().to(DEVICE).requires_grad_()
    logits = leaf * 1
    loss = kernels.cross_entropy(logits, TARGETS, rung=4, inplace=True)
    (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
    assert gradient.data_ptr() == logits.data_ptr()
    wanted = torch.autograd.grad(F.cross_entropy(leaf, TARGETS), leaf)[0]
    assert torch.allclose(gradient, wanted, atol=1e-7)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(loss, logits)


def both(call, *inputs):
    """Result and gradients of `call`, with a gradient of its own for each result, and where they are in memory."""
    leaves = [x.float().to(DEVICE).requires_grad_() for x in inputs]
    values = [leaf * 1 for leaf in leaves]
    results = call(*values)
    results = results if isinstance(results, tuple) else (results,)
    given = [normal(*one.shape, seed=8).float().to(DEVICE) for one in results]
    found = torch.autograd.grad(results, values, given, retain_graph=True)
    return values, results, given, found


@TRITON
def test_inplace_kernels_give_the_same_in_memory_that_is_there():
    """As Liger's do: RMSNorm over the given gradient, SwiGLU over gate and up, RoPE over q, k and their gradients."""
    x, weight, gate, up = normal(5, 16), normal(16, seed=1), normal(3, 7, seed=2), normal(3, 7, seed=3)
    q, k = normal(1, 2, 5, 8, seed=4), normal(1, 1, 5, 8, seed=5)
    angle = normal(5, 8, seed=6).float().to(DEVICE)
    for call, inputs in (
        (lambda x, weight, **how: kernels.rms_norm(x, weight, rung=4, **how), (x, weight)),
        (lambda gate, up, **how: kernels.swiglu(gate, up, rung=4, **how), (gate, up)),
        (lambda q, k, **how: kernels.rope(q, k, angle.cos(), angle.sin(), rung=4, **how), (q, k)),
    ):
        _, wanted, _, gradients = both(call, *inputs)
        values, found, given, over = both(lambda *values, call=call: call(*values, inplace=True), *inputs)
        for ours, theirs in zip((*found, *over), (*wanted, *gradients), strict=True):
            assert torch.equal(ours, theirs)
        there = {t.data_ptr() for t in (*values, *given)}
        assert over[0].data_ptr() in there and (len(over) == 1 or inputs[0] is x or over[1].data_ptr() in there)
        if inputs[0] is q:
            assert found[0].data_ptr() == values[0].data_ptr()
        if inputs[0] is gate:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                torch.autograd.grad(found, values, given)


@TRITON
def test_inplace_copies_what_was_expanded():
    """The gradient of a sum over heads is one row, expanded: overwritten, it would be rotated once per head."""
    q = normal(1, 2, 3, 4).float().to(DEVICE).requires_grad_()
    angle = normal(3, 4, seed=6).float().to(DEVICE)
    ways = [kernels.rope(q * 1, q * 1, angle.cos(), angle.sin(), rung=4, inplace=inplace) for inplace in (False, True)]
    given = normal(1, 3, 4, seed=7).float().to(DEVICE)
    plain, over = (torch.autograd.grad((a + b).sum(1), q, given.clone())[0] for a, b in ways)
    assert torch.equal(plain, over)
    x = normal(3, 4).float().to(DEVICE).requires_grad_()
    sums = [kernels.rms_norm(x, torch.ones_like(x[0]), rung=4, inplace=inplace).sum() for inplace in (False, True)]
    assert torch.equal(torch.autograd.grad(sums[0], x)[0], torch.autograd.grad(sums[1], x)[0])


@TRITON
def test_inplace_turns_one_tensor_that_is_both_once():
    """One tensor as q and k, and one as their gradient, as that of a sum is."""
    q = normal(1, 2, 3, 4).float().to(DEVICE).requires_grad_()
    angle = normal(3, 4, seed=6).float().to(DEVICE)
    given = normal(1, 2, 3, 4, seed=7).float().to(DEVICE)
    found = []
    for inplace in (False, True):
        one = q * 1
        a, b = kernels.rope(one, one, angle.cos(), angle.sin(), rung=4, inplace=inplace)
        found.append((a.detach().clone(), b.detach().clone(), *torch.autograd.grad(a + b, q, given.clone())))
    for plain, over in zip(*found, strict=True):
        assert torch.equal(plain, over)


@pytest.mark.parametrize(
    ("vocab", "chunks"), [(200, [256, 256, 256, 232]), (64, [896, 104]), (2000, [128] * 7 + [104])]
)
def test_a_chunk_of_logits_fills_the_tiles_of_a_product(monkeypatch, vocab, chunks):
    """Of 1000 rows of 64 channels: 320, 1000 and 32 rows of logits would take the memory of all hidden states."""
    seen, linear = [], torch.nn.functional.linear
    monkeypatch.setattr(
        torch.nn.functional, "linear", lambda hidden, weight: seen.append(len(hidden)) or linear(hidden, weight)
    )
    kernels.linear_cross_entropy(torch.randn(1000, 64), torch.randn(vocab, 64), torch.zeros(1000).long(), rung=1)
    assert seen == chunks


@pytest.mark.parametrize("rung", [1, pytest.param(3, marks=TRITON), pytest.param(4, marks=TRITON)])
def test_linear_cross_entropy_never_holds_the_logits(rung):
    """No tensor in forward or backward has more rows of logits than a chunk."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() == 2 and out.shape[1] == 512:
                largest = max(largest, out.shape[0])
            return out

    hidden, weight = (normal(n, 8).float().to(DEVICE).requires_grad_() for n in (64, 512))
    targets = torch.arange(64, device=DEVICE)
    with Sizes():
        kernels.linear_cross_entropy(hidden, weight, targets, rung=rung, chunk=16).backward()
    assert largest == 16
    with Sizes():
        kernels.linear_cross_entropy(hidden, weight, targets, rung=0).backward()
    assert largest == 64


@pytest.mark.parametrize("rung", [1, pytest.param(4, marks=TRITON)])
def test_linear_cross_entropy_makes_no_gradients_that_nobody_asked_for(rung):
    hidden, weight = (normal(n, 8).float().to(DEVICE).requires_grad_() for n in (5, 37))
    with torch.no_grad():
        assert not kernels.linear_cross_entropy(hidden, weight, TARGETS, rung=rung).requires_grad
    kernels.linear_cross_entropy(hidden, weight.detach(), TARGETS, rung=rung).backward()
    assert hidden.grad is not None and weight.grad is None


# ---------------------------------------------------------------- strides


@RUNGS
def test_strides_of_inputs_and_of_gradients(rung):
    """Transposed, sliced and expanded inputs, and the gradient of .sum(), whose strides are all zero."""
    wide = normal(4, 3, 12).float().to(DEVICE)
    for x in (wide.transpose(0, 1), wide[:, ::2], wide[..., 3:9], wide.transpose(0, 2), wide[:1].expand(2, 3, 12)):
        leaf = x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
        strided = x.detach().requires_grad_()
        weight = normal(x.shape[-1]).float().to(DEVICE)
        for call in (
            lambda x: kernels.softmax(x, rung=rung).square(),
            lambda x, weight=weight: kernels.rms_norm(x, weight, 1e-5, rung=rung),
            lambda x: kernels.swiglu(x, x * 2, rung=rung),
            lambda x: kernels.cross_entropy(x, torch.ones_like(x[..., 0], dtype=torch.int64), rung=rung),
        ):
            a, b = call(strided), call(leaf)
            assert torch.allclose(a, b, atol=1e-6)
            (da,), (db,) = torch.autograd.grad(a.sum(), strided), torch.autograd.grad(b.sum(), leaf)
            assert torch.allclose(da, db, atol=1e-5)


@RUNGS
def test_strides_of_heads(rung):
    """(B, T, H, D) viewed as (B, H, T, D), as a projection returns it."""
    q, k, v = (normal(2, 20, heads, 16, seed=heads).float().to(DEVICE).transpose(1, 2) for heads in (4, 2, 2))
    angle = normal(20, 32).float().to(DEVICE)[:, ::2]
    for call in (
        lambda q, k, v: torch.cat(kernels.rope(q, k, angle.cos(), angle.sin(), rung=rung), 1),
        lambda q, k, v: kernels.attention(q, k, v, rung=rung),
    ):
        strided = [t.detach().requires_grad_() for t in (q, k, v)]
        plain = [t.detach().contiguous().requires_grad_() for t in (q, k, v)]
        a, b = call(*strided), call(*plain)
        assert torch.allclose(a, b, atol=1e-6)
        for da, db in zip(
            torch.autograd.grad(a.sum(), strided, allow_unused=True),
            torch.autograd.grad(b.sum(), plain, allow_unused=True), strict=True,
        ):  # fmt: skip
            assert (da is None and db is None) or torch.allclose(da, db, atol=1e-5)


# ---------------------------------------------------------------- attention


@RUNGS
@DTYPES
@pytest.mark.parametrize(("T", "D", "causal"), [(70, 16, True), (33, 24, False), (1, 16, True)])
def test_attention_with_grouped_heads(rung, dtype, T, D, causal):
    def exact(q, k, v):
        k, v = (t.repeat_interleave(2, 1) for t in (k, v))
        scores = q @ k.mT / D**0.5
        if causal:
            scores = scores.masked_fill(torch.ones(T, T, dtype=torch.bool, device=DEVICE).triu(1), -torch.inf)
        return torch.softmax(scores, -1) @ v

    inputs = [normal(1, heads, T, D, seed=seed) for seed, heads in enumerate((4, 2, 2))]
    assert_equal(lambda q, k, v: kernels.attention(q, k, v, causal, rung=rung), exact, inputs, dtype, 1.0)


@TRITON
@DTYPES
@pytest.mark.parametrize("D", [32, 64, 80, 128])
def test_attention_at_the_head_sizes_of_models(D, dtype):
    """Long enough for tiles below the diagonal, which need no mask, and for a last tile that is not full."""
    T = 70 if dtype == torch.float32 else 150
    inputs = [normal(1, 1, T, D, seed=seed) for seed in range(3)]
    exact = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: E731
    assert_equal(lambda q, k, v: kernels.attention(q, k, v, rung=4), exact, inputs, dtype)


@TRITON
def test_attention_without_a_mask_over_many_tiles():
    inputs = [normal(1, heads, 150, 16, seed=seed) for seed, heads in enumerate((2, 1, 1))]
    exact = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)  # noqa: E731
    assert_equal(lambda q, k, v: kernels.attention(q, k, v, False, rung=4), exact, inputs, torch.float16)


@TRITON
@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
@pytest.mark.parametrize("causal", [True, False])
def test_attention_with_scores_far_from_zero(causal):
    """Every score near -400 and logsumexp with it: what lies past the last key must not become exp(400).

    fp32 holds such scores to 400 · 2^-24 = 2.4e-5, their exponentials are off by that part, and keys of 10 multiply it:
    4e-6 of 60, a fifth of what is allowed.
    """
    q, k, v = (normal(1, 1, 35, 16, seed=seed) * 0.1 for seed in range(3))
    q, k = q + 10, k - 10
    exact = lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)  # noqa: E731
    assert_equal(lambda q, k, v: kernels.attention(q, k, v, causal, rung=4), exact, [q, k, v], torch.float32, 60.0)


@RUNGS
def test_under_autocast_products_are_in_its_dtype_and_gradients_in_fp32(rung):
    """As F.linear and SDPA do it, whichever of the inputs are in half precision already."""
    q, k, v = (
        normal(1, heads, 5, 8, seed=seed).float().to(DEVICE).requires_grad_() for seed, heads in enumerate((2, 1, 1))
    )
    hidden, weight = normal(5, 16).float().to(DEVICE), normal(37, 16, seed=1).float().to(DEVICE).requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16):
        out = kernels.attention(q, k, v.bfloat16(), rung=rung)
        loss = kernels.linear_cross_entropy(hidden.bfloat16(), weight, TARGETS, rung=rung, chunk=2)
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    wanted = F.cross_entropy(hidden @ weight.T, TARGETS)
    assert out.dtype == torch.bfloat16 and loss.dtype == torch.float32
    for ours, theirs in (
        (
            torch.autograd.grad(out.float().square().sum(), (q, k, v)),
            torch.autograd.grad(exact.square().sum(), (q, k, v)),
        ),
        (torch.autograd.grad(loss, weight), torch.autograd.grad(wanted, weight)),
    ):
        for a, b in zip(ours, theirs, strict=True):
            assert a.dtype == torch.float32
            assert (a - b).abs().max() <= 2 * TOLERANCE[torch.bfloat16] * b.abs().max()  # a square: twice


# ---------------------------------------------------------------- torch.compile, the choice of a rung, and errors


def test_torch_compile_takes_each_naive_rung_as_one_graph():
    """fullgraph=True raises where a graph breaks; the first rung's code is what rung 2 compiles."""
    from llmlab.course.kernels.ladder import cross_entropy, rms_norm, rope, softmax, swiglu
    from llmlab.course.techniques.flash_attention import standard_attention

    x, q = normal(4, 8).float(), normal(1, 2, 4, 8).float()
    turn = normal(1, 4, 8).float()
    for function, inputs in (
        (softmax.softmax0, (x,)), (rms_norm.rms_norm0, (x, x[0], 1e-5)), (swiglu.swiglu0, (x, x)),
        (rope.rope0, (q, q, turn, turn)), (cross_entropy.cross_entropy0, (x, torch.tensor([1, -100, 0, 7]))),
        (standard_attention, (q, q, q, True)),
    ):  # fmt: skip
        whole = torch.compile(function, fullgraph=True, backend="eager")
        torch.testing.assert_close(whole(*inputs), function(*inputs))


def test_rung_2_is_inductors():
    gate, up = (normal(3, 5, seed=seed).float().to(DEVICE) for seed in (0, 1))
    torch.testing.assert_close(kernels.swiglu(gate, up, rung=2), kernels.swiglu(gate, up, rung=0))


def test_on_a_cpu_pytorchs_rung_runs_unless_another_is_asked_for():
    assert rungs.choose(None, torch.ones(2)) == 1
    assert rungs.choose(0, torch.ones(2)) == 0


def test_without_triton_its_rungs_say_so_and_the_others_run(monkeypatch):
    monkeypatch.setattr(rungs, "triton", None)
    x = torch.ones(2, 3)
    with pytest.raises(NotAvailable, match=r"rung 4 .* needs Triton, .* macOS or Windows; rungs 0, 1 and 2 run here"):
        kernels.softmax(x, rung=4)
    assert torch.equal(kernels.softmax(x), torch.softmax(x, -1))


def test_importing_the_files_needs_no_triton():
    """As on macOS: an import of triton fails, every file loads, and PyTorch's rung runs."""
    code = """
import sys
sys.modules["triton"] = None
import llmlab.course.kernels as kernels
assert "torch" not in sys.modules
import torch
names = [getattr(kernels, name) for name in kernels.__all__]
assert kernels.softmax(torch.ones(2)).tolist() == [0.5, 0.5]
import llmlab.course.kernels.ladder.softmax
assert callable(kernels.softmax)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


@TRITON
def test_a_cpu_without_the_interpreter_is_told_how(monkeypatch):
    monkeypatch.setattr(rungs, "INTERPRETED", False)
    with pytest.raises(NotAvailable, match="needs a CUDA GPU, and the tensors are on cpu; TRITON_INTERPRET=1"):
        rungs.choose(3, torch.ones(2))


@TRITON
def test_fp64_is_refused_where_it_would_be_rounded():
    with pytest.raises(NotAvailable, match="takes float32, float16 and bfloat16, not float64"):
        kernels.softmax(torch.ones(2, dtype=torch.float64, device=DEVICE), rung=4)


X, Q = torch.ones(2, 8), torch.ones(1, 4, 3, 8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernels.softmax(X, rung=5), r"rung=5 is not a rung; allowed: 0 \(naive PyTorch\)"),
        (lambda: kernels.softmax(X, rung=3.0), r"rung=3.0 is not a rung"),
        (lambda: kernels.softmax(X[0, 0]), r"shape \(\) has no columns; give \(..., N\), N >= 1"),
        (lambda: kernels.softmax(X.long(), rung=0), "a tensor is torch.int64; give float32, float16, bfloat16"),
        (lambda: kernels.rms_norm(X[:, :0], X[0, :0]), r"shape \(2, 0\) has no columns"),
        (lambda: kernels.rms_norm(X, X[0], None), "eps=None; give a number >= 0"),
        (lambda: kernels.rms_norm(X, X[0], -1.0), "eps=-1.0; give a number >= 0"),
        (lambda: kernels.rope(Q[0], Q[0], X, X), r"q \(4, 3, 8\) and k \(4, 3, 8\) need \(B, H, T, D\)"),
        (lambda: kernels.rope(Q, Q[:, :0], X, X), r"k \(1, 0, 3, 8\) need \(B, H, T, D\)"),
        (lambda: kernels.cross_entropy(X[:, :0], X[:, 0].long()), r"shape \(2, 0\) has no columns"),
        (lambda: kernels.linear_cross_entropy(X, X[:0], X[:, 0].long()), r"do not fit; give one dtype, hidden"),
        (lambda: kernels.rms_norm(X, X[0, :4], 1e-5), r"weight has shape \(4,\); x of shape \(2, 8\) needs \(8,\)"),
        (lambda: kernels.swiglu(X, X[:1]), "give both one shape and one dtype"),
        (lambda: kernels.rope(Q, Q, X, X), r"do not fit q \(1, 4, 3, 8\); give \(3, 8\)"),
        (lambda: kernels.rope(Q[..., :7], Q[..., :7], X, X), "even D"),
        (lambda: kernels.cross_entropy(X, torch.ones(3).long()), r"need torch.int64 \(2,\)"),
        (lambda: kernels.cross_entropy(X, torch.ones(2).long(), rung=1, inplace=True), "inplace=True is for rung 4"),
        (lambda: kernels.rms_norm(X, X[0], rung=0, inplace=True), r"inplace=True is for rung 4 \(this is rung 0\)"),
        (lambda: kernels.swiglu(X, X, rung=3, inplace=True), r"inplace=True is for rung 4 \(this is rung 3\)"),
        (lambda: kernels.linear_cross_entropy(X, X.half(), torch.ones(2).long()), "give one dtype"),
        (lambda: kernels.linear_cross_entropy(X, X, torch.ones(2).long(), chunk=0), "chunk=0 is not a whole"),
        (lambda: kernels.linear_cross_entropy(X, X, torch.ones(2).long(), chunk=2.5), "chunk=2.5 is not a whole"),
        (lambda: kernels.attention(Q[..., :0], Q[..., :0], Q[..., :0]), "the heads have no channels; give d >= 1"),
        (lambda: kernels.attention(Q.long(), Q.long(), Q.long()), "give one floating-point dtype"),
        (lambda: kernels.attention(Q, Q[:, :3], Q[:, :3]), "4 query heads cannot share 3 key heads"),
        (lambda: kernels.attention(Q, Q[..., :4], Q), r"give q \(B, a, S, d\), k and v"),
    ],
)
def test_errors_show_what_was_given_and_what_is_allowed(call, message):
    with pytest.raises(SpecError, match=message):
        call()

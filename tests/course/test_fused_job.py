"""The sums by hand of the chapter on fused kernels are those of the estimate: three peaks of memory, and the chunks."""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import llmlab as lab
from llmlab.course.job import GPU, MODEL, job
from llmlab.formulas.memory.temporaries import adds_apart, loss_chunk
from llmlab.formulas.time.elementwise import moved

L, h, V, a, S = 16, 2048, 128_256, 32, 1024
N = lab.model(MODEL).parameters
BEFORE, AFTER = job("08-checkpointing"), job("09-kernels")


def by_hand(B, m, liger):
    T, earlier = B * S, 4 * N if m > 1 else 0
    around = 10 * V * h + 2 * loss_chunk(lab.model(MODEL), T) * V if liger else 10 * T * V
    inputs = (4 * L + 10) * T * h
    whole = 0 if liger else 4 * N + 2 * V * h + inputs + 14 * T * V + earlier
    return max(6 * N + inputs + around + earlier, whole, 8 * N + 16 * a * B * S**2 + 24 * T * h)


@pytest.mark.parametrize(("B", "m"), [(1, 4), (4, 1)])
@pytest.mark.parametrize("kernels", [None, "liger"])
def test_the_peak_is_the_highest_of_three_moments(B, m, kernels):
    report = lab.estimate(MODEL, replace(BEFORE, micro_batch=B, accumulation=m, kernels=kernels), GPU)
    assert report.peak_allocated == pytest.approx(by_hand(B, m, kernels == "liger"), rel=0.01)


def test_the_scores_of_one_layer_grow_with_16_bytes_each():
    one, two = (lab.estimate(MODEL, replace(AFTER, micro_batch=1, seq_len=n), GPU).peak_allocated for n in (4096, 8192))
    assert two - one == pytest.approx(16 * a * (8192**2 - 4096**2) + 24 * 4096 * h, rel=0.03)


def test_on_a_t4_the_fused_loss_saves_memory_only_from_more_tokens_than_the_hidden_size():
    def forward(tokens, kernels):
        run = replace(BEFORE, seq_len=tokens, kernels=kernels)
        return lab.estimate(MODEL, run, GPU).phases["forward"]

    assert forward(h // 2, "liger") > forward(h // 2, None)
    assert forward(2 * h, "liger") < forward(2 * h, None)


@pytest.mark.parametrize(("gpu", "temporary"), [("T4", 6), ("A100-80GB", 2)])
def test_ligers_forward_pass_needs_the_gradient_a_cached_cast_and_temporaries(gpu, temporary, monkeypatch):
    """Liger's own code under autocast, without its Triton kernel, which allocates nothing."""
    fused = pytest.importorskip("liger_kernel.ops.fused_linear_cross_entropy")
    monkeypatch.setattr(fused, "liger_cross_entropy_kernel", defaultdict(lambda: lambda **_: None))
    vocab, hidden, tokens = 50_000, 512, 256
    with lab.simulator(gpu) as simulator:
        head = torch.nn.Parameter(torch.empty(vocab, hidden, device="cuda"))
        x = torch.empty(tokens, hidden, device="cuda", requires_grad=True)
        targets = torch.zeros(tokens, dtype=torch.long, device="cuda")
        before = simulator.allocated
        with torch.autocast("cuda", torch.float16 if gpu == "T4" else torch.bfloat16):
            fused.LigerFusedLinearCrossEntropyFunction.apply(x, head, targets)
    assert simulator.peak_allocated - before == pytest.approx((4 + 2 + temporary) * vocab * hidden, rel=0.1)


def test_each_chunk_moves_24_bytes_per_weight_of_the_head_on_a_t4_and_6_on_an_a100():
    spec = lab.model(MODEL)
    chunks = -(-4 * S // loss_chunk(spec, 4 * S))
    for gpu, each in ((lab.gpu("T4"), 24), (lab.gpu("A100-80GB"), 6)):
        assert adds_apart(gpu) == (each == 24)
        assert moved(spec, AFTER, gpu).loss == 6 * 4 * S * V + (each * chunks + 6) * V * h


def test_four_sequences_together_fit_only_with_the_fused_loss():
    assert lab.estimate(MODEL, AFTER, GPU).outcome == "fits"
    assert lab.simulate(MODEL, replace(AFTER, kernels=None), GPU).outcome == "out of memory"


@pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="a torch without it")
def test_torchs_chunked_loss_ignores_autocast():
    torch.manual_seed(0)
    hidden, head, targets = torch.randn(64, 32), torch.randn(1000, 32), torch.randint(1000, (64,))
    exact = F.cross_entropy(hidden.double() @ head.double().T, targets).item()
    with torch.autocast("cpu", torch.bfloat16):
        chunked = F.linear_cross_entropy(hidden, head, targets, options=torch.nn.LinearCrossEntropyOptions()).item()
        whole = F.linear_cross_entropy(hidden, head, targets).item()
    assert abs(chunked / exact - 1) < 1e-6 < abs(whole / exact - 1)

"""The sums by hand of the chapter on checkpointing are those of the estimate: activations, FLOPs and the peak."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import llmlab as lab
from llmlab.course.architectures.llama import Llama
from llmlab.course.job import GPU, MODEL, job
from llmlab.course.techniques.checkpointing import every
from llmlab.course.techniques.training_loop import next_token_loss

GiB = 2**30
L, h, f, V, a, k, d = 16, 2048, 8192, 128_256, 32, 8, 64
BLOCK_WEIGHTS = 2 * h * a * d + 2 * h * k * d + 3 * h * f
N = L * BLOCK_WEIGHTS + V * h


def kept(S):
    """Return the bytes that a block keeps of one sequence under autocast with eager attention."""
    return S * (16 * h + 10 * h + 6 * a * d + 2 * a * d + 8 * f) + 6 * a * S**2


@pytest.mark.parametrize("length", [1024, 2048])
def test_a_block_keeps_the_terms_of_the_table(length):
    report = lab.estimate(MODEL, replace(job("07-optimizers"), seq_len=length), GPU)
    assert sum(report.detail["activations"].values()) == pytest.approx(L * kept(length), rel=1e-3)
    assert report.parts["activations"] == pytest.approx(L * kept(length) + 2 * N, rel=0.01)


@pytest.mark.parametrize("length", [1024, 2048])
def test_the_peak_with_checkpointing_is_at_the_loss(length):
    report = lab.estimate(MODEL, replace(job("08-checkpointing"), seq_len=length), GPU)
    assert max(report.phases, key=report.phases.get) == "forward"
    assert report.peak_allocated == pytest.approx(10 * N + L * 4 * length * h + 10 * length * V, rel=0.01)


def test_neither_the_head_nor_the_down_projections_run_again():
    T = S = 1024
    attention = 4 * T * S * a * d
    forward = 2 * T * N + L * attention
    again = L * (2 * T * (BLOCK_WEIGHTS - h * f) + attention)
    plain, full = (lab.estimate(MODEL, job(chapter), GPU).flops for chapter in ("07-optimizers", "08-checkpointing"))
    assert full / plain - 1 == pytest.approx(again / (3 * forward), rel=0.005)


def test_without_the_cache_of_autocast_the_checkpointed_job_needs_a_gib_and_a_half_less():
    """With checkpointing nothing but the cache holds the fp16 copies of the blocks' weights."""
    peaks = []
    for cache in (True, False):
        with lab.simulator("A100-40GB") as gpu:
            llama = Llama.from_spec(MODEL).cuda()
            llama.run_blocks = every(1, partial(checkpoint, use_reentrant=False))
            ids = torch.zeros(1, 1024, dtype=torch.long).cuda()
            for _ in range(2):
                with torch.autocast("cuda", torch.float16, cache_enabled=cache):
                    loss = next_token_loss(llama(ids), ids)
                loss.backward()
        peaks.append(gpu.peak_allocated)
    assert 1.4 * GiB < peaks[0] - peaks[1] < 2 * L * BLOCK_WEIGHTS

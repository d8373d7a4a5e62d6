"""The numbers by hand of the chapter on FlashAttention, and its checks of kernels."""

from dataclasses import replace

import pytest
import torch

import llmlab as lab
from llmlab.course.experiments.flash_attention import compiled_tiles, largest_errors
from llmlab.course.job import GPU, MODEL, job
from llmlab.course.kernels.rungs import triton
from llmlab.course.techniques.flash_attention import flash_attention
from llmlab.formulas.time.efficiency import efficiency

GIB = 2**30


@pytest.fixture(scope="module")
def reports():
    run = job("10-flash-attention")
    return {way: lab.estimate(MODEL, replace(run, attention=way), GPU) for way in ("eager", "sdpa", "efficient")}


def test_88_bytes_per_score_are_the_time_that_fused_attention_saves(reports):
    spec = lab.model(MODEL)
    scores = spec.layers * spec.heads * 1024 * 4096
    by_hand = 88 * scores / efficiency(GPU).bandwidth
    saved = reports["eager"].time["elementwise"] - reports["efficient"].time["elementwise"]
    assert by_hand == pytest.approx(saved, rel=0.05)


def test_eight_and_nine_matmuls_per_layer(reports):
    spec, rates = lab.model(MODEL), efficiency(GPU)
    one = 2 * 1024 * 4096 * spec.heads * spec.head_dim * spec.layers
    eager, fused = 8 * one / rates.matmul["fp16"], 9 * one / 2 / rates.attention["fp16"]  # half of the tiles is masked
    assert reports["eager"].time["attention"] == pytest.approx(eager, rel=0.02)
    assert reports["efficient"].time["attention"] == pytest.approx(fused, rel=0.02)


def test_the_next_peak_is_the_heads_gradient_at_1024_tokens_and_all_scores_are_saved_at_8192(reports):
    spec = lab.model(MODEL)
    head = 4 * spec.vocab * spec.hidden
    assert reports["efficient"].peak_allocated == pytest.approx(8 * spec.parameters + head, rel=5e-3)
    run = replace(job("10-flash-attention"), seq_len=8192, micro_batch=1)
    peaks = {way: lab.estimate(MODEL, replace(run, attention=way), GPU).peak_allocated for way in reports}
    scores = 16 * lab.model(MODEL).heads * 8192**2
    assert peaks["eager"] - peaks["efficient"] == pytest.approx(scores, rel=0.05)
    assert peaks["sdpa"] == pytest.approx(peaks["eager"], rel=0.01)
    assert peaks["efficient"] < lab.gpu(GPU).room(1) < peaks["eager"]


def test_on_a_t4_sdpa_alone_makes_our_job_slower_and_repeated_heads_make_it_faster(reports):
    """Grouped heads leave SDPA only "math", which multiplies in fp32."""
    eager, sdpa, efficient = (reports[way].step_seconds for way in ("eager", "sdpa", "efficient"))
    assert efficient < eager < sdpa


def test_attention_in_tiles_is_exact():
    torch.manual_seed(0)
    inputs = torch.randn(1, 4, 70, 16), torch.randn(1, 2, 70, 16), torch.randn(1, 2, 70, 16)
    for dtype, tolerance in {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 5e-2}.items():
        assert max(largest_errors(flash_attention, inputs, dtype)) < tolerance


@pytest.mark.skipif(not triton, reason="Triton has no wheel here")
def test_the_package_takes_the_largest_tile_that_does_not_spill():
    tiles = compiled_tiles()
    chosen = [tile for tile in tiles if tile.chosen]
    assert [tile.gpu for tile in chosen] == ["A100", "H100"] and all(tile.spilled == 0 for tile in chosen)
    for best in chosen:
        larger = [t for t in tiles if t.gpu == best.gpu and t.keys * t.queries > best.keys * best.queries]
        assert all(tile.spilled > 0 for tile in larger)

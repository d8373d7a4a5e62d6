"""The rates that GPUs reach."""

from dataclasses import replace

import pytest

import llmlab as lab
from benchmarks.time import efficiencies as derivation
from llmlab import Inference, Training
from llmlab.formulas.time.efficiency import efficiencies, efficiency
from llmlab.formulas.time.timing import PARTS


def test_rates_from_measured_kernels_are_what_the_kernels_give():
    again, kept = derivation.derive_h100(), efficiency("H100")
    assert again["matmul.bf16"] == pytest.approx(kept.matmul["bf16"], rel=0.005)
    assert again["bandwidth"] == pytest.approx(kept.bandwidth, rel=0.005)
    attention = efficiency("A100").attention["bf16"]
    assert derivation.measured_attention("A100-80GB") == pytest.approx(attention, rel=0.005)


@pytest.mark.parametrize("name", sorted(efficiencies()))
def test_nothing_reaches_more_than_the_data_sheet(name):
    card, rates = lab.gpu(name), efficiency(name)
    assert rates.bandwidth < card.bandwidth
    assert all(rate < card.peak(dtype) for dtype, rate in [*rates.matmul.items(), *rates.attention.items()])
    assert rates.derived_from and rates.validated and rates.derived


def test_every_cuda_card_has_a_time():
    run = Training(seq_len=128, precision="fp16")
    for card in lab.gpus():
        fastest = "fp16" if card.peak("fp16") else "fp32"  # a GTX 1080 Ti has no units for half precision
        for compiled in (False, True):
            report = lab.estimate("gpt2", replace(run, compile=compiled, precision=fastest), card)
            assert 0 < report.step_seconds_low < report.step_seconds < report.step_seconds_high
            assert 0 < report.mfu < 1 and report.tokens_per_second == 128 / report.step_seconds
            assert sum(report.time.values()) == pytest.approx(report.step_seconds)
            assert set(report.time_sources) == set(report.time) <= set(PARTS)


def test_no_units_no_time():
    report = lab.estimate("gpt2", Training(seq_len=128, precision="bf16"), None)
    assert report.step_seconds is report.tokens_per_second is report.mfu is None and report.flops
    generation = Inference(prompt_len=64, new_tokens=8)
    assert lab.estimate("gpt2", generation, "B200").step_seconds is None  # its rates come from records

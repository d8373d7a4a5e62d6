"""Seconds from formulas, held to steps and training runs that others measured."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import llmlab as lab
from llmlab import Inference, LoRA, Training
from llmlab.archive import figure, held_out, records
from llmlab.formulas.time.efficiency import efficiencies, efficiency
from llmlab.formulas.time.step import hfu, mfu, price, step_seconds, training_days

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import efficiencies as derivation


def test_t4_steps_within_the_published_time():
    errors = []
    for report in records(gpu="T4"):
        if report.source == "published" and report.step_seconds and not held_out(report):
            mine = lab.estimate(report.model, report.run, "T4").step_seconds
            errors.append(abs(mine / report.step_seconds - 1))
    assert len(errors) == 40
    assert np.median(errors) < 0.10
    assert max(errors) < 0.30


@pytest.mark.parametrize("row", derivation.throughputs(), ids=lambda row: row.name)
def test_published_training_throughput(row):
    report = lab.estimate(row.config, row.run, row.card)
    assert report.tokens_per_second / row.run.world_size == pytest.approx(row.tokens_per_second, rel=0.20)


def test_h100_rates_are_what_the_records_give():
    again = derivation.derive_h100()
    kept = efficiency("H100")
    assert again["matmul.bf16"] == pytest.approx(kept.matmul["bf16"], rel=0.02)
    assert again["bandwidth"] == pytest.approx(kept.bandwidth, rel=0.02)


@pytest.mark.parametrize("name", sorted(efficiencies()))
def test_nothing_reaches_more_than_the_data_sheet(name):
    card, rates = lab.gpu(name), efficiency(name)
    assert rates.bandwidth < card.bandwidth
    assert all(rate < card.peak(dtype) for dtype, rate in [*rates.matmul.items(), *rates.attention.items()])
    assert rates.derived_from and rates.validated and rates.derived


def test_no_rates_no_time():
    run = Training(seq_len=128, precision="bf16")
    for gpu in ("B200", "RTX-4090", "A100-40GB-PCIe", None):
        report = lab.estimate("gpt2", run, gpu)
        assert report.step_seconds is report.tokens_per_second is report.mfu is None
        assert report.flops
    assert lab.estimate("gpt2", Training(seq_len=128), "A100").step_seconds is None  # no record of fp32 there
    compiled = Training(seq_len=128, precision="bf16", compile=True)
    assert lab.estimate("gpt2", compiled, "A100").step_seconds is None


def test_the_82b_run_used_a_fifth_of_the_cards():
    setup, took = figure("hyperclova-82b-setup"), figure("hyperclova-82b-run").value / 86400
    ideal = training_days(setup["parameters"], setup["tokens"], lab.gpu("A100"), int(setup["GPUs"]), 1.0)
    assert ideal == pytest.approx(2.67, abs=0.01)
    assert took == pytest.approx(13.4, abs=0.01)
    assert ideal / took == pytest.approx(0.20, abs=0.005)


def test_nanogpt_mfu_is_the_published_one():
    run = Training(micro_batch=20, seq_len=1024, accumulation=5, precision="bf16", attention="eager")
    found = mfu(lab.model("gpt2"), run, lab.gpu("A100"), figure("gpt2-step-time-nanogpt").value)
    assert found == pytest.approx(figure("gpt2-mfu-nanogpt").value, abs=1e-4)


def test_full_recomputation_lowers_mfu_and_not_hfu():
    spec, card = lab.model("Llama-3.1-8B"), lab.gpu("A100")
    plain, full = (Training(seq_len=2048, precision="bf16", checkpointing=kind) for kind in (None, "full"))
    assert mfu(spec, plain, card, 1.0) == mfu(spec, full, card, 1.0)
    assert mfu(spec, plain, card, 1.0) == hfu(spec, plain, card, 1.0) < hfu(spec, full, card, 1.0)
    slower = step_seconds(spec, full, card) / step_seconds(spec, plain, card)
    assert 1.15 < slower < 1.6


def test_decoding_reads_every_weight():
    report = lab.estimate("Llama-2-7b-hf", Inference(prompt_len=8, new_tokens=200), "A100")
    # gpt-fast reads the weights at 1397 GB/s; eager PyTorch cannot start its kernels that fast.
    assert report.tokens_per_second < figure("gpt-fast-decoding")["Llama-2-7B, bf16"]


def test_price_is_hours_times_the_rate_and_unknown_without_one():
    assert price(lab.gpu("T4"), 10) == pytest.approx(10 * lab.gpu("T4").usd_per_hour)
    assert price(lab.gpu("V100"), 10) is None
    assert price(lab.gpu("V100"), 10, usd_per_hour=0.5) == 5


TRAININGS = st.builds(
    Training,
    micro_batch=st.integers(1, 64),
    seq_len=st.integers(16, 4096),
    precision=st.just("fp16"),
    checkpointing=st.sampled_from((None, "selective", "full")),
    attention=st.sampled_from(("eager", "sdpa")),
    lora=st.sampled_from((None, LoRA(rank=8))),
)


@settings(max_examples=60, deadline=None)
@given(run=TRAININGS, longer=st.integers(1, 512))
def test_more_tokens_never_take_less_time(run, longer):
    spec, t4 = lab.model("SmolLM2-135M"), lab.gpu("T4")
    now = step_seconds(spec, run, t4)
    for more in ({"micro_batch": run.micro_batch + 1}, {"seq_len": run.seq_len + longer}, {"accumulation": 2}):
        assert step_seconds(spec, Training(**{**run.to_dict(), "lora": run.lora, **more}), t4) >= now
    assert 0 < mfu(spec, run, t4, now) <= hfu(spec, run, t4, now) < 1


@settings(max_examples=40, deadline=None)
@given(run=TRAININGS)
def test_recomputation_never_saves_time(run):
    spec, t4 = lab.model("SmolLM2-135M"), lab.gpu("T4")
    given_ = {**run.to_dict(), "lora": run.lora}
    times = [
        step_seconds(spec, Training(**{**given_, "checkpointing": kind}), t4) for kind in (None, "selective", "full")
    ]
    assert times == sorted(times)


@pytest.mark.parametrize("precision", ["fp32", "fp16", "mixed-fp16", "autocast-fp16"])
def test_quantized_weights_have_a_time_in_every_precision(precision):
    run = Training(quantization="nf4", lora=LoRA(), precision=precision)
    assert lab.estimate("TinyLlama-1.1B-Chat-v1.0", run, "T4").step_seconds > 0

"""What makes a run fit: each lever is an estimate of a changed run, the cheapest first; and torch's message."""

from dataclasses import replace
from pathlib import Path

import pytest

import llmlab as lab
from llmlab.planning import levers
from llmlab.planning.levers import cost

MIB, GIB = 2**20, 2**30
BOOK_SOURCES = Path(__file__).resolve().parents[2] / "book"


def test_levers_are_sorted_by_price_and_each_is_its_estimate():
    run = lab.Training(micro_batch=8, seq_len=1024)
    changes = lab.fix("gpt2", run, "T4")
    assert changes.report == lab.estimate("gpt2", run, "T4")
    assert [lever.price for lever in changes.levers] == sorted(lever.price for lever in changes.levers)
    for lever in changes.levers:
        assert lever.report == lab.estimate("gpt2", lever.run, "T4")
        assert lever.saves == changes.report.peak_allocated - lever.report.peak_allocated > 0


def test_each_lever_leads_to_its_chapter():
    found = lab.fix("gpt2", lab.Training(micro_batch=8, seq_len=1024), "T4")
    page = found._repr_html_()
    for lever in found.levers:
        assert (BOOK_SOURCES / f"{lever.chapter}.md").exists()
        assert f"/book/{lever.chapter}.html" in page


def test_full_checkpointing_costs_the_forward_pass_again():
    run = lab.Training(micro_batch=4, seq_len=2048, precision="mixed-bf16")
    found = lab.fix("meta-llama/Llama-3.1-8B", run, "H100-80GB")
    (lever,) = (each for each in found.levers if each.name == "full checkpointing")
    assert lever.chapter == "08-checkpointing" and lever.same_result
    assert lever.seconds == pytest.approx(lever.report.step_seconds - found.report.step_seconds)
    assert lever.seconds > 0.2 * found.report.step_seconds


def test_whole_gradients_are_a_lever_where_fsdp_waits():
    run = lab.Training(seq_len=2048, precision="mixed-bf16", dp=8, zero=3, accumulation=4, sync_each_batch=False)
    found = lab.fix("meta-llama/Llama-3.1-8B", run, "A100-40GB")
    (lever,) = (each for each in found.levers if each.name == "reduce gradients after each micro-batch")
    assert lever.run == replace(run, sync_each_batch=True) and lever.same_result
    assert lever.saves > 3 * lab.model("meta-llama/Llama-3.1-8B").parameters  # of 4 bytes, all but an eighth
    assert not any("gradients reduced" in each.name for each in lab.fix("gpt2", lab.Training(), "T4").levers)


def test_fewer_tokens_are_no_gain_in_time():
    run = lab.Training(micro_batch=1, seq_len=2048, precision="bf16")
    found = lab.fix("meta-llama/Llama-3.1-8B", run, "H100-80GB")
    (half,) = (each for each in found.levers if each.name == "half the sequence length")
    assert half.seconds == pytest.approx(2 * half.report.step_seconds - found.report.step_seconds)
    assert cost(half, found.report).startswith(("+", "−"))


def test_qlora_of_half_weights_computes_under_autocast():
    """peft casts the norms and the head to fp32, and without autocast attention, too, would compute in fp32."""
    run = lab.Training(seq_len=4096, precision="bf16", lora=lab.LoRA(rank=16), checkpointing="full")
    changes = lab.fix("Qwen/Qwen3-8B", run, "RTX-4090")
    qlora = next(lever for lever in changes.levers if lever.run.quantization == "nf4")
    assert qlora.run.precision == "autocast-bf16" and qlora.saves > 4 * GIB


def test_serving_has_levers_too():
    run = lab.Inference(batch=8, prompt_len=512, weights="fp16", kv="fp16")
    names = {lever.name for lever in lab.fix("gpt2", run, "T4").levers}
    assert {"weights in nf4", "KV cache in int8", "half the prompts at once"} <= names


def test_a_run_without_a_card_is_refused():
    with pytest.raises(lab.SpecError, match="a model, a run and a GPU"):
        lab.fix("gpt2", lab.Training())


def test_fused_adamw_is_a_lever_where_the_roots_of_second_moments_are_the_peak():
    """One kernel has none, and moves a third of the bytes: it saves memory and time."""
    run = lab.Training(seq_len=256, precision="autocast-bf16", checkpointing="full")
    found = lab.fix("meta-llama/Llama-3.2-1B", run, "RTX 3090")
    (lever,) = (each for each in found.levers if each.name == "fused AdamW")
    assert lever.run == replace(run, optimizer="adamw-fused") and lever.same_result and lever.seconds < 0
    masters = lab.fix("meta-llama/Llama-3.2-1B", replace(run, precision="mixed-bf16"), "RTX 3090")  # fused already
    assert masters.levers and not any(each.name == "fused AdamW" for each in masters.levers)


@pytest.mark.parametrize(("model", "gpu", "attention"), [
    ("meta-llama/Llama-3.2-1B", "T4", "efficient"),  # 32 query heads share 8 key heads
    ("meta-llama/Llama-3.2-1B", "A100-80GB", "sdpa"), ("gpt2", "T4", "sdpa"),
])  # fmt: skip
def test_attention_is_fused_by_the_kernel_that_the_gpu_has(model, gpu, attention):
    """SDPA's memory-efficient kernel takes no grouped heads up to torch 2.13, and a T4 has no other fused one."""
    fixed = lab.fix(model, lab.Training(micro_batch=4, seq_len=1024, precision="fp16", attention="eager"), gpu)
    found = [lever.run.attention for lever in fixed.levers if lever.chapter == "10-flash-attention"]
    assert found == [attention]


def test_formulas_are_derived_for_families_that_have_none(monkeypatch):
    traced = []
    monkeypatch.setattr(levers, "trace_of", lambda spec, run, card: traced.append(spec.family))
    for name in ("gpt2", "allenai/OLMo-2-0425-1B"):
        levers.derived(lab.model(name), lab.Training(seq_len=64), lab.gpu("T4"))
    assert traced == ["olmo2"]

"""Seconds from formulas, held to steps and training runs that others measured."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import llmlab as lab
from benchmarks.time import efficiencies as derivation
from llmlab import Inference, LoRA, Training
from llmlab.archive import figure, held_out, records
from llmlab.formulas.time.efficiency import efficiency
from llmlab.formulas.time.host import update_host_seconds
from llmlab.formulas.time.kernels import kernels
from llmlab.formulas.time.step import (
    Traced,
    attention_seconds,
    fastest_kernel,
    hfu,
    mfu,
    passes,
    price,
    step_seconds,
    update_seconds,
)
from llmlab.formulas.time.timing import timing


def test_t4_steps_within_the_published_time():
    errors = []
    for report in records(gpu="T4"):
        if report.source == "published" and report.step_seconds and not held_out(report):
            mine = lab.estimate(report.model, report.run, "T4").step_seconds
            errors.append(abs(mine / report.step_seconds - 1))
    assert np.median(errors) < 0.10
    assert max(errors) < 0.30


@pytest.mark.parametrize("row", derivation.throughputs(), ids=lambda row: row.name)
def test_published_training_throughput(row):
    report = lab.estimate(row.config, row.run, row.card)
    assert report.tokens_per_second / row.run.world_size == pytest.approx(row.tokens_per_second, rel=0.20)


def test_a_compiler_fuses_what_lies_between_products_and_starts_no_kernel_late():
    run = Training(micro_batch=1, seq_len=512, precision="bf16")
    spec = {**lab.model("gpt2").config, "vocab_size": 50304}  # which a compiler has no need to pad
    eager, compiled = (lab.estimate(spec, replace(run, compile=c), "A100").time for c in (False, True))
    assert "launches" in eager and "launches" not in compiled
    assert compiled["elementwise"] < 0.7 * eager["elementwise"]
    assert compiled["products"] == eager["products"]
    few = {**lab.model("Llama-3.2-1B").config, "vocab_size": 4096}  # whose loss has no chunks of few rows
    plain, liger = (lab.estimate(few, replace(run, kernels=each), "A100").time for each in (None, "liger"))
    assert liger["elementwise"] < plain["elementwise"] and "launches" in liger


def test_a_torchtune_ladder_on_one_a100():
    """github.com/pytorch/torchtune, README, pull request 2003: tokens/s of a full fine-tuning of Llama 3.2 3B."""
    run = Training(micro_batch=2, seq_len=4096, precision="bf16")
    compiled = replace(run, compile=True, attention="flash")  # its own model asks for causal attention
    rows = {run: 7075, compiled: 8998, replace(compiled, checkpointing="full"): 7210}
    for each, measured in rows.items():
        assert lab.estimate("Llama-3.2-3B", each, "A100").tokens_per_second == pytest.approx(measured, rel=0.06)


@pytest.mark.parametrize(("gpu", "times"), [("H200", 2.0), ("A100", 4.1)])
def test_a_compiled_transformers_step_has_a_mask_and_so_has_a_window(gpu, times):
    """Under a mask all scores count; cuDNN takes one, FlashAttention does not. A profile of Llama 3.2 1B on an H200 had
    33 ms of attention where it was compiled, 12 where not."""
    run = Training(micro_batch=4, seq_len=2048, precision="bf16")
    causal, masked = (lab.estimate("Llama-3.2-1B", replace(run, compile=compile), gpu).time["attention"]
                      for compile in (False, True))  # fmt: skip
    assert masked == pytest.approx(times * causal, rel=0.05)
    config = lab.model("Phi-3-mini-4k-instruct").config
    inside, across = (lab.estimate({**config, "sliding_window": size}, run, gpu).time["attention"]
                      for size in (2049, 2047))  # fmt: skip
    assert across == pytest.approx(times * inside, rel=0.05)
    pinned = replace(run, attention="efficient")
    inside, across = (lab.estimate({**config, "sliding_window": size}, pinned, gpu).time["attention"]
                      for size in (2049, 2047))  # fmt: skip
    assert across == pytest.approx(2 * inside)


def test_products_are_looked_up_by_their_shapes():
    """A weight's gradient is a product of its own; a shape with few rows takes as long as its weight takes to read."""
    found = kernels("H100")
    square = found.matmul(8192, 8192, 8192, "bf16")
    assert square == pytest.approx(2 * 8192**3 / efficiency("H100").matmul["bf16"], rel=0.01)
    one_row = found.matmul(1, 8192, 8192, "bf16")
    assert one_row > 2 * 8192**2 / lab.gpu("H100").bandwidth > 20 * 2 * 8192**2 / efficiency("H100").matmul["bf16"]
    narrow = (1024, 1024, 8192, "bf16")  # below what power leaves
    slower = kernels("A100-40GB").matmul(*narrow) / kernels("A100").matmul(*narrow)
    assert slower == pytest.approx(270 / 246.33, rel=0.01)  # as large products of torch are
    assert found.matmul(64, 64, 64, "fp8") is not None and kernels("T4").matmul(64, 64, 64, "bf16") is None


def test_quantized_and_adapted_layers_take_their_products():
    spec, card = lab.model("Llama-3.2-1B"), lab.gpu("A100")
    runs = [Training(seq_len=2048, precision="bf16", lora=lora) for lora in (None, LoRA(rank=8))]
    full, adapted = (passes(spec, run, card).products for run in runs)
    assert adapted["mlp"] == pytest.approx(2 / 3 * full["mlp"], rel=0.1)  # no weights' gradients
    assert "adapters" in adapted and "adapters" not in full


def test_nanogpt_mfu_is_the_published_one():
    run = Training(micro_batch=20, seq_len=1024, accumulation=5, precision="bf16", attention="eager")
    found = mfu(lab.model("gpt2"), run, lab.gpu("A100"), figure("gpt2-step-time-nanogpt").value)
    assert found == pytest.approx(figure("gpt2-mfu-nanogpt").value, abs=1e-4)


def test_full_recomputation_lowers_mfu_and_not_hfu():
    spec, card = lab.model("Llama-3.1-8B"), lab.gpu("A100")
    plain, full = (Training(seq_len=2048, precision="bf16", checkpointing=kind) for kind in (None, "full"))
    assert mfu(spec, plain, card, 1.0) == mfu(spec, full, card, 1.0)
    assert hfu(spec, plain, card, 1.0) < hfu(spec, full, card, 1.0)
    slower = step_seconds(spec, full, card) / step_seconds(spec, plain, card)
    assert 1.15 < slower < 1.6


def test_fused_attention_computes_scores_again_for_hfu_and_not_for_mfu():
    """7 products of [T × d] and [T × T] instead of PaLM's 6 (arXiv 2204.02311, appendix B: 12 L h S per token)."""
    spec, card = lab.model("Llama-3.1-8B"), lab.gpu("A100")
    eager, fused = (Training(seq_len=4096, precision="bf16", attention=kernel) for kernel in ("eager", "flash"))
    assert mfu(spec, fused, card, 1.0) == mfu(spec, eager, card, 1.0) == hfu(spec, eager, card, 1.0)
    again = (hfu(spec, fused, card, 1.0) - mfu(spec, fused, card, 1.0)) * card.peak("bf16")
    assert again == pytest.approx(2 * 32 * 4096 * 4096**2)  # one product in each of 32 layers, h = S = 4096
    scores = 12 * 32 * 4096 * 4096 * 4096  # 12 L h S per token, S tokens
    weights = 6 * (spec.parameters - spec.vocab * spec.hidden) * 4096
    assert mfu(spec, fused, card, 1.0) * card.peak("bf16") == pytest.approx(weights + scores, rel=1e-3)


def test_decoding_reads_every_weight():
    report = lab.estimate("Llama-2-7b-hf", Inference(prompt_len=8, new_tokens=200), "A100")
    # gpt-fast reads the weights at 1397 GB/s; eager PyTorch cannot start its kernels that fast.
    assert report.tokens_per_second < figure("gpt-fast-decoding")["Llama-2-7B, bf16"]


def test_price_is_hours_times_the_rate_and_unknown_without_one():
    assert price(lab.gpu("T4"), 10) == pytest.approx(10 * lab.gpu("T4").usd_per_hour)
    assert price(lab.gpu("H20"), 10) is None
    assert price(lab.gpu("H20"), 10, usd_per_hour=0.5) == 5


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


def test_flash_attn_computes_in_half_what_peft_leaves_in_fp32():
    """transformers casts what is fp32 before the package flash-attn, which has none (modeling_flash_attention_utils.py,
    fa_peft_integration_check); SDPA's kernels take it. Under autocast both are half."""
    spec, rates = lab.model("TinyLlama-1.1B-Chat-v1.0"), kernels("A100")

    def seconds(precision, attention, quantization="nf4"):
        return attention_seconds(spec, Training(precision=precision, attention=attention, quantization=quantization,
                                                seq_len=2048, lora=LoRA()), rates)  # fmt: skip

    half = seconds("bf16", "flash", None)
    assert seconds("bf16", "flash") == seconds("autocast-bf16", "flash") == seconds("autocast-bf16", "sdpa") == half
    assert seconds("bf16", "sdpa") > 10 * half


@pytest.mark.parametrize("half", ["bf16", "fp16"])
def test_a_report_says_what_peft_leaves_in_fp32(half):
    run = Training(seq_len=1024, precision=half, quantization="nf4", lora=LoRA())
    usual = replace(run, precision=f"autocast-{half}")

    def said(run):
        notes = lab.estimate("SmolLM2-135M", run, "A100").notes
        return [note for note in notes if note.code == "fp32-around-quantized"]

    (note,) = said(run)
    assert "attention" in note and f"autocast-{half}" in note
    (note,) = said(replace(run, attention="flash"))
    assert "attention" not in note
    own = replace(run, lora=LoRA(autocast_adapter_dtype=False))
    others = [usual, own, replace(run, precision="fp32"), replace(run, quantization=None)]
    assert not any(said(each) for each in others)
    other = replace(run, precision="bf16", stack="torchtune")  # which trains adapters in half
    notes = lab.estimate("Llama-3.2-1B", other, "A100").notes
    assert not any(note.code == "fp32-around-quantized" for note in notes)


@pytest.mark.parametrize(("card", "prefers"), [("A100-80GB", False), ("H100", True), ("B200", True), ("L40S", False)])
def test_sdpa_takes_cudnns_attention_first_where_torch_prefers_it(card, prefers):
    """On compute capability 9 and 10, whoever trains: as fast as FlashAttention 3 on an H100, where power holds it back
    more than FlashAttention 2."""
    spec, gpu = lab.model("meta-llama/Llama-3.1-8B"), lab.gpu(card)
    run = Training(seq_len=8192, dp=8, precision="mixed-bf16")
    assert fastest_kernel(spec, run, "flash", gpu) == ("cudnn" if prefers else "flash")
    assert fastest_kernel(spec, run, "math", gpu) == "math"
    dropping = lab.model("gpt2")  # a tenth of the probabilities, which is no multiple of 1/16
    assert fastest_kernel(dropping, run, "flash", gpu) == "flash"
    assert fastest_kernel(dropping, lab.Inference(prompt_len=8192), "flash", gpu) == ("cudnn" if prefers else "flash")
    newest, titan, older = (
        passes(spec, each, gpu).attention
        for each in (run, replace(run, stack=lab.Torchtitan()), replace(run, attention="flash"))
    )
    slower = kernels(card).slower("flash", 8192, 128)
    assert titan == newest
    if card == "H100":
        assert 1.35 < older / newest < 0.95 * slower < 1.8
    else:
        assert older / newest == pytest.approx(slower if prefers else 1)


def test_megatrons_host_waits_for_gradients_before_it_updates():
    """So a busy card hides nothing of what the host takes for it, unless one CUDA graph has all passes and no check."""
    spec, card = lab.model("gpt2"), kernels("H100")
    run = Training(seq_len=1024, precision="mixed-bf16", stack="megatron")
    waits, computes = (lab.estimate(spec, replace(run, micro_batch=many), "H100").time for many in (1, 64))
    started, moved = update_host_seconds(spec, run, card.host), update_seconds(spec, run, card)
    assert waits["optimizer"] == computes["optimizer"] == pytest.approx(started) and started > 2 * moved
    graph = replace(run, micro_batch=64, stack=lab.Megatron(cuda_graph_impl="full_iteration"))
    assert lab.estimate(spec, graph, "H100").time["optimizer"] == pytest.approx(moved)


@pytest.mark.parametrize("fields", [{}, {"dp": 8}, {"accumulation": 3}])
def test_megatrons_host_waits_for_each_loss(fields):
    """A vocabulary twice as large takes the host no longer, and a step that waits for it longer all the same: by
    forward's third of the head's products and 38 of the loss's 52 bytes. Backward's are behind what it starts next."""
    small, run = lab.model("gpt2"), Training(seq_len=128, precision="mixed-bf16", stack="megatron", **fields)
    wide = lab.model({**small.config, "vocab_size": 2 * small.vocab})
    one, other = (passes(spec, run, lab.gpu("H100")) for spec in (small, wide))
    waited = (other.products["head"] - one.products["head"]) / 3 + (other.loss - one.loss) * 38 / 52
    times = [lab.estimate(spec, run, "H100").time for spec in (small, wide)]
    first, second = (sum(time[part] for part in ("products", "attention", "elementwise", "launches")) for time in times)
    assert second - first == pytest.approx(waited) and other.host - one.host == pytest.approx(waited)
    graph = replace(run, stack=lab.Megatron(cuda_graph_impl="full_iteration"))
    assert passes(small, graph, lab.gpu("H100")).host == 0.0


def test_a_traced_step_of_megatrons_waits_for_its_host_as_an_estimated_one_does():
    """A trace has the card's times, and no Python of Megatron-LM's."""
    spec, card = lab.model("gpt2"), lab.gpu("H100")
    run = Training(seq_len=128, precision="mixed-bf16", stack="megatron")
    traced = Traced(passes(spec, run, card)._replace(host=0.0), update_seconds(spec, run, kernels(card)), "eager")
    estimated = timing(spec, run, card)
    assert timing(spec, run, card, traced=traced).seconds == pytest.approx(estimated.seconds)
    assert estimated.parts["launches"] > estimated.seconds / 2


def test_paged_states_go_through_pcie_where_they_do_not_fit():
    run = Training(micro_batch=2, seq_len=2048, compile=True, stack="torchtune:packed=true")
    optimizers = {card: lab.estimate("meta-llama/Llama-3.1-8B", run, card).time["optimizer"]
                  for card in ("RTX-4090", "RTX-A6000")}  # fmt: skip
    states, bus = 2 * lab.model("meta-llama/Llama-3.1-8B").parameters, lab.gpu("RTX-4090").pcie
    assert states / bus < optimizers["RTX-4090"] < 2 * states / bus  # in and out at once, as the chapter on offloading
    assert optimizers["RTX-A6000"] < states / lab.gpu("RTX-A6000").pcie

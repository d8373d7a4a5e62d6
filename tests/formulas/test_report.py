"""The report of an estimate."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.base.units import MiB, show_bytes
from llmlab.formulas.memory.share import share_of
from llmlab.formulas.memory.step import step_memory
from llmlab.formulas.report import assessed, fullest
from llmlab.hardware.gpu import gpus

QV = lab.LoRA(rank=8, targets=("q_proj", "v_proj"))


def test_a_compiled_step_whose_states_exceed_the_gpu_does_not_fit():
    """The 70B's fp32 shards and AdamW states are 12 bytes per parameter and rank: 98.6 GiB of 8 ranks, 6.2 of 128."""
    options = dict(stack="torchtitan", zero=3, checkpointing="full", compile=True, precision="mixed-bf16")
    runs = [lab.Training(1, 8192, dp=dp, **options) for dp in (8, 128)]
    outcomes = [lab.estimate("meta-llama/Llama-3.1-70B", run, "H100-80GB").outcome for run in runs]
    assert outcomes == ["out of memory", "fits"]


def test_mfu_refers_to_the_data_sheet_also_under_a_power_limit():
    run = lab.Training(8, 2048, precision="bf16")
    full, limited = (lab.estimate("Llama-3.2-1B", run, lab.gpu("H100-80GB", power=watts)) for watts in (None, 500))
    assert limited.mfu / full.mfu == pytest.approx(full.step_seconds / limited.step_seconds)


def test_an_estimate_that_cannot_tell_says_within_what():
    run = lab.Training(5, 1024, "fp16", checkpointing="full", lora=QV)
    t4 = lab.gpu("T4")
    peak = lab.estimate("Llama-3.2-1B", run, t4).peak_allocated
    near = lab.estimate("Llama-3.2-1B", run, replace(t4, memory=t4.context + peak + 64 * MiB))
    assert near.outcome == "unknown" and near.where is near.needed is None
    assert [note.code for note in near.notes] == ["peak-phase", "near-limit"]
    small = lab.estimate("Llama-3.2-1B", run, replace(t4, memory=t4.context + peak - 64 * MiB))
    assert small.outcome == "out of memory" and small.where and small.needed == small.capacity + 64 * MiB
    assert ("memory needed, at least", show_bytes(small.needed)) in small.rows()
    quantized = replace(run, quantization="nf4", compile=True)
    peak = lab.estimate("Llama-3.2-1B", quantized, t4).peak_allocated
    compiled = lab.estimate("Llama-3.2-1B", quantized, replace(t4, memory=t4.context + peak - MiB))
    assert compiled.outcome == "unknown" and "counted-eager" in [note.code for note in compiled.notes]


def test_a_step_that_fits_with_the_margin_of_its_kind_alone_says_so():
    """GPT-2 keeps all activations: 1.12 times its tensors are enough, and 1.25 times them are too much."""
    run, t4 = lab.Training(8, 1024), lab.gpu("T4")
    peak = lab.estimate("gpt2", run, t4).peak_allocated
    said = {}
    for factor in (1.1, 1.2, 1.3):
        report = lab.estimate("gpt2", run, replace(t4, memory=t4.context + int(factor * peak)))
        said[factor] = report.outcome, "probably-fits" in [note.code for note in report.notes]
    assert said == {1.1: ("unknown", False), 1.2: ("fits", True), 1.3: ("fits", False)}


LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2,
         "num_hidden_layers": 3, "intermediate_size": 176, "vocab_size": 1000,
         "max_position_embeddings": 256}  # fmt: skip


@pytest.mark.parametrize("quantization, element", [(None, 2), ("nf4", 4), ("int8", 4)])
def test_detail_says_what_blocks_keep_in_the_dtype_that_they_keep_it_in(quantization, element):
    """peft leaves what is not quantized in fp32: the stream between blocks, too."""
    lora = lab.LoRA(8, ("q_proj", "v_proj"))
    run = lab.Training(seq_len=64, precision="fp16", checkpointing="full", lora=lora, quantization=quantization)
    kept = lab.estimate(LLAMA, run).detail["activations"]
    assert kept["block inputs"] == 3 * 64 * 64 * element


def test_a_context_that_is_not_known_is_said_to_count_up_to_the_most_that_is_known():
    most = show_bytes(max(card.context or 0 for card in gpus()))

    def said(card):
        return [note for note in lab.estimate("gpt2", lab.Training(), card).notes if note.code == "context-unknown"]

    assert said("T4") == said("cpu") == said(None) == []
    for card in (card for card in gpus() if card.context is None):
        (note,) = said(card)
        assert card.name in note and f"up to {most}" in note


@pytest.mark.parametrize("stages", [2, 4])
def test_the_fullest_stage_decides_and_a_plan_that_looks_at_three_finds_it(stages):
    """The last stage has the logits of 128,256 words; a GPU with room for the others alone is too small."""
    spec = lab.model("meta-llama/Llama-3.2-1B")
    run = lab.Training(micro_batch=8, seq_len=2048, pp=stages, accumulation=stages, precision="bf16", optimizer="sgd",
                       checkpointing="full")  # fmt: skip
    card = lab.gpu("A100-80GB")
    first, *_, last = (max(moment.total for moment in step_memory(share_of(spec, run, card, False, stage)).moments())
                       for stage in range(stages))  # fmt: skip
    assert last > 1.5 * first
    small = replace(card, memory=(first + last) // 2)
    report, fit = assessed(spec, run, small)
    assert fit.outcome == fullest(spec, run, small).outcome == "out of memory"
    assert f"in stage {stages - 1} of the pipeline" in lab.estimate(spec, run, small).where
    (note,) = (note for note in report.notes if note.code == "fullest-stage")
    assert f"that of stage {stages - 1} is the highest" in note

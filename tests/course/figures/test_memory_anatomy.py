"""The page's formulas of the running job, and that its drawings show the numbers that they are given."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.course.job import MODEL, job

N, B, S, L, h, f, V, a = 1_235_814_400, 4, 1024, 16, 2048, 8192, 128_256, 32
T = B * S
BLOCK = 104 * T * h + 4 * B * a * S**2


def test_the_peak_of_the_job_is_the_sum_that_the_page_derives():
    report = lab.estimate(MODEL, job("02-memory-anatomy"), "T4")
    assert report.peak_at == "the gradient of the logits" and not report.parts.get("gradients")
    assert report.parts["activations"] == pytest.approx(L * BLOCK + 12 * T * h, rel=0.001)
    assert report.parts["logits"] == 16 * T * V
    assert report.peak_allocated == pytest.approx(12 * N + L * BLOCK + 12 * T * h + 16 * T * V, rel=0.001)
    assert report.phases["optimizer"] == pytest.approx(20 * N + 4 * T * V, rel=0.001)


def test_no_single_lever_brings_the_job_onto_a_t4():
    changes = ({"precision": "autocast-fp16"}, {"micro_batch": 1, "accumulation": 4}, {"optimizer": "adafactor"},
               {"optimizer": "adamw-8bit"}, {"checkpointing": "full"}, {"kernels": "liger"}, {"attention": "sdpa"},
               {"lora": lab.LoRA(rank=16)})  # fmt: skip
    start, room = job("02-memory-anatomy"), lab.gpu("T4").room()
    peaks = [lab.estimate(MODEL, replace(start, **change), "T4").peak_allocated for change in changes]
    assert min(peaks) > 1.5 * room
    assert peaks[0] > lab.estimate(MODEL, start, "T4").peak_allocated  # autocast adds copies of the weights


def test_a_master_copy_is_updated_by_a_fused_kernel():
    """Without it the square roots of AdamW's second moments would add 4 bytes to these 18 per parameter."""
    run = lab.Training(seq_len=16, precision="mixed-bf16", checkpointing="full")
    assert lab.estimate(MODEL, run).phases["optimizer"] / N == pytest.approx(18, rel=0.005)


def test_what_the_last_exercise_decides():
    """Llama-3.1-8B, mixed precision: 8-bit AdamW still needs more than 80 GB, and LoRA far less."""
    peaks = [
        lab.estimate("meta-llama/Llama-3.1-8B", run, "H100-80GB").peak_allocated
        for run in (
            lab.Training(seq_len=2048, precision="mixed-bf16", checkpointing="full", optimizer="adamw-8bit"),
            lab.Training(seq_len=2048, precision="mixed-bf16", checkpointing="full", lora=lab.LoRA(rank=16)),
        )
    ]
    assert peaks[0] > lab.gpu("H100-80GB").room() > 2 * peaks[1]

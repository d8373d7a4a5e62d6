"""lab.simulate against what others measured on a T4; tests/formulas/test_against_measure.py has this CPU."""

from dataclasses import replace

import pytest
import torch

import llmlab as lab
from llmlab.base.units import MiB, show_bytes
from llmlab.simulation.allocator.caching import Allocator
from llmlab.simulation.report import recorded

GPT = {"model_type": "gpt2", "n_embd": 128, "n_head": 4, "n_layer": 3, "n_positions": 256, "vocab_size": 2000}
LLAMA = {"model_type": "llama", "hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2,
         "num_hidden_layers": 3, "intermediate_size": 344, "vocab_size": 2000,
         "max_position_embeddings": 256}  # fmt: skip


def t4_rows(name: str, seq_len: int) -> list[lab.Report]:
    rows = lab.records(name, gpu="T4", source="published")
    return [row for row in rows if row.phases and row.run.seq_len == seq_len]


@pytest.mark.parametrize("row", t4_rows("HuggingFaceTB/SmolLM2-135M", 512), ids=lambda row: repr(row.run)[-40:])
def test_allocated_is_within_half_a_percent_of_the_t4(row):
    simulated = lab.simulate(row.model, row.run, "T4")
    assert simulated.peak_allocated == pytest.approx(row.peak_allocated, rel=0.005)
    assert simulated.peak_reserved == pytest.approx(row.peak_reserved, rel=0.07)
    for phase, measured in row.phases.items():
        assert simulated.phases[phase] == pytest.approx(measured, rel=0.01), phase


def test_sdpa_reserves_what_the_t4_reserved():
    for row in t4_rows("TinyLlama/TinyLlama-1.1B-Chat-v1.0", 1024):
        if row.run.quantization is None and row.run.attention == "efficient":
            simulated = lab.simulate(row.model, row.run, "T4")
            assert simulated.peak_reserved == row.peak_reserved
            assert abs(simulated.peak_allocated - row.peak_allocated) < MiB // 4


def test_parts_add_up_and_reserved_holds_allocated():
    report = lab.simulate(GPT, lab.Training(micro_batch=4, seq_len=256), "A100-80GB")
    assert sum(report.parts.values()) == report.peak_allocated <= report.peak_reserved < report.process
    assert report.source == "simulated" and report.outcome == "fits" and report.timeline


def test_a_card_too_small_is_an_outcome_that_says_where():
    report = lab.simulate("meta-llama/Llama-3.1-8B", lab.Training(seq_len=128), "T4")
    assert report.outcome == "out of memory" and report.where.startswith("load")


@pytest.mark.parametrize(("micro_batch", "seq_len", "mib", "phase"), [
    (1, 128, 1200, "backward"), (1, 128, 2100, "optimizer"), (2, 512, 2100, "forward"), (2, 512, 2600, "optimizer"),
    (2, 512, 3000, "forward"),  # of the second step, when the optimizer's states exist
])  # fmt: skip
def test_an_estimate_runs_out_of_memory_in_the_phase_in_which_the_simulated_run_does(micro_batch, seq_len, mib, phase):
    run, small = lab.Training(micro_batch, seq_len, "autocast-fp16"), replace(lab.gpu("T4"), memory=mib * MiB)
    for report in (lab.estimate("gpt2", run, small), lab.simulate("gpt2", run, small)):
        assert report.outcome == "out of memory" and report.where.startswith(phase), report


def test_out_of_memory_says_what_the_step_would_have_taken_with_room():
    """The same figures as on the same GPU with more memory, beside where the small one failed."""
    run, t4 = lab.Training(micro_batch=8, seq_len=256), lab.gpu("T4")
    small, large = (lab.simulate(GPT, run, replace(t4, memory=t4.context + size * MiB)) for size in (100, 4096))
    assert small.outcome == "out of memory" and small.where.startswith("forward") and large.outcome == "fits"
    assert small.needed == large.process > small.capacity and small.process is None and large.needed is None
    for field in ("peak_allocated", "peak_reserved", "phases", "parts", "detail", "timeline", "peak_at", "modules"):
        assert getattr(small, field) == getattr(large, field), field
    assert small.step_seconds is None
    assert ("memory needed", show_bytes(small.needed)) in small.rows() and "memory needed" not in str(large)
    assert lab.Report.from_json(small.to_json()) == small
    assert "needed" not in large.to_json()  # what was written before there was such a field is read as ever


def test_what_loading_takes_for_a_moment_is_needed_too():
    """Preparing a quantized model turns tables to fp32, each beside its half copy: 590 MiB, where the step has 454."""
    tables = {**LLAMA, "vocab_size": 200_000, "hidden_size": 256, "tie_word_embeddings": False}
    run = lab.Training(seq_len=8, precision="fp16", lora=lab.LoRA(rank=1), quantization="nf4")
    t4 = lab.gpu("T4")
    report = lab.simulate(tables, run, replace(t4, memory=t4.context + 500 * MiB))
    assert report.outcome == "out of memory" and report.where.startswith("load")
    assert report.peak_reserved + t4.context < report.capacity < report.needed


def test_a_step_runs_out_of_memory_at_the_request_that_failed_on_the_t4():
    (row,) = [r for r in lab.records("meta-llama/Llama-3.2-1B", gpu="T4") if r.outcome == "out of memory"]
    simulated = lab.simulate(row.model, row.run, "T4")
    assert (simulated.outcome, simulated.where.partition(",")[0]) == (row.outcome, row.where.partition(",")[0])
    for words in ("2.94 GiB", "11.11 GiB allocated"):
        assert words in row.notes[-1] and words in simulated.notes[0]


def test_a_generation_on_several_devices_is_refused_by_name():
    with pytest.raises(lab.NotAvailable, match="tp=2"):
        lab.simulate(GPT, lab.Inference(prompt_len=64, new_tokens=8, tp=2), "A100-80GB")


@pytest.mark.parametrize(
    ("gpu", "precision"),
    [("T4", "fp32"), ("T4", "autocast-fp16"), ("A100-80GB", "bf16"), ("H100-80GB", "autocast-bf16")],
)
def test_the_same_step_written_as_a_script_takes_the_same_bytes(gpu, precision):
    from transformers import AutoConfig, AutoModelForCausalLM

    report = lab.simulate(LLAMA, lab.Training(micro_batch=2, seq_len=128, precision=precision), gpu)
    with lab.simulator(gpu) as sim:
        config = AutoConfig.for_model(**LLAMA, use_cache=False)
        dtype = torch.bfloat16 if precision == "bf16" else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).cuda().train()
        optimizer = torch.optim.AdamW(model.parameters())
        scaler = torch.amp.GradScaler("cuda", enabled=precision == "autocast-fp16")
        half = torch.float16 if precision == "autocast-fp16" else torch.bfloat16
        ids = torch.randint(0, 2000, (2, 128), device="cuda")
        for _ in range(2):
            sim.reset_peak()
            with torch.autocast("cuda", half, enabled=precision.startswith("autocast")):
                output = model(input_ids=ids, labels=ids)
            loss = scaler.scale(output.loss / 1)  # micro-batch
            loss.backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            del output, loss
    assert sim.peak_allocated == report.peak_allocated and sim.peak_reserved == report.peak_reserved


def test_a_recording_takes_an_allocator_and_tells_of_phases():
    asked, phases = [], []

    class Watched(Allocator):
        def malloc(self, size: int, stream: int = 0) -> int:
            asked.append(size)
            return super().malloc(size, stream)

    run = lab.Training(micro_batch=1, seq_len=16)
    recording = recorded(GPT, run, "T4", Watched, phases.append)
    assert len(asked) == sum(event.size > 0 for event in recording.engine.events)
    counted = ["forward", "backward", "optimizer", "optimizer"]  # the update, and then its gradients go
    assert phases == ["load", *[None] * len(counted), *counted, None]

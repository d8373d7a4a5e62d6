"""The numbers that the page on LoRA derives by hand are those of the package."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.course.job import MODEL_8B
from llmlab.formulas.memory.activations import block_saved
from llmlab.formulas.memory.share import share_of

MODEL = lab.model(MODEL_8B)
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RUN = lab.Training(seq_len=2048, precision="bf16", checkpointing="full", lora=lab.LoRA(rank=16, targets=ALL))
N, L, h, f, V = MODEL.parameters, MODEL.layers, MODEL.hidden, MODEL.intermediate, MODEL.vocab
T, kd = RUN.seq_len, MODEL.kv_heads * MODEL.head_dim
P = 16 * L * (9 * h + 2 * kd + 3 * f)


def test_the_peak_of_a_checkpointed_run():
    by_hand = 2 * N + 12 * P + 2 * L * T * h + 14 * T * V
    assert by_hand == pytest.approx(lab.estimate(MODEL_8B, RUN, "RTX-4090").peak_allocated, rel=0.005)


@pytest.mark.parametrize("rank", [64, 128, 256])
def test_the_peak_of_the_update(rank):
    run = replace(RUN, kernels="liger", lora=lab.LoRA(rank=rank, targets=ALL))
    update = lab.estimate(MODEL_8B, run, "RTX-4090").phases["optimizer"]
    assert 2 * N + 20 * P * rank / 16 == pytest.approx(update, rel=0.005)


def test_fp32_copies_make_the_activations_of_lora_larger_than_those_of_full_training():
    def saved(run):
        rows = block_saved(share_of(MODEL, run))
        return sum(row.bytes for row in rows), sum(row.bytes for row in rows if row.kind == "adapters")

    (whole, _), (copies, by_adapters) = saved(replace(RUN, lora=None, precision="mixed-bf16")), saved(RUN)
    assert by_adapters == 4 * T * (6 * h + f) + 28 * T * 16
    assert 1.4 < copies / whole < 1.5
    in_bf16 = replace(RUN, lora=replace(RUN.lora, autocast_adapter_dtype=False))
    assert 0.9 < saved(in_bf16)[0] / whole < 1


def test_what_nf4_adds_on_a_t4_grows_with_the_tokens_and_is_more_than_dequantization():
    rows = [r for r in lab.records(gpu="T4") if r.phases and r.run.lora and r.run.attention == "efficient"]
    plain = {(r.model, r.run): r.step_seconds for r in rows if not r.run.quantization}
    added = {}
    for row in rows:
        key = row.model, replace(row.run, quantization=None)
        if row.run.quantization and key in plain:
            seconds = row.step_seconds - plain[key]
            weights = lab.model(row.model).block_linear_elements
            assert seconds > 3 * 3 * 20.5 / 8 * weights / lab.gpu("T4").bandwidth, row.model
            added[row.model, row.run.tokens] = seconds
    tiny = [seconds for (name, _), seconds in sorted(added.items()) if "TinyLlama" in name]
    assert len(tiny) == 3 and tiny == sorted(tiny) and tiny[2] > 5 * tiny[0]

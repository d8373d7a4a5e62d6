"""AdamW as one kernel, estimated and simulated: no roots of second moments, and a third of the bytes moved."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.formulas.time.kernels import kernels
from llmlab.formulas.time.step import update_seconds

LLAMA = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_hidden_layers": 3, "intermediate_size": 688, "vocab_size": 4096,
         "max_position_embeddings": 256}  # fmt: skip
GPT2 = {**lab.model("gpt2").config, "n_layer": 3}
LORA = lab.LoRA(256, ("q_proj", "v_proj", "up_proj", "down_proj"))
FUSED = {
    "fp32": (GPT2, lab.Training(seq_len=16)),
    "bf16": (LLAMA, lab.Training(seq_len=128, precision="bf16")),
    "accumulated": (LLAMA, lab.Training(seq_len=64, precision="autocast-bf16", accumulation=2)),
    "scaled": (LLAMA, lab.Training(seq_len=64, precision="autocast-fp16", checkpointing="full")),
    "adapters": (LLAMA, lab.Training(seq_len=16, precision="bf16", lora=LORA)),
    "zero 1": (GPT2, lab.Training(seq_len=16, dp=2, zero=1)),
    "zero 2": (LLAMA, lab.Training(seq_len=16, precision="bf16", dp=2, zero=2)),
    "zero 3, mixed": (LLAMA, lab.Training(seq_len=16, precision="mixed-bf16", dp=2, zero=3)),
    "tensor-parallel": (LLAMA, lab.Training(seq_len=16, precision="bf16", tp=2)),
}  # fmt: skip


@pytest.mark.parametrize(("model", "run"), FUSED.values(), ids=FUSED)
def test_the_fused_update_takes_what_the_real_kernel_does_and_has_no_roots(model, run):
    """Of lists there are roots beside the same states, and they are the peak of so short a step."""
    fused = replace(run, optimizer="adamw-fused")
    simulated, estimated = (verb(model, fused, "A100-80GB") for verb in (lab.simulate, lab.estimate))
    assert estimated.phases["optimizer"] == pytest.approx(simulated.phases["optimizer"], rel=0.01)
    assert estimated.peak_allocated == pytest.approx(simulated.peak_allocated, rel=0.01)
    lists = lab.simulate(model, run, "A100-80GB")
    assert lists.phases["optimizer"] > 1.04 * simulated.phases["optimizer"]


def test_master_copies_of_adapters_are_stepped_fused_as_any_are():
    run = lab.Training(seq_len=16, precision="mixed-bf16", lora=LORA)
    for optimizer in ("adamw", "adamw-fused"):
        both = (verb(LLAMA, replace(run, optimizer=optimizer), "A100-80GB") for verb in (lab.estimate, lab.simulate))
        estimated, simulated = (report.phases["optimizer"] for report in both)
        assert estimated == pytest.approx(simulated, rel=0.01)


def test_an_update_of_lists_moves_three_times_the_bytes():
    """21 reads and writes of a list where one kernel has 7 (torch/optim/adam.py, _multi_tensor_adam), in 8 operators
    that launch a kernel per 320 · 65,536 elements."""
    spec, found = lab.model("gpt2"), kernels(lab.gpu("A100-80GB"))
    lists, fused = (update_seconds(spec, lab.Training(optimizer=name), found) for name in ("adamw", "adamw-fused"))
    assert fused == pytest.approx(28 * spec.parameters / found.bandwidth) and (
        lists == pytest.approx(3 * fused + 8 * spec.parameters / (320 * 65536) * found.operators.launch)
    )


def test_offloaded_adamw_is_either(agree):
    run = lab.Training(seq_len=16, offload="optimizer", optimizer="adamw-fused")
    assert lab.estimate(LLAMA, run, "T4").phases == lab.estimate(LLAMA, replace(run, optimizer="adamw"), "T4").phases
    agree(LLAMA, run, "T4", 0.01)

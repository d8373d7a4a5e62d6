"""Facts the formulas must reproduce."""

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

import llmlab as lab
from llmlab.archive import held_out
from llmlab.formulas.inference import kv_cache_bytes
from llmlab.formulas.memory.states import states

GPT = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 256, "vocab_size": 1000}
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2,
         "num_hidden_layers": 3, "intermediate_size": 176, "vocab_size": 1000,
         "max_position_embeddings": 256}  # fmt: skip

runs = st.builds(
    lab.Training,
    micro_batch=st.integers(1, 8),
    seq_len=st.sampled_from([16, 64, 256]),
    precision=st.sampled_from(["fp32", "bf16", "autocast-fp16", "mixed-bf16"]),
    optimizer=st.sampled_from(["sgd", "adamw", "adamw-fused", "adamw-8bit", "adafactor", "lion"]),
    checkpointing=st.sampled_from([None, "selective", "full"]),
    attention=st.sampled_from(["eager", "sdpa"]),
    accumulation=st.sampled_from([1, 4]),
)
models = st.sampled_from([lab.model(GPT), lab.model(LLAMA)])


def peak(model, run, gpu=None) -> int:
    return lab.estimate(model, run, gpu).peak_allocated


@given(models, runs, st.data())
def test_more_work_never_takes_less(model, run, data):
    wider = lab.Training(**{**run.to_dict(), "micro_batch": run.micro_batch + data.draw(st.integers(1, 8))})
    assert peak(model, wider) >= peak(model, run)


def test_activations_are_linear_in_the_batch():
    at = [lab.estimate(GPT, lab.Training(micro_batch=b, seq_len=128)).phases["forward"] for b in (1, 2, 3)]
    assert at[2] - at[1] == at[1] - at[0]


@pytest.mark.parametrize(("zero", "expected"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_zero_paper_figure_1(zero, expected):
    """arXiv 1910.02054, figure 1: 7.5B parameters, 64 GPUs, mixed precision Adam (K = 12)."""
    spec = lab.model("meta-llama/Llama-3.1-8B")
    held = states(spec, lab.Training(precision="mixed-fp16", dp=64, zero=zero))
    bytes_a_parameter = (held.weights + held.gradients + held.optimizer) / spec.parameters
    assert bytes_a_parameter * 7.5 == pytest.approx(expected, abs=0.06)


def test_the_latent_cache_is_whole_on_every_tensor_parallel_rank():
    """And no rank holds less than one kv head."""
    one, many = (lab.Inference(prompt_len=64, new_tokens=64, tp=tp) for tp in (1, 8))
    deepseek, llama = lab.model("deepseek-ai/DeepSeek-V3"), lab.model("meta-llama/Llama-3.1-8B")
    assert kv_cache_bytes(deepseek, many) == kv_cache_bytes(deepseek, one)
    assert kv_cache_bytes(llama, lab.Inference(prompt_len=64, new_tokens=64, tp=32)) == kv_cache_bytes(llama, many)


def test_autocast_takes_more_than_fp32_with_few_tokens_and_less_with_many():
    """fp32 weights and their half copies stand side by side: short sequences do not win them back."""

    def forward(micro_batch: int, seq_len: int, precision: str) -> int:
        return lab.estimate("gpt2", lab.Training(micro_batch, seq_len, precision=precision)).phases["forward"]

    assert forward(1, 16, "autocast-bf16") > forward(1, 16, "fp32")
    assert forward(8, 1024, "autocast-bf16") < forward(8, 1024, "fp32")


@given(models, runs)
def test_checkpointing_never_keeps_more(model, run):
    def forward(kind):
        return lab.estimate(model, lab.Training(**{**run.to_dict(), "checkpointing": kind})).phases["forward"]

    assert forward("full") <= forward("selective") <= forward(None)


def test_lora_trains_r_times_inputs_plus_outputs():
    """Published: 8 716 288 trainable parameters for rank 32 on q, k, v, o of Qwen2.5-1.5B (T4 archive)."""
    run = lab.Training(lora=lab.LoRA(rank=32, targets=("q_proj", "k_proj", "v_proj", "o_proj")))
    assert states(lab.model("Qwen/Qwen2.5-1.5B"), run).gradients == 4 * 8_716_288


def test_published_t4_rows_are_explained():
    """LoRA and QLoRA steps on a T4: allocated within 10 % at the median."""
    published = [row for row in lab.records(gpu="T4", source="published") if not held_out(row)]
    errors = [lab.estimate(r.model, r.run, "T4").peak_allocated / r.peak_allocated - 1 for r in published]
    assert statistics.median(map(abs, errors)) <= 0.10


@given(models, runs)
def test_parts_add_up_to_the_peak_and_the_peak_is_the_largest_phase(model, run):
    report = lab.estimate(model, run, "A100-80GB")
    assert sum(report.parts.values()) == report.peak_allocated == max(report.phases.values())
    assert all(size > 0 for size in report.parts.values())

"""What quantized and frozen linears keep for backward, formula beside simulation."""

from __future__ import annotations

import pytest

import llmlab as lab

pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")

LLAMA = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
         "num_hidden_layers": 3, "intermediate_size": 1024, "vocab_size": 16000,
         "max_position_embeddings": 2048}  # fmt: skip
B, T = 2, 512


def run(quantization: str, checkpointing: str | None) -> lab.Training:
    adapters = lab.LoRA(rank=16, targets=("q_proj", "v_proj"))
    return lab.Training(B, T, "fp16", lora=adapters, quantization=quantization, checkpointing=checkpointing)


@pytest.mark.parametrize("checkpointing", ["full", "selective", None])
@pytest.mark.parametrize("quantization", ["int8", "nf4"])
def test_the_formula_is_the_simulation_within_two_percent(quantization, checkpointing):
    estimated, simulated = (
        verb(LLAMA, run(quantization, checkpointing), "T4").parts["activations"]
        for verb in (lab.estimate, lab.simulate)
    )
    assert estimated == pytest.approx(simulated, rel=0.02, abs=2**18)  # masks and the like


def test_checkpointing_does_not_free_the_inputs_of_int8_linears():
    """bitsandbytes/autograd/_functions.py, MatMul8bitLt: `ctx.tensors = (..., A)`, which is no saved tensor. In fp32:
    the input of q, k and v, attention's output, the MLP's input, down_proj's."""
    held = {each: lab.estimate(LLAMA, run(each, "full"), "T4").parts["activations"] for each in ("int8", "nf4")}
    layers, h, Q, i = 3, 256, 256, 1024
    assert held["int8"] - held["nf4"] == 4 * layers * B * T * (2 * h + Q + i)


@pytest.mark.parametrize("checkpointing", ["full", None])
@pytest.mark.parametrize("quantization", ["nf4", None])
def test_autocast_copies_frozen_weights_for_as_long_as_autograd_keeps_them(quantization, checkpointing):
    """aten/src/ATen/autocast_mode.cpp, cached_cast, keeps copies of leaves that require gradients alone; a quantized
    linear dequantizes instead, and returns its input's fp32 (bitsandbytes, nn/modules.py, Linear4bit.forward)."""
    adapters = lab.LoRA(rank=8, targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
    deep = LLAMA | {"num_hidden_layers": 6, "hidden_size": 512, "vocab_size": 4000}
    run = lab.Training(1, T, "autocast-bf16", lora=adapters, quantization=quantization, checkpointing=checkpointing)
    estimated, simulated = (verb(deep, run, "A100-40GB").peak_allocated for verb in (lab.estimate, lab.simulate))
    assert estimated == pytest.approx(simulated, rel=0.08)  # with a copy of every weight twice as much

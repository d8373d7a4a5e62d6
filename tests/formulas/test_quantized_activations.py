"""What quantized and frozen linears keep for backward, formula beside simulation."""

import pytest

import llmlab as lab

bitsandbytes = pytest.importorskip("bitsandbytes")
pytest.importorskip("peft")


LLAMA = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 4,
         "num_hidden_layers": 2, "intermediate_size": 1024, "vocab_size": 16000,
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
    layers, h, Q, i = 2, 256, 256, 1024
    assert held["int8"] - held["nf4"] == 4 * layers * B * T * (2 * h + Q + i)


@pytest.mark.parametrize(
    ("quantization", "checkpointing", "targets"),
    [
        ("int8", "full", ("q_proj", "v_proj")),
        ("int8", None, ("up_proj", "down_proj")),
        ("nf4", "full", ("up_proj", "down_proj")),
        ("nf4", None, ("q_proj", "v_proj")),
    ],
)
def test_the_micro_batch_before_keeps_int8_inputs_until_there_is_the_next_loss(quantization, checkpointing, targets):
    """And the last one until the step is over."""
    lora = lab.LoRA(rank=8, targets=targets)
    few = LLAMA | {"vocab_size": 2048}
    given = {"lora": lora, "quantization": quantization, "checkpointing": checkpointing}
    one, two = (lab.Training(8, T, "bf16", accumulation=count, **given) for count in (1, 2))
    more, update = [], []
    for verb in (lab.estimate, lab.simulate):
        alone, both = (verb(few, run, "A100-40GB").phases for run in (one, two))
        more.append(both["forward"] - alone["forward"])
        update.append(both["optimizer"])
    assert more[0] == pytest.approx(more[1], rel=0.02, abs=2**20)
    assert update[0] == pytest.approx(update[1], rel=0.02, abs=2**20)
    layers, h, Q, i = 2, 256, 256, 1024
    inputs = 8 * T * 4 * (layers * (2 * h + Q + i))
    if not checkpointing:  # the first layer's have no gradient up to its first adapter
        inputs -= 8 * T * 4 * (h if "q_proj" in targets else 2 * h + Q)
    leaf = 2 * 8 * T * 4 * h if checkpointing else 0
    gradients = lab.estimate(few, two, "A100-40GB").parts["gradients"]
    assert more[0] == (inputs if quantization == "int8" else 0) + leaf + gradients


@pytest.mark.parametrize("words", [32, 65536])  # the block is the peak, and the loss
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_a_weight_is_dequantized_for_its_product_in_half_and_is_gone_at_the_loss(family, words, agree):
    """Of Phi-3's gate_up_proj NF4 makes 32 MiB."""
    wide = LLAMA | {"hidden_size": 1024, "intermediate_size": 8192, "vocab_size": words, "model_type": family}
    wide |= {"pad_token_id": 0, "sliding_window": None, "num_hidden_layers": 3} if family == "phi3" else {}
    lora = lab.LoRA(rank=8, targets=("qkv_proj",) if family == "phi3" else ("q_proj", "v_proj"))
    run = lab.Training(1, T, "bf16", lora=lora, quantization="nf4", checkpointing="full")
    agree(wide, run, "A100-40GB")


@pytest.mark.parametrize("checkpointing", ["full", "selective", None])
@pytest.mark.parametrize("targets", [("q_proj",), ("up_proj",), ("down_proj",)], ids="+".join)
def test_int8_products_are_made_in_int32_and_their_graph_goes_with_what_is_recomputed(targets, checkpointing, agree):
    """With few words the block is the peak."""
    few = LLAMA | {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 256}
    run = lab.Training(8, T, "bf16", lora=lab.LoRA(8, targets), quantization="int8", checkpointing=checkpointing)
    agree(few, run, "A100-40GB")


@pytest.mark.parametrize("checkpointing", ["full", None])
@pytest.mark.parametrize("quantization", ["nf4", None])
def test_autocast_copies_frozen_weights_for_as_long_as_autograd_keeps_them(quantization, checkpointing):
    """aten/src/ATen/autocast_mode.cpp, cached_cast, keeps copies of leaves that require gradients alone; a quantized
    linear dequantizes instead, and returns its input's fp32 (bitsandbytes, nn/modules.py, Linear4bit.forward)."""
    adapters = lab.LoRA(rank=8, targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
    wide = LLAMA | {"hidden_size": 512, "vocab_size": 4000}
    run = lab.Training(1, T, "autocast-bf16", lora=adapters, quantization=quantization, checkpointing=checkpointing)
    estimated, simulated = (verb(wide, run, "A100-40GB").peak_allocated for verb in (lab.estimate, lab.simulate))
    assert estimated == pytest.approx(simulated, rel=0.03)  # a copy of every weight would be a tenth

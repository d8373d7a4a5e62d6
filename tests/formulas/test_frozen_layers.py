"""Double quantization, and frozen layers in 16 bits: formula and simulation, and the bytes of the weights."""

import pytest

import llmlab as lab
from llmlab.formulas.memory.states import states

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LLAMA = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 32000, "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}  # fmt: skip
# A model of 34B, fine-tuned with Axolotl on 24 GB: https://github.com/axolotl-ai-cloud/axolotl/pull/1000
YI = {
    "model_type": "llama", "hidden_size": 7168, "intermediate_size": 20480, "num_hidden_layers": 60,
    "num_attention_heads": 56, "num_key_value_heads": 8, "vocab_size": 64000, "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}  # fmt: skip


def run(**given):
    usual = {"micro_batch": 2, "seq_len": 512, "precision": "autocast-bf16", "lora": lab.LoRA(8, ALL)}
    return lab.Training(**{**usual, "quantization": "nf4", **given})


def weights(model, **given):
    return states(lab.model(model), run(**given)).weights


@pytest.mark.parametrize("checkpointing", [None, "full"])
@pytest.mark.parametrize("frozen", [
    {"double_quant": True}, {"half_layers": "all"}, {"half_layers": "all", "quantization": "int8"},
    {"half_layers": "embeddings", "double_quant": True}, {"half_layers": "all", "quantization": None},
    {"half_layers": "all", "quantization": None, "lora": lab.LoRA(8, ("q_proj", "v_proj"), dropout=0.1)},
])  # fmt: skip
def test_the_formula_is_the_simulation(frozen, checkpointing, agree):
    pytest.importorskip("bitsandbytes")
    pytest.importorskip("peft")
    step = run(**frozen, checkpointing=checkpointing)
    formula, simulation = agree(LLAMA, step, "A100-80GB", 0.015)
    of_weights = 0.01 if step.quantization == "int8" else 0.002  # double quantization is 0.4 % of them here
    assert formula.parts["weights"] == pytest.approx(simulation.parts["weights"], rel=of_weights)


def test_double_quantization_saves_three_eighths_of_a_bit_per_weight():
    """QLoRA, arXiv 2305.14314, section 3: 32 / 64 = 0.5 bits become 8 / 64 + 32 / (64 · 256) = 0.127."""
    spec = lab.model(YI)
    saved = weights(YI) - weights(YI, double_quant=True)
    assert saved * 8 / spec.block_linear_elements == pytest.approx(0.5 - 0.127, abs=0.001)


def test_half_layers_take_two_bytes_less_for_each_weight_that_is_not_quantized():
    spec = lab.model(YI)
    tables = 2 * spec.vocab * spec.hidden
    norms = spec.parameters - spec.block_linear_elements - tables
    assert weights(YI) - weights(YI, half_layers="embeddings") == 2 * tables
    assert weights(YI) - weights(YI, half_layers="all") == 2 * (tables + norms)
    plain = [weights(YI, quantization=None, half_layers=each) for each in (None, "all")]
    assert plain[0] - plain[1] == 2 * spec.parameters


def test_both_decide_whether_34b_fits_in_24_gb():
    step = {"micro_batch": 1, "seq_len": 1400, "lora": lab.LoRA(16, ALL), "checkpointing": "full", "attention": "flash",
            "optimizer": "adamw-8bit"}  # fmt: skip
    peft = lab.estimate(YI, run(**step), "RTX-3090-Ti")
    axolotl = lab.estimate(YI, run(**step, double_quant=True, half_layers="all"), "RTX-3090-Ti")
    assert (peft.outcome, axolotl.outcome) == ("out of memory", "unknown")
    assert axolotl.parts["weights"] / 2**30 == pytest.approx(18.30, abs=0.05)  # a script's own, simulated


def test_loras_weights_in_fp32_are_named_with_the_way_to_say_that_they_are_not():
    step = run(quantization=None)
    codes = [[note.code for note in lab.estimate(LLAMA, each, "A100-80GB").notes]
             for each in (step, run(quantization=None, half_layers="all"), run(quantization=None, precision="bf16"))]
    assert ["frozen-in-fp32" in each for each in codes] == [True, False, False]


@pytest.mark.parametrize(("given", "words"), [
    ({"quantization": "int8", "double_quant": True}, "only nf4 has scales"),
    ({"precision": "bf16", "half_layers": "all"}, "autocast-bf16"),
    ({"quantization": None, "lora": None, "half_layers": "all"}, "it applies to frozen weights"),
    ({"quantization": None, "half_layers": "embeddings"}, "half_layers='all'"),
    ({"half_layers": "norms"}, "embeddings, all"),
    ({"half_layers": "all", "lora": lab.LoRA(autocast_adapter_dtype=False)}, "autocast_adapter_dtype"),
    ({"half_layers": "all", "quantization": None, "dp": 2, "zero": 3}, "zero=3"),
    ({"double_quant": True, "precision": "bf16", "stack": "torchtune"}, "always quantizes its scales"),
])  # fmt: skip
def test_what_cannot_be_is_refused_with_what_can(given, words):
    with pytest.raises(lab.SpecError, match=words):
        run(**given)

"""What adapters keep of a step, held to what peft's own take under simulation."""

import pytest

import llmlab as lab

MODEL = {
    "model_type": "llama", "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("checkpointing", [None, "selective"])
@pytest.mark.parametrize("in_fp32", [True, False])
@pytest.mark.parametrize(
    "given", [{"precision": "bf16"}, {"precision": "mixed-bf16", "dp": 8, "zero": 3}], ids=["half", "FSDP2"]
)
def test_adapters_keep_their_inputs_and_results_in_the_dtype_that_computes_them(given, in_fp32, checkpointing):
    lora = lab.LoRA(rank=8, targets=ALL, autocast_adapter_dtype=in_fp32)
    run = lab.Training(micro_batch=2, seq_len=2048, lora=lora, checkpointing=checkpointing, **given)
    estimate, simulation = lab.estimate(MODEL, run, "A100-80GB"), lab.simulate(MODEL, run, "A100-80GB")
    assert estimate.peak_allocated == pytest.approx(simulation.peak_allocated, rel=0.02)


def test_half_adapters_are_half_and_a_word_is_no_answer():
    wide, half = (
        lab.estimate(MODEL, lab.Training(precision="bf16", lora=lab.LoRA(autocast_adapter_dtype=each)), "A100-80GB")
        for each in (True, False)
    )
    assert half.parts["optimizer"] * 2 == wide.parts["optimizer"]
    with pytest.raises(lab.SpecError, match="autocast_adapter_dtype='no' is neither True nor False"):
        lab.LoRA(autocast_adapter_dtype="no")

"""What a block's operators take for a moment beside what it keeps, held to the real classes under simulation."""

import pytest

import llmlab as lab


def test_beside_the_scores_of_int8_linears_are_none_of_the_inputs_that_only_adapters_keep_later():
    """Scores are written out before o_proj and the MLP have read anything: of what the block keeps in the end, their
    inputs are not there yet. With few words that is forward's peak."""
    model = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 8, "num_key_value_heads": 8,
             "num_hidden_layers": 2, "intermediate_size": 1024, "vocab_size": 512,
             "max_position_embeddings": 2048}  # fmt: skip
    lora = lab.LoRA(8, ("o_proj", "up_proj", "down_proj"))
    run = lab.Training(1, 1024, "fp16", quantization="int8", lora=lora, attention="eager")
    estimate, simulation = (verb(model, run, "A100-80GB") for verb in (lab.estimate, lab.simulate))
    assert estimate.phases["forward"] == pytest.approx(simulation.phases["forward"], rel=0.01)

"""The matrices of a model, and its parameters."""

import pytest

import llmlab as lab
from llmlab.specs.model import model


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen2.5-7B", "phi-3-mini", "gpt2"])
def test_matrices_biases_norms_and_tables_are_all_of_a_models_parameters(name):
    spec = lab.model(name)
    by_part = spec.parameters_by_component
    matrices = sum(linear.elements for linear in spec.linears if not (linear.part == "head" and spec.tied))
    biases = sum(linear.outputs * linear.count for linear in spec.linears if linear.bias)
    others = sum(by_part.get(part, 0) for part in ("embedding", "positions", "norms"))
    assert matrices + biases + others == spec.parameters


@pytest.mark.parametrize(
    ("name", "active"),
    [("Mixtral-8x7B", 12.9e9), ("Qwen3-30B-A3B", 3.3e9), ("Qwen3-235B-A22B", 22e9)],
)
def test_active_parameters_are_what_the_makers_say(name, active):
    assert model(name).active_parameters == pytest.approx(active, rel=0.02)


def test_fused_linears_are_named_as_in_transformers():
    # What LoRA's targets have to say.
    assert [one.name for one in model("phi-3-mini").linears] == [
        "qkv_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head",
    ]
    assert [one.name for one in model("gpt2").linears] == ["c_attn", "c_proj", "c_fc", "c_proj", "lm_head"]

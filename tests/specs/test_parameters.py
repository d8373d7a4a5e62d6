"""The matrices of a model, and its parameters."""

import pytest

import llmlab as lab


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen2.5-7B", "phi-3-mini", "gpt2"])
def test_matrices_biases_norms_and_tables_are_all_of_a_models_parameters(name):
    spec = lab.model(name)
    by_part = spec.parameters_by_component
    matrices = sum(linear.elements for linear in spec.linears if not (linear.part == "head" and spec.tied))
    biases = sum(linear.outputs * linear.count for linear in spec.linears if linear.bias)
    others = sum(by_part.get(part, 0) for part in ("embedding", "positions", "norms"))
    assert matrices + biases + others == spec.parameters

"""The matrix products of a step: which of them recomputation makes again."""

import pytest

import llmlab as lab
from llmlab.formulas.time.products import is_last


@pytest.mark.parametrize(("model", "spared"), [
    ("Llama-3.2-1B", {"down_proj"}),
    ("deepseek-ai/DeepSeek-V3", {"down_proj"}),  # of dense layers and of shared experts
    ("gpt2", set()),  # dropout behind it has its mask to make again
    ("gemma-2-2b", set()),  # and so has a norm its input
])  # fmt: skip
def test_recomputation_stops_before_the_product_whose_output_backward_does_not_need(model, spared):
    spec = lab.model(model)
    assert {linear.name for linear in spec.block_linears if is_last(spec, linear)} == spared

"""Sizes that follow from a model's fields."""

from llmlab.specs.model import model


def test_widths_of_queries_and_keys_are_those_of_their_heads():
    llama = model("Llama-3.1-70B")
    assert (llama.query_width, llama.key_width) == (64 * 128, 8 * 128)


def test_a_token_goes_through_its_experts_in_the_layers_that_have_them():
    mixtral, deepseek, dense = model("Mixtral-8x7B"), model("DeepSeek-V3"), model("Llama-3.1-8B")
    assert (mixtral.token_mlp_width, mixtral.moe_layers) == (2 * 14336, 32)
    assert (deepseek.token_mlp_width, deepseek.moe_layers) == (8 * 2048, 61 - 3)
    assert (dense.token_mlp_width, dense.moe_layers) == (14336, 0)

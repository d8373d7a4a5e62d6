"""The bytes that operators between matrix products move."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.formulas.time.elementwise import ENGINE_CASTS, engine_casts, moved

LLAMA = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4,
         "num_attention_heads": 8, "num_key_value_heads": 8, "vocab_size": 512,
         "max_position_embeddings": 2048}  # fmt: skip


def test_torchtitans_swiglu_moves_5_tensors_of_its_width_forward_and_9_backward():
    """SiLU reads and writes, its product with the other branch reads two and writes one; backward three and two of
    three, in half."""
    run = lab.Training(seq_len=1024, dp=8, stack=lab.Torchtitan(ac="none"))
    wide, narrow = (moved(lab.model({**LLAMA, "intermediate_size": width}), run).blocks for width in (2048, 1024))
    assert wide - narrow == pytest.approx(4 * 1024 * 1024 * (5 + 9) * 2)


def test_backward_sends_tokens_to_their_experts_in_more_bytes_than_forward():
    """Forward gathers halves and sums what experts return; backward scatters gradients and adds them up in fp32
    (integrations/moe.py of transformers). Of experts of 8 channels hardly anything else moves."""
    mixtral = {**LLAMA, "model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 8}
    run = lab.Training(seq_len=1024, precision="bf16")

    def another_expert(run):
        one, two = (moved(lab.model({**mixtral, "num_experts_per_tok": each}), run).blocks for each in (1, 2))
        return two - one

    forward = another_expert(replace(run, checkpointing="full")) - another_expert(run)
    assert another_expert(run) - forward > 2 * forward > 0


@pytest.mark.parametrize("kernels", [None, "liger"])
def test_math_moves_16_bytes_per_score_forward_and_24_backward_in_blocks_of_liger_too(kernels):
    """16 bytes per score in the forward pass, which checkpointing repeats, and 24 in the backward pass; grouped heads
    in fp16 leave a T4 only "math"."""
    spec = lab.model({**LLAMA, "num_key_value_heads": 2})
    run = lab.Training(seq_len=2048, precision="autocast-fp16", checkpointing="full", kernels=kernels)
    math, efficient = (
        moved(spec, replace(run, attention=way), lab.gpu("T4")).blocks for way in ("sdpa", "efficient")
    )
    assert math - efficient == pytest.approx(4 * 8 * 2048**2 * (2 * 16 + 24), rel=0.1)


def test_transformer_engine_casts_one_more_input_two_gradients_and_three_weights_of_a_wider_mlp():
    """A gated MLP's first two matmuls share an input, which is as wide as the model."""
    run, casts = lab.Training(seq_len=1024, stack=lab.Megatron(fp8_recipe="tensorwise")), ENGINE_CASTS["tensorwise"]
    wide, narrow = (engine_casts(lab.model({**LLAMA, "intermediate_size": width}), run) for width in (2048, 1024))
    of_tokens = run.tokens * (casts.other + 2 * casts.gradient)
    assert wide - narrow == 4 * 1024 * (of_tokens + 3 * 512 * casts.weight)

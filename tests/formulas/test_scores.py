"""Attention scores that are written to memory."""

from itertools import pairwise

import pytest

import llmlab as lab

GPT = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 256, "vocab_size": 1000}
LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2,
         "num_hidden_layers": 3, "intermediate_size": 176, "vocab_size": 1000,
         "max_position_embeddings": 256}  # fmt: skip


@pytest.mark.parametrize("precision", ["fp16", "bf16", "autocast-bf16"])
@pytest.mark.parametrize("checkpointing", [None, "full"])
def test_softmax_of_written_scores_widens_all_halves_but_fp16(precision, checkpointing, agree):
    """torch's softmax reads fp16 and returns fp32; what is bf16 is copied before, and its gradient is fp32 as well."""
    model = {"model_type": "llama", "hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 3,
             "intermediate_size": 1024, "vocab_size": 1000, "max_position_embeddings": 2048}  # fmt: skip
    run = lab.Training(micro_batch=2, seq_len=2048, precision=precision, checkpointing=checkpointing, attention="eager")
    said, found = agree(model, run)
    assert said.phases["forward"] == pytest.approx(found.phases["forward"], rel=0.07)


def test_eager_attention_is_quadratic_in_the_sequence_and_sdpa_linear():
    def third_difference(attention: str, order: int) -> int:
        runs = [lab.Training(seq_len=n, attention=attention) for n in (32, 64, 96, 128)]
        f = [lab.estimate(GPT, run).phases["forward"] for run in runs]
        for _ in range(order):
            f = [b - a for a, b in pairwise(f)]
        return f[0]

    assert third_difference("sdpa", 2) == 0, "sdpa: a straight line"
    assert third_difference("eager", 2) > 0, "eager: not a line"
    assert third_difference("eager", 3) == 0, "eager: a parabola, not an exponential"


@pytest.mark.parametrize(
    ("key_heads", "card", "settings"),
    [
        (2, "H100-80GB", {}),  # the plain formula: FlashAttention has no fp32, the other kernel no grouped heads
        (2, "A100-80GB", {"checkpointing": "full"}),
        (2, "H100-80GB", {"checkpointing": "selective", "micro_batch": 2}),
        (2, "H100-80GB", {"dp": 8, "zero": 3}),
        (2, "H100-80GB", {"precision": "autocast-bf16"}),  # FlashAttention
        (8, "H100-80GB", {}),  # the memory-efficient kernel
        (2, "T4", {}),
    ],
)
def test_attention_in_fp32_takes_the_kernel_that_the_simulator_takes(key_heads, card, settings, agree):
    sizes = {"hidden_size": 256, "num_key_value_heads": key_heads, "max_position_embeddings": 1024}
    run = lab.Training(**{"seq_len": 1024, "optimizer": "sgd", **settings})
    guess, found = agree({**LLAMA, **sizes}, run, card, 0.05)
    if not run.checkpointing:
        assert guess.phases["forward"] == pytest.approx(found.phases["forward"], rel=0.05)

"""nanotron's block, its gradients and its stages, written out by hand."""

from dataclasses import replace

import pytest

import llmlab as lab

H, F, HEADS, V, TOKENS = 2048, 8192, 32, 131072, 4096
SIZES = {"hidden_size": H, "intermediate_size": F, "num_attention_heads": HEADS, "num_key_value_heads": HEADS,
         "num_hidden_layers": 16, "vocab_size": V, "max_position_embeddings": TOKENS}  # fmt: skip
LLAMA = lab.model({"model_type": "llama", "tie_word_embeddings": False, **SIZES})
RUN = lab.Training(seq_len=TOKENS, dp=8, zero=1, accumulation=4, stack="nanotron")
def test_after_zero_1s_update_all_weights_are_gathered_in_flat_copies():
    """The same jobs: 4 bytes per parameter and a shard beside weights, fp32 gradients and a share of the states."""
    every, run = LLAMA.parameters, replace(RUN, dp=64)
    update = lab.estimate(LLAMA, run, "H100-80GB").phases["optimizer"]
    assert update == pytest.approx((2 + 4 + 4 + 14 / 64) * every, rel=0.01)


def test_tensor_parallel_layers_wait_for_the_host():
    """TP 4 and 8 with one sequence: 4.35 to 4.9 ms per layer and micro-batch, whatever the model (the same jobs)."""
    for ranks in (4, 8):
        run = lab.Training(seq_len=TOKENS, accumulation=128, tp=ranks, sequence_parallel=True, stack="nanotron")
        seconds = lab.estimate(LLAMA, run, "H100-80GB").step_seconds
        assert 4.2e-3 < seconds / 128 / 16 < 5.2e-3


def test_it_is_estimated_and_not_simulated():
    report = lab.estimate(LLAMA, RUN, "H100-80GB")
    assert report.peak_allocated and report.step_seconds
    with pytest.raises(lab.NotAvailable, match=r"stack='nanotron' is not simulated; ask lab\.estimate"):
        lab.simulate(LLAMA, RUN, "H100-80GB")

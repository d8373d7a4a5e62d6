"""What attention keeps with a sliding window, and norms before it, held to transformers' classes under simulation."""

import pytest

import llmlab as lab

SHAPE = {
    "model_type": "mistral", "vocab_size": 2048, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": False,
}  # fmt: skip
PHI = {**SHAPE, "model_type": "phi3", "pad_token_id": 0, "num_key_value_heads": 8}
QWEN = {**SHAPE, "model_type": "qwen2", "use_sliding_window": True, "max_window_layers": 1}


@pytest.mark.parametrize(
    ("window", "gpu"), [(1024, "A100-80GB"), (1024, "H100-80GB"), (1024, "cpu"), (1025, "H100-80GB")]
)
@pytest.mark.parametrize("shape", [SHAPE, PHI, QWEN], ids=["mistral", "phi3", "half of qwen2"])
def test_a_layer_with_a_window_keeps_a_mask_and_copies_of_grouped_heads(shape, window, gpu):
    """A window as long as the sequence hides nothing, and has its mask all the same (masking_utils.py,
    _ignore_causal_mask_sdpa); Phi-3's outputs are copied where a kernel lays them out as its queries."""
    run = lab.Training(micro_batch=4, seq_len=1024, precision="bf16", optimizer="sgd")
    model = {**shape, "sliding_window": window}
    estimate, simulation = lab.estimate(model, run, gpu), lab.simulate(model, run, gpu)
    assert estimate.phases["forward"] == pytest.approx(simulation.phases["forward"], rel=0.02)


@pytest.mark.parametrize("settings", [{}, {"compile": True, "checkpointing": "selective"}], ids=str)
def test_attention_pinned_to_the_memory_efficient_kernel_has_the_mask_too(settings):
    """transformers gives it by its own name of the attention, "sdpa", whichever kernel torch is told to take."""
    settings = {"micro_batch": 4, "seq_len": 1024, "precision": "bf16", "optimizer": "sgd", **settings}
    run = lab.Training(attention="efficient", **settings)
    model = {**SHAPE, "num_hidden_layers": 4, "sliding_window": 1024}
    estimate, simulation = lab.estimate(model, run, "H100-80GB"), lab.simulate(model, run, "H100-80GB")
    for phase in ("forward", "backward"):
        assert estimate.phases[phase] == pytest.approx(simulation.phases[phase], rel=0.02)


@pytest.mark.parametrize("precision", ["bf16", "autocast-bf16"])
def test_eager_attention_copies_values_of_several_sequences(precision):
    """Its product cannot merge batch and heads in a view of what Phi-3 projects queries, keys and values to at once;
    kept whole, that would be 3 % more."""
    wide = {**PHI, "num_hidden_layers": 4, "hidden_size": 1024, "intermediate_size": 2048, "sliding_window": None}
    run = lab.Training(micro_batch=8, seq_len=256, attention="eager", precision=precision)
    estimate, simulation = lab.estimate(wide, run, "A100-80GB"), lab.simulate(wide, run, "A100-80GB")
    assert estimate.phases["forward"] == pytest.approx(simulation.phases["forward"], rel=0.01)


def test_norms_of_queries_and_keys_keep_halves_whatever_attention_computes_in():
    """PyTorch's plain formula, which a T4 takes for grouped heads, makes fp32 of halves behind them."""
    run = lab.Training(micro_batch=4, seq_len=1024, precision="fp16")
    qwen = {**SHAPE, "model_type": "qwen3", "head_dim": 64, "sliding_window": None}
    plain, fused = (lab.estimate(qwen, run, gpu).detail["activations"] for gpu in ("T4", "A100-80GB"))
    assert plain["norms"] == fused["norms"] and "scores" in plain and "scores" not in fused

"""Other stacks' own code on fake tensors, and the estimate beside it; where `make stacks` put their packages."""

from importlib.util import find_spec

import pytest

import llmlab as lab
from llmlab.simulation import stacks

SMALL = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4,
    "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 8192, "tie_word_embeddings": False,
}  # fmt: skip
QWEN = {**SMALL, "model_type": "qwen3", "head_dim": 64}
RUNS = {
    "by name": {"dp": 8},
    "full": {"dp": 8, "checkpointing": "full"},
    "none": {"dp": 8, "stack": "torchtitan:ac=none"},
    "layers": {"dp": 8, "stack": "torchtitan:ac=selective_layers"},
    "tensor parallel": {"dp": 4, "tp": 2},
    "never resharded": {"dp": 8, "stack": "torchtitan:reshard_after_forward=never"},
    "always resharded": {"dp": 8, "stack": "torchtitan:reshard_after_forward=always,optimizer=foreach"},
    "accumulated": {"dp": 8, "accumulation": 2, "micro_batch": 2},
    "as until 0.2.0": {"dp": 8, "stack": "torchtitan:keeps_attention=False"},
}


@pytest.mark.skipif(find_spec("torchtitan") is None, reason="needs `make stacks`")
@pytest.mark.parametrize("model", [SMALL, QWEN], ids=["llama", "qwen3"])
@pytest.mark.parametrize("name", RUNS)
def test_the_estimate_is_what_torchtitans_own_code_takes(name, model):
    run = lab.Training(**{"seq_len": 4096, "stack": "torchtitan", **RUNS[name]})
    estimate, simulation = lab.estimate(model, run, "H100-80GB"), lab.simulate(model, run, "H100-80GB")
    assert estimate.peak_allocated == pytest.approx(simulation.peak_allocated, rel=0.02)


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(stacks, "find_spec", lambda name: None)
    with pytest.raises(lab.NotAvailable, match=r"needs torchtitan 0\.2\.2: pip install torchtitan==0"):
        lab.simulate(SMALL, lab.Training(dp=8, stack="torchtitan"), "H100-80GB")
    assert lab.estimate(SMALL, lab.Training(dp=8, stack="torchtitan"), "H100-80GB").peak_allocated


def test_another_release_is_refused(monkeypatch):
    monkeypatch.setattr(stacks, "find_spec", lambda name: object())
    monkeypatch.setattr(stacks.metadata, "version", lambda name: "0.3.0")
    with pytest.raises(lab.NotAvailable, match=r"known of 0\.2\.2, and 0\.3\.0 is installed"):
        lab.simulate(SMALL, lab.Training(dp=8, stack="torchtitan"), "H100-80GB")

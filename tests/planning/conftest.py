"""A tiny Llama, and a plan for it on four A100s, which is searched and simulated once."""

from concurrent.futures import ThreadPoolExecutor

import pytest

import llmlab as lab


@pytest.fixture(scope="session")
def llama():
    return {
        "model_type": "llama", "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    }  # fmt: skip


@pytest.fixture(scope="session")
def tiny(llama):
    with ThreadPoolExecutor(1) as one:
        return lab.plan(llama, "4xA100-80GB", 16, fixed={"seq_len": 128, "pp": 1}, tokens=10**9, executor=one)

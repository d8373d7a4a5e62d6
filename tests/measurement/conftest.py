"""Small models of the two families the book uses, on one thread: tests run beside each other on few cores."""

import pytest

GPT2 = {
    "model_type": "gpt2", "n_layer": 3, "n_embd": 64, "n_head": 4, "n_positions": 128, "vocab_size": 1000,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
LLAMA = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1000, "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def every_test_on_one_thread(one_thread):
    pass


@pytest.fixture(scope="session")
def gpt2():
    return GPT2


@pytest.fixture(scope="session")
def llama():
    return LLAMA

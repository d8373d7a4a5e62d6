"""The T4 rows by the code of the libraries that they ran, and the orders in which threads load."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import llmlab as lab
from benchmarks.memory.past_releases import FAMILIES, WORKERS, read_ahead, rotary_products
from llmlab.base.units import MiB

TINY_LLAMA = "TinyLlama/TinyLlama-1.1B-Chat-v1.0"


@pytest.mark.parametrize(("quantization", "attention", "seq_len"), [(None, "efficient", 2048), ("nf4", "eager", 512)])
def test_with_the_angles_as_the_rows_computed_them_reserved_is_a_measured_figure(quantization, attention, seq_len):
    asked = (quantization, attention, seq_len)
    rows = [row for row in lab.records(TINY_LLAMA, gpu="T4", source="published")
            if (row.run.quantization, row.run.attention, row.run.seq_len) == asked]  # fmt: skip
    with rotary_products():
        simulated = lab.simulate(rows[0].model, rows[0].run, "T4")
    assert simulated.peak_reserved in [row.peak_reserved for row in rows]
    nearest = min(abs(simulated.peak_allocated - row.peak_allocated) for row in rows)
    assert nearest < MiB  # one of them is in whole MiB


@pytest.mark.parametrize("family", FAMILIES)
def test_the_product_gives_the_angles_that_are_computed_today(family):
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 50}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(family, **sizes, num_attention_heads=2, num_key_value_heads=1)
    )
    rotary, x, positions = model.model.rotary_emb, torch.zeros(2, 7, 32), torch.arange(14).view(2, 7)
    today = rotary(x, positions)
    with rotary_products():
        product = rotary(x, positions)
    for angles, expected in zip(product, today, strict=True):
        assert angles.shape == expected.shape and torch.allclose(angles, expected, atol=1e-5)


@given(st.lists(st.integers(1, 10**8), min_size=1, max_size=40), st.integers(0, 99))
def test_threads_read_in_order_and_ahead_of_what_is_taken_in(sizes, seed):
    order = list(read_ahead(sizes, seed))
    everything = list(range(len(sizes)))
    assert [index for index, done in order if not done] == [index for index, done in order if done] == everything
    assert all(order.index((index, False)) < order.index((index, True)) for index in everything)
    assert not any(done for _, done in order[: min(WORKERS, len(sizes))])
    assert order == list(read_ahead(sizes, seed))

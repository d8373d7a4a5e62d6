"""The formulas of the page on learning rates that carry over agree with the package."""

import pytest

import llmlab as lab
from llmlab.course.job import MODEL
from llmlab.formulas import newton_schulz

L, h, f, V, k, d = 16, 2048, 8192, 128_256, 8, 64


@pytest.mark.parametrize("r", [1, 2, 4, 8])
def test_parameters_of_a_narrower_model(r):
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    config = lab.model(MODEL).config
    narrow = lab.model({**config, **{name: config[name] // r for name in names}})
    assert narrow.parameters == L * (2 * h**2 + 2 * k * d * h + 3 * h * f) // r**2 + (V + 2 * L + 1) * h // r


def test_muon_needs_5_n_over_t_of_the_passes_and_one_and_a_half_for_the_job():
    n, T = 2048, 4096
    per_round = sum(2 * a * b * c for a, b, c in newton_schulz.products(n, n))
    assert newton_schulz.ITERATIONS * per_round / (6 * n * n * T) == 5 * n / T
    spec = lab.model(MODEL)
    assert newton_schulz.flop(spec) / (6 * spec.parameters * T) == pytest.approx(1.5, abs=0.05)

"""The sizes that the chapter on GPT derives by hand agree with the package."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import llmlab as lab
from llmlab.course.architectures.llama import Llama
from llmlab.course.job import GPU, MODEL, job


def parameters(V, h, L, a, k, d, f, heads=1):
    return heads * V * h + L * (2 * h * a * d + 2 * h * k * d + 3 * h * f + 2 * h) + h


def test_parameters_of_three_models():
    P, V, h, L = 1024, 50257, 768, 12
    assert V * h + P * h + L * (12 * h**2 + 13 * h) + 2 * h == 124_439_808 == lab.model("gpt2").parameters
    assert parameters(128_256, 2048, 16, 32, 8, 64, 8192) == 1_235_814_400 == lab.model(MODEL).parameters
    larger = lab.model("meta-llama/Llama-3.1-8B")
    assert parameters(128_256, 4096, 32, 32, 8, 128, 14_336, heads=2) == 8_030_261_248 == larger.parameters


def test_flops_of_a_forward_pass():
    L, h, a, k, d, f, V, S = 16, 2048, 32, 8, 64, 8192, 128_256, 1024
    weights = L * (2 * h * a * d + 2 * h * k * d + 3 * h * f) + V * h
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        Llama.from_spec(MODEL, "eager")(torch.zeros(1, S, dtype=torch.long))
    assert counter.get_total_flops() == pytest.approx(S * (2 * weights + L * 4 * S * a * d))


@pytest.mark.parametrize(("name", "kib"), [(MODEL, 32), ("meta-llama/Llama-3.1-8B", 128), ("gpt2", 36)])
def test_cache_per_token_in_16_bits(name, kib):
    assert 2 * lab.model(name).kv_elements_per_token == kib * 1024


def test_adamw_needs_twelve_bytes_per_parameter_without_gradients():
    N = lab.model(MODEL).parameters
    parts = lab.estimate(MODEL, job("02-memory-anatomy"), GPU).parts
    assert (parts["weights"], parts["optimizer"]) == (4 * N, 8 * N)

"""The sizes that the chapter on GPT derives by hand agree with the package."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from llmlab.course.architectures.llama import Llama
from llmlab.course.job import MODEL


def test_flops_of_a_forward_pass():
    L, h, a, k, d, f, V, S = 16, 2048, 32, 8, 64, 8192, 128_256, 1024
    weights = L * (2 * h * a * d + 2 * h * k * d + 3 * h * f) + V * h
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        Llama.from_spec(MODEL, "eager")(torch.zeros(1, S, dtype=torch.long))
    assert counter.get_total_flops() == pytest.approx(S * (2 * weights + L * 4 * S * a * d))

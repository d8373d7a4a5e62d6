"""The time of a linear layer whose weight is quantized."""

import pytest

from llmlab.base.errors import NotAvailable, SpecError
from llmlab.formulas.time.quantized_linear import linear_seconds


def test_four_bits_are_faster_until_the_product_is_bound_by_flop():
    def ratio(tokens, way, card="A100-80GB"):
        sixteen = linear_seconds(card, tokens, 4096, 4096)
        return linear_seconds(card, tokens, 4096, 4096, way, bits=4.5) / sixteen

    assert ratio(1, "fused") == pytest.approx(4.5 / 16, rel=0.01)
    assert ratio(4096, "fused") == 1
    assert 1.0 < ratio(4096, "unpacked") < 1.1 < ratio(1, "unpacked") < 2.3
    assert ratio(1, "w8a8") == pytest.approx(0.5, rel=0.01) and ratio(4096, "w8a8") == pytest.approx(0.5, rel=0.01)
    card = "T4"  # 65 TFLOP/s and 320 GB/s: 203 tokens
    sixteen = [linear_seconds(card, n, 8192, 8192) for n in (200, 240)]
    assert ratio(200, "fused", card) < 1 and sixteen[1] > sixteen[0] * 1.05


def test_a_card_without_the_units_is_said():
    with pytest.raises(NotAvailable, match="T4 has no units for bf16"):
        linear_seconds("T4", 1, 8, 8, dtype="bf16")
    with pytest.raises(SpecError, match="way='int8'"):
        linear_seconds("T4", 1, 8, 8, "int8")

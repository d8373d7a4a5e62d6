"""The roofline's two sides: time is bytes over bandwidth left of the ridge, FLOP over peak right of it."""

import pytest

import llmlab as lab
from llmlab.kernels.limits import limit


@pytest.mark.parametrize("name", ["T4", "A100-80GB", "H100-80GB"])
def test_the_ridge_divides_bytes_from_flop(name):
    card = lab.gpu(name)
    ridge = card.peak("fp32") / card.bandwidth
    below, above = limit(card, 1e9, 0.9e9 * ridge), limit(card, 1e9, 2e9 * ridge)
    assert below == (pytest.approx(1e9 / card.bandwidth), "bytes", pytest.approx(0.9 * ridge))
    assert above.by == "FLOP" and above.seconds == pytest.approx(2e9 / card.bandwidth)


def test_matrix_units_move_the_ridge():
    card = lab.gpu("A100")
    assert limit(card, 1e9, 1e11, "fp32").by == "FLOP" and limit(card, 1e9, 1e11, "bf16").by == "bytes"

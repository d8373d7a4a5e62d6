"""Balance and capacity of a mixture of experts that is trained here."""

import pytest
import torch

from llmlab.base.errors import SpecError
from llmlab.course.experiments.experts import build, evaluate, moe_layers, trained


@pytest.fixture(scope="module")
def models(one_thread):
    return {balance: trained(balance=balance, steps=100) for balance in (0.0, 0.03)}


def test_the_balancing_loss_evens_the_load_and_costs_little(models):
    uneven, even = evaluate(models[0.0]), evaluate(models[0.03])
    assert even.busiest < 0.9 * uneven.busiest
    assert even.loss == pytest.approx(uneven.loss, rel=0.06)
    for layer in even.load:
        assert sum(layer) == pytest.approx(len(layer))  # multiples of an equal share


def test_less_capacity_drops_more_and_costs_more(models):
    for llama in models.values():
        rows = [evaluate(llama, factor) for factor in (None, 2.0, 1.0, 0.5)]
        assert rows[0].dropped == 0
        assert [row.dropped for row in rows] == sorted(row.dropped for row in rows)
        assert [row.loss for row in rows] == sorted(row.loss for row in rows)
        assert rows[-1].dropped >= 0.5 - 1e-6  # half of all places cannot take more than half of the tokens
    assert evaluate(models[0.03], 1.0).dropped < evaluate(models[0.0], 1.0).dropped


def test_an_evaluation_does_not_change_the_model():
    llama = build(factor=1.5)
    before = [p.clone() for p in llama.parameters()]
    assert evaluate(llama, 0.5, batches=1).dropped > 0.4
    assert all(torch.equal(a, b) for a, b in zip(before, llama.parameters(), strict=True))
    assert [layer.factor for layer in moe_layers(llama)] == [1.5, 1.5]


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(SpecError, match="balance=-1"):
        trained(balance=-1)

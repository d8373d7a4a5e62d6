"""Balance and capacity of a mixture of experts that is trained here."""

import pytest
import torch

from llmlab.base.errors import SpecError
from llmlab.course.experiments.experts import build, layers_of, main, seen, trained


@pytest.fixture(scope="module")
def models(one_thread):
    return {balance: trained(balance=balance, steps=100) for balance in (0.0, 0.03)}


def test_the_balancing_loss_evens_the_load_and_costs_little(models):
    uneven, even = seen(models[0.0]), seen(models[0.03])
    assert even.busiest < 0.9 * uneven.busiest
    assert even.loss == pytest.approx(uneven.loss, rel=0.06)
    for layer in even.load:
        assert sum(layer) == pytest.approx(len(layer))  # multiples of an equal share


def test_less_capacity_drops_more_and_costs_more(models):
    for whole in models.values():
        found = [seen(whole, factor) for factor in (None, 2.0, 1.0, 0.5)]
        assert found[0].dropped == 0
        assert [s.dropped for s in found] == sorted(s.dropped for s in found)
        assert [s.loss for s in found] == sorted(s.loss for s in found)
        assert found[-1].dropped >= 0.5 - 1e-6  # half of all places cannot take more than half of the tokens
    assert seen(models[0.03], 1.0).dropped < seen(models[0.0], 1.0).dropped


def test_seeing_leaves_the_model_as_it_was():
    whole = build(factor=1.5)
    before = [p.clone() for p in whole.parameters()]
    assert seen(whole, 0.5, batches=1).dropped > 0.4
    assert all(torch.equal(a, b) for a, b in zip(before, whole.parameters(), strict=True))
    assert [layer.factor for layer in layers_of(whole)] == [1.5, 1.5]


def test_the_command_line(capsys):
    main(["--steps", "1"])
    assert len(capsys.readouterr().out.splitlines()) == 6
    with pytest.raises(SystemExit) as left:
        main(["--k", "9"])
    assert left.value.code == 2 and "give 1 to 8" in capsys.readouterr().err
    with pytest.raises(SpecError, match="balance=-1"):
        trained(balance=-1)

"""Four GPTs, three with a mistake: the stored losses order them as the chapter says, and a run can be repeated."""

import pytest
import torch

from llmlab.course.experiments import gpt_mistakes
from llmlab.course.experiments.gpt_mistakes import BYTES, MODELS, RATES, bigram_loss, build, curve, run, stored_curves
from llmlab.course.techniques.training_loop import Recipe


def test_the_stored_curves_separate_the_models():
    stored = stored_curves()
    ends = {name: [one[-1] for one in curves] for name, curves in stored["curves"].items()}
    assert list(ends) == list(MODELS) and all(len(losses) == 3 for losses in ends.values())
    assert max(ends["no mask"]) < 0.01
    assert max(ends["right"]) + 0.3 < min(ends["no positions"])
    assert max(ends["no positions"]) < stored["bigram"] < min(ends["attention over heads"])
    for name, losses in stored["rates"].items():  # the curves are those of the best rate
        assert len(losses) == len(RATES) and min(losses) == ends[name][0]


def test_a_run_trains_each_model_and_repeats_itself(monkeypatch):
    monkeypatch.setattr(gpt_mistakes, "RATES", RATES[:2])
    monkeypatch.setattr(gpt_mistakes, "Recipe", lambda *steps, **more: Recipe(*steps, **more | {"eval_batches": 1}))
    result = run(steps=1, seeds=1)
    assert result["steps"] == [0, 1] and list(result["curves"]) == list(MODELS)
    rate = RATES[result["rates"]["right"].index(min(result["rates"]["right"]))]
    assert [loss for _, loss in curve("right", 1, 0, rate)] == result["curves"]["right"][0]
    assert result["bigram"] == stored_curves()["bigram"]


def test_the_stored_run_starts_as_a_new_one_does():
    stored = stored_curves()["curves"]
    for name in MODELS:
        first = curve(name, 1, 0, RATES[0])[0][1]  # before the first step
        assert first == pytest.approx(stored[name][0][0], abs=2e-3)


def test_without_positions_the_embedding_stays_zero_and_one_that_starts_at_zero_learns():
    assert not build("no positions", 0).wpe.weight.requires_grad
    model = build("right", 0)
    model.wpe.weight.data.zero_()
    model(torch.arange(20)[None]).square().mean().backward()
    assert model.wpe.weight.grad[:20].abs().max() > 1e-6


def test_a_bigram_table_is_exact_where_the_next_token_is_certain():
    cycle = torch.arange(3000) % 3
    assert bigram_loss(cycle, cycle, BYTES) < 0.01

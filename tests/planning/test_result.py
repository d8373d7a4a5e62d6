"""A plan's answer."""

from concurrent.futures import ThreadPoolExecutor

import pytest

import llmlab as lab
from llmlab.planning.confirm import NotSimulated
from llmlab.planning.machines import machines
from llmlab.planning.search import LATE
from llmlab.planning.space import Question, shapes, shares


def test_the_fastest_is_first_and_the_others_say_why_not(tiny):
    seconds = [candidate.report.step_seconds for candidate in tiny]
    assert seconds == sorted(seconds)
    assert tiny.best.lost == "" and all(candidate.lost for candidate in tiny[1:])
    assert tiny.best.days(10**9) == pytest.approx(10**9 / tiny.best.report.tokens_per_second / 86_400)


def test_the_cheapest_plan_has_one_run_of_each_number_of_a_card(llama):
    with ThreadPoolExecutor(1) as one:
        plan = lab.plan(llama, "2xT4", 16, goal="cheapest", fixed={"seq_len": 128, "compile": False}, executor=one)
    assert plan.gpus == "any GPU with a price, up to 2"
    machines_ = [str(each.machines) for each in plan]
    assert len(set(machines_)) == len(machines_) and len({each.machines.gpu.name for each in plan}) > 1
    prices = [each.usd_per_billion_tokens for each in plan]
    assert prices == sorted(prices) and plan[1].lost
    assert "GPUs" in str(plan)


@pytest.mark.parametrize(("gpus", "within"), [("T4", None), ("H100-80GB", None), ("H100-80GB", 25)])
def test_every_candidate_is_counted_once(gpus, within):
    model, fixed = lab.model("meta-llama/Llama-3.2-1B"), {"seq_len": 2048}
    question, where = Question(model, 64, fixed=fixed), machines(gpus)
    every = sum(len(list(shares(question, where, shape["dp"]))) for shape in shapes(question, where))
    plan = lab.plan(model, gpus, 64, fixed=fixed, tokens=10**11, within=within, executor=NotSimulated("Not here."))
    assert plan.tried + plan.cut == every == 252
    assert bool(plan.cuts.get(LATE)) == bool(within)


def test_what_a_plan_is_made_of_is_shown_on_a_line():
    best = lab.plan("gpt2", "T4", 8, fixed={"seq_len": 512}, executor=NotSimulated("Not here.")).best
    for shown in map(repr, (best, best.machines, best.machines.gpu, best.report, lab.model("gpt2"))):
        assert "\n" not in shown and len(shown) < 200, shown

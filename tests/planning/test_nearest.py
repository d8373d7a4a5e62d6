"""The nearest question that has an answer."""

import llmlab as lab
from llmlab.planning.confirm import NotSimulated
from llmlab.planning.machines import machines
from llmlab.planning.nearest import fitting
from llmlab.planning.search import LATE
from llmlab.planning.space import Question


def test_where_nothing_fits_the_nearest_that_does_is_named():
    plan = lab.plan("meta-llama/Llama-3.1-8B", "T4", 8)
    assert not plan and plan.best is None
    directions = {each.direction: each for each in plan.nearest}
    assert set(directions) == {"More GPUs", "A GPU with more memory", "A smaller model", "Another method"}
    assert directions["More GPUs"].run.offload  # not even eight T4s hold it otherwise
    assert directions["Another method"].run.lora and str(directions["A smaller model"]).endswith("for 10^9 tokens).")
    for each in plan.nearest:
        assert each.report.outcome == "fits" and each.report.step_seconds
    assert directions["A GPU with more memory"].machines.gpu.memory > lab.gpu("T4").memory
    assert lab.model(directions["A smaller model"].model).parameters < lab.model("meta-llama/Llama-3.1-8B").parameters


def test_where_no_single_card_is_enough_more_of_a_larger_one_are():
    fixed = {"seq_len": 2048, "compile": False, "offload": None, "checkpointing": "full"}
    plan = lab.plan("meta-llama/Llama-3.1-70B", "T4", 16, fixed=fixed)
    directions = {each.direction: each.machines for each in plan.nearest}
    found = directions["More GPUs with more memory"]
    assert "A GPU with more memory" not in directions and found.total > 1 and found.gpu.memory > lab.gpu("T4").memory


def test_where_the_largest_card_is_too_small_no_smaller_one_is_searched(monkeypatch):
    asked = []

    def counted(question, where):
        asked.append(where)
        return fitting(question, where)

    monkeypatch.setattr("llmlab.planning.nearest.fitting", counted)
    whole = {"zero": 0, "tp": 1, "pp": 1}  # of a 70B on each GPU
    plan = lab.plan("meta-llama/Llama-3.1-70B", "T4", 8, fixed=whole, executor=NotSimulated("Not here."))
    assert {each.direction for each in plan.nearest} == {"A smaller model"}
    larger = [where.gpu for where in asked if where.gpu.name != "T4"]
    assert larger and all(card.memory > lab.gpu("B200").memory for card in larger)


def test_more_gpus_and_shorter_sequences_are_named_too():
    plan = lab.plan("meta-llama/Llama-3.1-8B", "H100-80GB", 8, fixed={"seq_len": 32768, "offload": None})
    directions = {each.direction: each for each in plan.nearest}
    more = directions["More GPUs"].machines
    question = Question(lab.model("meta-llama/Llama-3.1-8B"), 8, fixed={"seq_len": 32768, "offload": None})
    assert more.total > 1 and fitting(question, more)
    assert not fitting(question, machines(f"{more.total // 2}xH100-80GB"))
    adapters = lab.plan("meta-llama/Llama-3.1-8B", "T4", 8, method="qlora", fixed={"seq_len": 16384})
    shorter = next(each for each in adapters.nearest if each.direction == "Shorter sequences")
    assert shorter.run.seq_len < 16384 and shorter.run.seq_len * shorter.run.global_batch == 8 * 16384


def test_a_deadline_that_nobody_meets_is_said_with_the_fastest():
    plan = lab.plan("gpt2", "T4", 8, tokens=10**10, within=1.0)
    assert not plan and plan.problem.startswith("Nothing finishes within 1 day")
    more = next(each for each in plan.nearest if each.direction == "Another GPU")
    assert 10**10 / more.report.tokens_per_second <= 86_400 and plan.cuts[LATE] > 0

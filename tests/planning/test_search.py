"""The search yields what fits in exact order, and what its bounds cut would not have come first, or not have fitted."""

from dataclasses import replace
from itertools import islice

import pytest

import llmlab as lab
from llmlab.base.errors import SpecError
from llmlab.formulas.report import assessed
from llmlab.hardware.nodes import host_of
from llmlab.planning.files.write import program
from llmlab.planning.machines import machines, priced
from llmlab.planning.search import HOST, LARGER, STATES, Search
from llmlab.planning.space import Question, shapes, shares

HEADS = {
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 8,
    "num_attention_heads": 16, "num_key_value_heads": 8, "max_position_embeddings": 4096,
}  # fmt: skip
EXPERTS = {
    "model_type": "mixtral", "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 2048,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 4096,
    "num_local_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip


def everything(question, where):
    """Estimate every candidate of a question that a program runs, with no bound at all."""
    found = {}
    for shape in shapes(question, where):
        for share in shares(question, where, shape["dp"]):
            try:
                run = lab.Training(**{**shape, **share})
                if not question.stack.own_program:
                    program(question.spec, run)
                report, fit = assessed(question.spec, run, where.gpu, where.cluster)
            except SpecError:
                continue
            if fit.outcome != "out of memory":
                found[run] = report, fit
    return found


def value(question, where, report, fit):
    seconds = report.step_seconds or float("inf")
    if question.goal == "smallest":
        return fit.least
    return seconds if question.goal == "fastest" else seconds * where.usd_per_hour / 3600


def test_around_the_best_is_every_zero_stage_and_checkpointing_of_its_layout():
    where = machines("2xA100-80GB")
    search = Search(Question(lab.model("gpt2"), 4), [where])
    search.around(next(iter(search)))
    seen = {(each.run.zero, each.run.checkpointing) for each in search.seen}
    assert seen >= {(zero, kind) for zero in range(4) for kind in (None, "selective", "full")}


@pytest.mark.parametrize(
    ("model", "gpus", "asked"),
    [
        (HEADS, "2x2xA100-40GB", {"fixed": {"seq_len": 2048}}),
        (HEADS, "4xT4", {"fixed": {"seq_len": 1024, "compile": False}, "goal": "smallest"}),
        (HEADS, "4xT4", {"fixed": {"seq_len": 2048, "pp": 1}, "allow": frozenset({"optimizer", "kernels"})}),
        (EXPERTS, "4xH100-80GB", {"fixed": {"seq_len": 2048, "tp": 1}, "goal": "cheapest"}),
        (HEADS, "T4", {"fixed": {"seq_len": 4096}, "allow": frozenset({"seq_len"}), "method": "qlora"}),
        (HEADS, "4xH100-80GB", {"fixed": {"seq_len": 2048}, "stack": lab.Megatron()}),
        (HEADS, "4xH100-80GB", {"fixed": {"seq_len": 2048}, "stack": lab.Torchtitan()}),
    ],
)
def test_the_search_yields_what_a_search_of_everything_sorts(model, gpus, asked):
    where = machines(gpus)
    question = Question(lab.model(model), 8, **asked)
    search = Search(question, [where])
    found = list(islice(search, 60))
    known = everything(question, where)
    values = sorted(value(question, where, *each) for each in known.values())
    mine = [value(question, where, *known[each.run]) for each in found]
    assert mine == pytest.approx(values[: len(mine)])
    assert len(found) == 60 or len(found) + search.cuts[HOST] >= len(known)
    assert search.tried < len(known) or len(found) < 60


def test_what_memory_cut_would_not_have_fitted():
    where, question = machines("T4"), Question(lab.model("gpt2-medium"), 32, fixed={"offload": None})
    search = Search(question, [where])
    yielded = {found.run for found in search}
    assert search.cuts[LARGER] > 0 and not search.worse()
    assert yielded == set(everything(question, where))


def test_what_is_too_large_eager_is_asked_again_compiled():
    where = machines("A100-40GB")
    search, eager = Search(Question(lab.model("gpt2"), 32), [where]), lab.Training(32, 1024, "autocast-bf16")
    assert search._memory(eager, where) is None
    assert search._memory(replace(eager, compile=True), where)


def test_states_alone_cut_what_no_micro_batch_makes_fit():
    where, question = machines("T4"), Question(lab.model("meta-llama/Llama-3.1-8B"), 16)
    search = Search(question, [where])
    assert list(search) == [] and search.tried == 0
    assert search.cuts[STATES] > 0 and search.cuts[HOST] > 0
    assert not everything(replace(question, fixed={"offload": None}), where)
    host = host_of(where.gpu)
    assert 12 * question.spec.parameters > host.memory / host.gpus  # bytes of fp32 copies and two moments


def test_every_dimension_is_searched():
    spec = lab.model(EXPERTS)
    allow = frozenset({"optimizer", "precision", "kernels", "fp8", "lora", "seq_len"})
    where, question = machines("2x2xH100-80GB"), Question(spec, 4, allow=allow, fixed={"seq_len": 4096})
    candidates = [{**shape, **share} for shape in shapes(question, where)
                  for share in shares(question, where, shape["dp"])]  # fmt: skip
    varied = {name for name in lab.Training().to_dict() if len({repr(each.get(name)) for each in candidates}) > 1}
    assert varied == {
        "micro_batch", "seq_len", "precision", "optimizer", "checkpointing", "accumulation", "lora", "quantization",
        "zero", "dp", "tp", "pp", "cp", "ep", "dp_replicate", "sequence_parallel", "offload", "compile", "kernels",
        "fp8",
    }  # fmt: skip
    megatron = Question(lab.model(HEADS), 16, fixed={"seq_len": 2048}, stack=lab.Megatron())
    chunks = {shape["stack"].virtual_pipeline for shape in shapes(megatron, where)}
    assert chunks == {1, 2, 4}  # of 8 layers in 2 or 4 stages


def test_what_says_when_fsdp_reduces_is_fixed_or_left_alone():
    """Fixed, it leaves what FSDP shards with several micro-batches, and plain PyTorch's script runs that."""
    where, fixed = machines("4xA100-40GB"), {"seq_len": 2048, "sync_each_batch": False}
    found = list(islice(Search(Question(lab.model(HEADS), 8, fixed=fixed), [where]), 20))
    assert found and all(not each.run.sync_each_batch and each.run.accumulation > 1 for each in found)
    assert {program(lab.model(HEADS), each.run) for each in found} == {"train.py"}
    free = islice(Search(Question(lab.model(HEADS), 8, fixed={"seq_len": 2048}), [where]), 20)
    assert all(each.run.sync_each_batch for each in free)


def test_the_tokens_of_an_update_stay_as_they_are():
    question = Question(lab.model(HEADS), 16, allow=frozenset({"seq_len"}), fixed={"seq_len": 4096})
    for shape in shapes(question, machines("8xH100-80GB")):
        assert shape["micro_batch"] * shape["accumulation"] * shape["dp"] * shape["seq_len"] == 16 * 4096


def test_the_cheapest_is_asked_of_every_card_with_a_price():
    asked = list(priced(machines("2x8xT4")))
    cards = {there.gpu.name for there in asked}
    assert {"T4", "L4", "A100-40GB", "H100-80GB", "B200"} <= cards
    assert all(there.usd_per_hour for there in asked)
    assert {there.total for there in asked if there.gpu.name == "H100-80GB"} == {1, 2, 4, 8, 16}
    question = Question(lab.model(HEADS), 16, goal="cheapest", fixed={"seq_len": 2048, "pp": 1, "cp": 1})
    best = next(iter(Search(question, asked)))
    dollars = best.seconds * best.machines.usd_per_hour
    for there in asked:
        if there.gpu.name not in ("T4", "H100-80GB", best.machines.gpu.name):
            continue
        alone = next((found for found in Search(question, [there])), None)
        assert alone is None or alone.seconds is None or alone.seconds * there.usd_per_hour >= dollars * (1 - 1e-12)

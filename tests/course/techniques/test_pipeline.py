"""Schedules wait as long as their papers say, and a model cut into stages trains like the whole one."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from llmlab.base.errors import SpecError
from llmlab.course.architectures.llama import Llama
from llmlab.course.experiments.job import Job, tiny_llama
from llmlab.course.experiments.train import check, make_job, train
from llmlab.course.techniques import pipeline
from llmlab.course.techniques.pipeline_schedules import (
    SCHEDULES,
    Op,
    bubble,
    bubble_formula,
    dualpipe,
    in_flight,
    needs,
    schedule,
    times,
)
from llmlab.course.techniques.training_loop import next_token_loss
from llmlab.ranks.launch import RankFailed, launch
from llmlab.specs.run import Training

STEPS = 3
TWO_STAGES = Training(micro_batch=2, seq_len=64, accumulation=4, pp=2)
JOBS = {
    "gpipe": Job("pipeline", TWO_STAGES, steps=STEPS, schedule="gpipe"),
    "1f1b": Job("pipeline", TWO_STAGES, steps=STEPS),
    "interleaved": Job("pipeline", TWO_STAGES, steps=STEPS, schedule="interleaved", virtual_stages=2),
    "zero-bubble": Job("pipeline", TWO_STAGES, steps=STEPS, schedule="zero-bubble"),
    "torch 1f1b": Job("pipeline", TWO_STAGES, "torch", steps=STEPS),
    "torch zero-bubble": Job("pipeline", TWO_STAGES, "torch", steps=STEPS, schedule="zero-bubble"),
}


def gradients_of_stages(name):
    """Run in each rank: how far each schedule's gradients are from the whole model's, and tensors left behind."""
    torch.manual_seed(0)
    whole = Llama(tiny_llama())
    ids = torch.randint(384, (8, 16), generator=torch.Generator().manual_seed(1))
    next_token_loss(whole(ids), ids).backward()
    expected = {id(p): p.grad for p in whole.parameters()}
    virtual_stages = 2 if name == "interleaved" else 1
    stages = dist.get_world_size() * virtual_stages
    mine = {n: pipeline.Stage(whole, n, stages) for n in range(dist.get_rank(), stages, dist.get_world_size())}
    parameters = [p for stage in mine.values() for p in stage.parameters()]
    for parameter in parameters:
        parameter.grad = None
    plan = schedule(name, dist.get_world_size(), 4, virtual_stages)
    pipeline.run(plan, mine, list(ids.chunk(4)), next_token_loss, (2, 16, whole.spec.hidden))
    return max(((p.grad - expected[id(p)]).abs().max() / p.grad.abs().max()).item() for p in parameters)


def everything():
    found = {name: train(job) for name, job in JOBS.items()}
    return found | {f"gradients {name}": gradients_of_stages(name) for name in SCHEDULES}


@pytest.fixture(scope="module")
def ranks():
    return launch(everything, 2)


@pytest.fixture(scope="module")
def one():
    return launch(train, 1, Job("tensor_parallel", Training(micro_batch=8, seq_len=64), steps=STEPS))[0]


# ---- schedules

shapes = st.tuples(st.sampled_from(SCHEDULES), st.integers(1, 6), st.integers(1, 4), st.integers(2, 3))


def made(shape):
    """A schedule, with at least as many micro-batches as ranks; interleaved takes a multiple of the ranks."""
    name, ranks, times_ranks, virtual_stages = shape
    virtual_stages = virtual_stages if name == "interleaved" else 1
    extra = 0 if name == "interleaved" else times_ranks % 2
    return name, ranks, ranks * times_ranks + extra, virtual_stages


@given(shapes)
def test_every_forward_and_backward_runs_once_after_what_it_needs(shape):
    name, ranks, micro_batches, virtual_stages = made(shape)
    plan = schedule(name, ranks, micro_batches, virtual_stages)
    stages = ranks * virtual_stages
    kinds = "FBW" if name == "zero-bubble" else "FB"
    ops = [op for rank_ops in plan for op in rank_ops]
    assert sorted(ops) == sorted(Op(kind, s, m) for kind in kinds for s in range(stages) for m in range(micro_batches))
    assert all(op.stage % ranks == rank for rank, rank_ops in enumerate(plan) for op in rank_ops)
    ends = {span.op: span for span in times(plan)}
    assert all(ends[other].end <= span.start for span in ends.values() for other in needs(span.op, stages))


@given(shapes)
def test_the_bubble_is_what_the_paper_derives(shape):
    name, ranks, micro_batches, virtual_stages = made(shape)
    found = bubble(times(schedule(name, ranks, micro_batches, virtual_stages)))
    assert found == pytest.approx(bubble_formula(name, ranks, micro_batches, virtual_stages), abs=1e-9)


@given(shapes)
def test_1f1b_stores_a_micro_batch_for_each_rank_behind_and_gpipe_all(shape):
    name, ranks, micro_batches, virtual_stages = made(shape)
    most = in_flight(schedule(name, ranks, micro_batches, virtual_stages))
    if name == "gpipe":
        assert most == [micro_batches] * ranks
    elif name == "1f1b":
        assert most == [min(ranks - rank, micro_batches) for rank in range(ranks)]
    elif name == "zero-bubble":  # as much as 1F1B's first rank, on all: weight gradients keep their inputs
        assert most == [min(ranks, micro_batches)] * ranks
    else:  # arXiv 2104.04473, section 2.2.2: more than 1F1B's p, less than twice
        whole = ranks * (1 + (ranks - 1) / (ranks * virtual_stages)) + 1 / virtual_stages
        assert max(most) <= min(micro_batches, whole)


@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
@pytest.mark.parametrize("more", [0, 4])
def test_dualpipe_runs_each_pass_once_and_waits_less_than_zero_bubble(ranks, more):
    micro_batches = 2 * ranks + more
    plan = dualpipe(ranks, micro_batches)
    passes = [op for ops in plan for op in ops if op.kind != "W"]
    assert sorted(passes) == sorted(Op(k, s, n) for k in "FB" for s in range(ranks) for n in range(micro_batches))
    half = micro_batches // 2
    assert all(op.stage == (ranks - 1 - rank if op.micro_batch >= half else rank)
               for rank, ops in enumerate(plan) for op in ops)  # fmt: skip
    spans = times(plan)
    ends = {span.op: span for span in spans}
    assert all(ends[other].end <= span.start for span in spans for other in needs(span.op, ranks))
    assert max(span.end for span in spans) - 3 * micro_batches == ranks // 2 - 1
    assert bubble(spans) < bubble_formula("zero-bubble", ranks, micro_batches)
    assert in_flight(plan) == [ranks + 1] * ranks  # DeepSeek-V3, arXiv 2412.19437, table 2


@pytest.mark.parametrize("given_", [(3, 8), (4, 9), (4, 6)])
def test_dualpipe_refuses_odd_numbers_and_few_micro_batches(given_):
    with pytest.raises(SpecError, match="two micro-batches per rank"):
        dualpipe(*given_)


def test_recomputation_halves_the_gain_of_zero_bubble():
    once, again = (bubble(times(schedule("zero-bubble", 8, 16), 1, inputs, 1)) for inputs in (1, 2))
    assert once == pytest.approx(7 / (48 + 7)) and again == pytest.approx(14 / (64 + 14))


def test_sending_adds_to_the_bubble():
    plan = schedule("1f1b", 4, 8)
    assert bubble(times(plan, send=0.5)) > bubble(times(plan)) + 0.05


def test_a_schedule_that_waits_for_ever_is_refused():
    with pytest.raises(SpecError, match="deadlocks"):
        times([[Op("B", 0, 0), Op("F", 0, 0)]])


@pytest.mark.parametrize(
    ("given_", "words"),
    [
        (("dualpipe", 2, 4, 1), "gpipe, 1f1b, interleaved, zero-bubble"),
        (("1f1b", 0, 4, 1), "ranks=0 is not a whole number >= 1"),
        (("1f1b", 2, 4, 2), "virtual_stages=2 with 1f1b"),
        (("interleaved", 2, 4, 1), "2 or more stages"),
        (("interleaved", 4, 6, 2), "6 micro-batches are not a multiple of 4"),
    ],
)
def test_schedules_that_cannot_be_are_refused(given_, words):
    with pytest.raises(SpecError, match=words):
        schedule(*given_)


# ---- training on ranks


@pytest.mark.parametrize("name", SCHEDULES)
def test_gradients_are_those_of_the_whole_model_on_the_whole_batch(ranks, name):
    assert max(rank[f"gradients {name}"] for rank in ranks) < 1e-5


@pytest.mark.parametrize("name", JOBS)
def test_losses_are_those_of_one_process(ranks, one, name):
    assert ranks[-1][name]["losses"] == pytest.approx(one["losses"], abs=2e-5)
    assert ranks[0][name]["losses"] == [None] * STEPS  # the first rank never sees one


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
def test_each_rank_holds_its_stages_and_no_more(ranks, name):
    spec = tiny_llama()
    held_by_rank = [rank[name]["bytes"] for rank in ranks]
    assert sum(held["parameters"] for held in held_by_rank) == 4 * spec.parameters
    assert all(held["optimizer"] == 2 * held["parameters"] == 2 * held["gradients"] for held in held_by_rank)
    assert [rank[name]["bytes"] for rank in ranks] == [rank["torch " + name]["bytes"] for rank in ranks]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ranks": 5}, "pp=5 leaves a stage .* 4 layers; give pp=3 at most, or pp=4"),
        (
            {"ranks": 4, "schedule": "interleaved", "virtual_stages": 2},
            "pp=8 leaves a stage .*pp=4, virtual_stages=2",
        ),
        ({"micro_batches": 3}, "micro_batches=3 does not divide sequences=8"),
    ],
)
def test_what_cannot_be_cut_is_refused_before_any_process_starts(changes, words):
    with pytest.raises(SpecError, match=words):
        check(make_job(**{"experiment": "pipeline", "ranks": 2, "sequences": 8, "micro_batches": 4, **changes}))


def one_stage_raises():
    torch.manual_seed(0)
    whole = Llama(tiny_llama())
    stage = pipeline.Stage(whole, dist.get_rank(), 2)
    if dist.get_rank() == 1:
        stage.register_forward_hook(lambda *_: (_ for _ in ()).throw(ValueError("stage 1 broke")))
    ids = list(torch.zeros(4, 1, 8, dtype=torch.long))
    return pipeline.run(schedule("1f1b", 2, 4), {dist.get_rank(): stage}, ids, next_token_loss, (1, 8, 64))


def test_a_stage_that_raises_ends_the_pipeline_with_its_traceback():
    with pytest.raises(RankFailed, match="stage 1 broke") as failed:
        launch(one_stage_raises, 2)
    assert failed.value.rank == 1

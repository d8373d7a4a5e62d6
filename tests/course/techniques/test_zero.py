"""ZeRO (ours, FSDP2's and DeepSpeed's) gives data parallelism's losses and has the formula's bytes on each rank."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn

import llmlab as lab
from llmlab.base.errors import SpecError
from llmlab.course.architectures.gpt import GPT
from llmlab.course.experiments.job import tiny_gpt
from llmlab.course.experiments.train import formula, main, make_job, train
from llmlab.course.experiments.zero import knobs, over_the_step, persistence
from llmlab.course.techniques.zero import Zero
from llmlab.ranks.launch import launch

STEPS = 20
LOSS = 2e-5  # nats: 20 steps of fp32 sums in another order
PARAMETERS = 4 * tiny_gpt().parameters  # bytes
RUNS = {
    "ddp": ("ddp", 0),
    "zero 1": ("scratch", 1),
    "zero 2": ("scratch", 2),
    "zero 3": ("scratch", 3),
    "fsdp": ("fsdp", 3),
}


class Odd(nn.Module):
    """Layers whose sizes no number of ranks divides; the last module is left to the rest of the model."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(5, 7), nn.Linear(7, 3), nn.Linear(3, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def odd_layers_and_two_micro_batches():
    """Run in each rank: parameters after three steps of two micro-batches, by stage, and those of one process."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    x = torch.randn(3, 2, 4 * ranks, 5, generator=torch.Generator().manual_seed(2))  # step, micro-batch, row, column
    found = {}
    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in x:
        (model(step.flatten(0, 1)) ** 2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = torch.cat([p.detach().flatten() for p in model.parameters()])
    for stage in (1, 2, 3):
        model = Odd()
        shared = Zero(model, [model.first, model.second], stage, torch.optim.AdamW, lr=0.01)
        for step in x:
            for micro_batch in step:
                shared.backward((model(micro_batch[4 * rank :][:4]) ** 2).mean() / 2)
            shared.step()
        held = shared.parameter_bytes()
        if stage == 3:
            for unit in shared.units:
                unit.gather()
        flat = torch.cat([p.detach().flatten() for p in model.parameters()])
        found[stage] = {"apart": (flat - whole).abs().max().item(), "held": held}
    return found


def a_layer_that_is_not_used():
    """Run in each rank: the error of each stage."""
    found = {}
    for stage in (1, 2, 3):
        model = Odd()
        shared = Zero(model, [model.first, model.second], stage, torch.optim.AdamW, lr=0.01)
        shared.backward(model.second(torch.tanh(model.first(torch.ones(2, 5)))).mean())
        try:
            shared.step()
        except RuntimeError as error:
            found[stage] = str(error)
    return found


def job(ranks, engine, stage, steps):
    return make_job("zero", ranks, 12, engine=engine, stage=stage, steps=steps)


def everything(runs, steps):
    ranks = dist.get_world_size()
    found = {name: train(job(ranks, engine, stage, steps)) for name, (engine, stage) in runs.items()}
    odd, unused = odd_layers_and_two_micro_batches(), a_layer_that_is_not_used()
    return {**found, "odd": odd, "unused": unused, "most": over_the_step()}


def deepspeed_stages(steps):
    found = {str(stage): train(job(2, "deepspeed", stage, steps)) for stage in (0, 1, 2, 3)}
    return {**found, "persistence": {n: persistence(n) for n in (0, 100_000)}, "knobs": knobs()}


@pytest.fixture(scope="module")
def two():
    return launch(everything, 2, RUNS, STEPS)


@pytest.fixture(scope="module")
def three():
    return launch(everything, 3, {name: RUNS[name] for name in ("zero 1", "zero 3")}, STEPS)


@pytest.fixture(scope="module")
def deepspeed():
    pytest.importorskip("deepspeed", reason="the distributed extra")
    return launch(deepspeed_stages, 2, STEPS, patience=60)


def worst(found, other):
    assert len(found["losses"]) == len(other["losses"]) == STEPS
    return max(abs(a - b) for a, b in zip(found["losses"], other["losses"], strict=True))


def bytes_of(stage, ranks):
    return formula(lab.Training(dp=ranks, zero=stage))


@pytest.mark.parametrize("name", ["zero 1", "zero 2", "zero 3"])
def test_losses_are_ddps_bit_for_bit_on_two_ranks(two, name):
    assert two[0][name]["losses"] == two[0]["ddp"]["losses"]


def test_losses_do_not_depend_on_the_number_of_ranks(two, three):
    assert worst(three[0]["zero 3"], two[0]["ddp"]) < LOSS
    assert worst(three[0]["zero 1"], two[0]["ddp"]) < LOSS
    assert two[0]["ddp"]["losses"][-1] < two[0]["ddp"]["losses"][0] - 0.5, "it learns"


def test_fsdp_gives_ddps_losses_and_holds_what_our_stage_3_holds(two):
    assert worst(two[0]["fsdp"], two[0]["ddp"]) < LOSS
    for rank in two:
        assert rank["fsdp"]["bytes"] == rank["zero 3"]["bytes"]


@pytest.mark.parametrize("name", list(RUNS))
def test_every_rank_holds_the_bytes_of_the_formula(two, three, name):
    for ranks in (two, three):
        for rank in ranks:
            if name in rank:
                assert rank[name]["bytes"] == bytes_of(RUNS[name][1], len(ranks))


def test_stage_3_holds_one_block_and_no_other_beside_its_chunks(two):
    """Whole are the block at work and what lies around the blocks: the tied embedding begins and ends the model."""
    block = 4 * sum(p.numel() for p in GPT(tiny_gpt()).h[0].parameters())
    rest = PARAMETERS - 2 * block
    for rank in two:
        held = dict(rank["most"])
        assert held.pop("start") == held.pop("end") == PARAMETERS // 2
        assert list(held) == ["forward 0", "forward 1", "backward 1", "backward 0"]
        assert set(held.values()) == {PARAMETERS // 2 + block + rest}


@pytest.mark.parametrize(("name", "volume"), [("zero 1", 2), ("zero 2", 2), ("zero 3", 3)])
def test_stages_send_2_2_and_3_times_the_parameters(two, three, name, volume):
    """arXiv 1910.02054, section 7, where reduce-scatter and all-gather count as one Ψ each; a ring sends (N-1)/N."""
    for ranks in (two, three):
        n = len(ranks)
        for rank in ranks:
            if name in rank:
                assert rank[name]["sent"] * n == STEPS * volume * (n - 1) * PARAMETERS


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_padded_units_and_accumulated_gradients_give_one_process_parameters(two, three, stage):
    numbers = sum(p.numel() for p in Odd().parameters())
    for ranks in (two, three):
        for rank in ranks:
            found = rank["odd"][str(stage)]
            assert found["apart"] < 2e-6
            held = 4 * numbers / (len(ranks) if stage == 3 else 1)
            assert 0 <= found["held"] - held < 4 * 3 * len(ranks), "padding: below N elements a unit"


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_layer_without_gradients_is_named_and_not_passed_by(two, stage):
    """A unit is reduced when its last gradient comes: with one missing, the others would never be averaged."""
    for rank in two:
        assert rank["unused"][str(stage)].startswith("no gradient for parameters of shape [(1, 3), (1,)]")


def bytes_beyond_the_cut():
    """Of the parameter in the middle of the flat tensor: what lies past its middle, and what lies before."""
    start, middle = 0, PARAMETERS // 2
    for parameter in GPT(tiny_gpt()).parameters():
        end = start + parameter.nbytes
        if end > middle:
            return end - middle, middle - start
        start = end
    raise AssertionError("no parameter reaches the middle")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_gives_ddps_losses(two, deepspeed, stage):
    assert worst(deepspeed[0][str(stage)], two[0]["ddp"]) < LOSS


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_holds_the_bytes_of_the_formula_and_a_copy_of_what_it_steps(deepspeed, stage):
    """In fp32 too it keeps a flat copy of its chunk. At stage 1 it has dropped the gradients of others by its step.

    At stages 1 and 2 the parameter that the cut goes through has its gradient whole in memory on both sides.
    """
    for rank, found in enumerate(deepspeed):
        held = dict(found[str(stage)]["bytes"])
        assert held.pop("master") == (PARAMETERS // 2 if stage else 0)
        expected = bytes_of(stage, 2)
        if stage in (1, 2):
            expected["gradients"] = PARAMETERS // 2 + bytes_beyond_the_cut()[rank]
        assert held == expected


def test_deepspeeds_default_threshold_leaves_a_small_model_whole(deepspeed):
    """stage3_param_persistence_threshold counts a parameter's elements: of 78 144 here, in all."""
    for rank in deepspeed:
        assert rank["persistence"] == {"0": PARAMETERS // 2, "100000": PARAMETERS // 2 + PARAMETERS}
        assert rank["knobs"]["stage3_param_persistence_threshold"] == 100_000


@pytest.mark.parametrize("seed", [-1, 2**31, 1.5, True])
def test_a_seed_that_is_none_is_refused_before_any_process_starts(seed):
    with pytest.raises(SpecError, match="is not a whole number from 0 to 2147483647"):
        make_job("zero", 2, 12, seed=seed)


def test_a_stage_that_is_none_is_refused():
    with pytest.raises(SpecError, match="stage=4 is not one of 1, 2, 3"):
        Zero(nn.Linear(2, 2), [], 4, torch.optim.AdamW)


def test_the_program_prints_losses_and_bytes(capsys):
    main(["--ranks", "2", "--stage", "3", "--steps", "2", "--engine", "scratch", "--json"], "zero")
    data = json.loads(capsys.readouterr().out)
    assert len(data["losses"]) == 2 and data["losses"][1] < data["losses"][0]
    assert data["bytes"] == [data["formula"]] * 2

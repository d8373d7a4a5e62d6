"""Averaged gradients are those of one process on the whole batch, and DDP's; the ring sends what its formula says."""

import json

import pytest
import torch
import torch.distributed as dist
from torch import nn

import llmlab as lab
from llmlab.base.errors import SpecError
from llmlab.course.experiments import train
from llmlab.course.experiments.data_parallel import every_method, new_gpt, train_wrongly
from llmlab.course.experiments.job import Job
from llmlab.course.experiments.train import check, main, make_job
from llmlab.course.techniques.collectives import run_all
from llmlab.course.techniques.data_parallel import (
    Overlapped,
    ring_all_gather,
    ring_all_reduce,
    ring_reduce_scatter,
    same_model,
)
from llmlab.formulas.time.communication import bytes_sent
from llmlab.ranks.launch import launch

FP32 = 2e-5  # of the gradient's norm: sums of a few hundred fp32 numbers in another order, at 2^-24 each
SEQUENCES = 6


def ring_beside_gloo():
    """Run in each rank: our ring's sums and what it sent, for sizes that N does not divide, too."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    found = []
    for size in (1, 2, ranks, 12, 13, 1000):
        everyone = [torch.randn(size, generator=torch.Generator().manual_seed(100 * r + size)) for r in range(ranks)]
        whole = sum(everyone[1:], everyone[0].clone())
        reduced, scattered = everyone[rank].clone(), everyone[rank].clone()
        sent = ring_all_reduce(reduced)
        sent_half = ring_reduce_scatter(scattered)
        mine = scattered.tensor_split(ranks)[rank].clone()
        own_chunk = torch.allclose(mine, whole.tensor_split(ranks)[rank], atol=1e-5)
        theirs = torch.zeros(size)
        theirs.tensor_split(ranks)[rank].copy_(mine)
        ring_all_gather(theirs)
        found.append(
            {
                "size": size,
                "sent": sent,
                "sent_half": sent_half,
                "own_chunk": own_chunk,
                "right": torch.allclose(reduced, whole, atol=1e-5),
                "gathered": torch.equal(theirs, reduced),
                "values": reduced.tolist(),
            }
        )
    return found


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.forgotten = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.used(x)


def mistakes():
    """Run in each rank: the errors for a model that differs between ranks, and for one with an unused parameter."""
    rank, found = dist.get_rank(), {}
    try:
        same_model(nn.Linear(3, 4 + rank))
    except SpecError as error:
        found["shapes"] = str(error)
    torch.manual_seed(rank)  # otherwise each process would draw the same weights
    model = Unused()
    averaged = Overlapped(model, 0)
    found["start"] = model.used.weight.tolist()
    model(torch.ones(3)).sum().backward()
    try:
        averaged.wait()
    except RuntimeError as error:
        found["unused"] = str(error)
    try:
        Overlapped(model, -1)
    except SpecError as error:
        found["bucket"] = str(error)
    return found


def everything():
    return {
        "gradients": every_method(SEQUENCES),
        "ring": ring_beside_gloo(),
        "mistakes": mistakes(),
        "collectives": run_all(),
        "wrong": train_wrongly(SEQUENCES, 5),
    }


@pytest.fixture(scope="module")
def two():
    return launch(everything, 2)


@pytest.fixture(scope="module")
def three():
    return launch(everything, 3)


METHODS = ("naive", "hooks", "buckets", "one bucket")


@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_those_of_one_process_on_the_whole_batch(two, three, method):
    for rank in two + three:
        assert rank["gradients"][method]["whole"] < FP32
        assert rank["gradients"][method]["spread"] == 0.0, "the ranks' gradients are the same bits"


@pytest.mark.parametrize("method", METHODS)
def test_on_two_ranks_gradients_are_ddps_bit_for_bit(two, method):
    """a + b is b + a: with two ranks no order of summation differs."""
    assert all(rank["gradients"][method]["ddp"] for rank in two)


def test_on_three_ranks_the_same_bucket_gives_ddps_bits(three):
    """With more ranks an element's position in the message decides the order of its sum: with DDP's, DDP's bits."""
    for rank in three:
        assert rank["gradients"]["one bucket"]["ddp"] and rank["gradients"]["torch DDP"]["spread"] == 0.0
        assert not rank["gradients"]["hooks"]["ddp"], "other messages round otherwise"


def test_averaging_the_parameter_instead_of_its_gradient_is_caught(two, three):
    """It raises nothing and changes nothing: only the gradients show it."""
    for ranks in (two, three):
        wrong = [rank["gradients"]["the parameter"] for rank in ranks]
        assert all(found["unchanged"] for found in wrong)
        assert all(found["whole"] > 0.1 for found in wrong), "every rank has its own share's gradient"
        assert all(found["spread"] > 1e-3 for found in wrong)
        for rank in ranks:
            assert rank["wrong"]["losses"][-1] < rank["wrong"]["losses"][0] - 0.5, (
                "and the loss falls as if all was well"
            )
            assert min(rank["wrong"]["spreads"]) > 1e-3


def test_buckets_are_sent_during_backward_and_make_fewer_messages(two):
    parameters = len(list(new_gpt().parameters()))
    found = two[0]["gradients"]
    assert found["hooks"]["messages"] == parameters
    assert found["one bucket"]["messages"] == 1 < found["buckets"]["messages"] < parameters
    for method in ("hooks", "buckets", "one bucket"):
        assert found[method]["pending"] == found[method]["messages"], "none waits for wait()"


def test_no_sync_sends_once_what_two_micro_batches_added_up(two):
    for rank in two:
        found = rank["gradients"]["no_sync"]
        assert found["spread_before"] > 0, "nothing was averaged yet"
        assert found["messages"] == 1 and found["spread"] == 0.0 and found["whole"] < FP32


def test_the_ring_sends_2_n_minus_1_over_n_of_the_tensor(two, three):
    for ranks in (two, three):
        n = len(ranks)
        assert ranks[0]["gradients"]["naive"]["sent"] == pytest.approx(2 * (n - 1) / n, abs=1e-3)
        for rank in ranks:
            for found in rank["ring"]:
                if found["size"] % n == 0:
                    assert found["sent"] == bytes_sent("all-reduce", 4 * found["size"], n)
                    assert found["sent_half"] * 2 == found["sent"]
        for sizes in zip(*(rank["ring"] for rank in ranks), strict=True):  # where N does not divide: over all ranks
            assert sum(found["sent"] for found in sizes) == 2 * (n - 1) * sizes[0]["size"] * 4


def test_the_ring_gives_every_rank_the_same_sum(two, three):
    for ranks in (two, three):
        for rank in ranks:
            assert all(found["right"] and found["own_chunk"] and found["gathered"] for found in rank["ring"])
            assert [f["values"] for f in rank["ring"]] == [f["values"] for f in ranks[0]["ring"]]


def test_what_each_collective_leaves_where(two, three):
    """Rank r starts with 10^r (1, 2, ..., N): the digits show which rank each number comes from."""
    for ranks in (two, three):
        n = len(ranks)
        rows = [[10.0**r * (c + 1) for c in range(n)] for r in range(n)]
        columns = [list(column) for column in zip(*rows, strict=True)]
        sums, own = [sum(column) for column in columns], [rows[r][r] for r in range(n)]
        nothing = [None] * (n - 1)
        expected = {
            "broadcast": ([rows[0], *nothing], [rows[0]] * n),
            "reduce": (rows, [sums, *nothing]),
            "scatter": ([rows[0], *nothing], [[value] for value in rows[0]]),
            "gather": ([[value] for value in own], [own, *nothing]),
            "all-gather": ([[value] for value in own], [own] * n),
            "reduce-scatter": (rows, [[value] for value in sums]),
            "all-reduce": (rows, [sums] * n),
            "all-to-all": (rows, columns),
        }
        for rank in ranks:
            assert rank["collectives"] == {name: list(pair) for name, pair in expected.items()}


def test_mistakes_raise_instead_of_hanging(two):
    for rank in two:
        found = rank["mistakes"]
        assert "weight is ((4, 3), 'torch.float32') on rank 0 and ((5, 3), 'torch.float32')" in found["shapes"]
        assert "forgotten.bias, forgotten.weight" in found["unused"] and "used.weight" not in found["unused"].split()
        assert "bucket_bytes=-1" in found["bucket"]
    assert two[0]["mistakes"]["start"] == two[1]["mistakes"]["start"], "rank 0's weights are given to all"


def test_the_program_trains(capsys):
    main(["--ranks", "2", "--steps", "3", "--method", "naive", "--json"], "data_parallel")
    data = json.loads(capsys.readouterr().out)
    assert len(data["losses"]) == 3 and data["losses"][2] < data["losses"][0]
    assert data["bytes"][0] == data["bytes"][1] == data["formula"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"ranks": 0}, "ranks=0"),
        ({"ranks": 5}, "ranks=5 does not divide sequences=12"),
        ({"method": "magic"}, "method='magic'"),
        ({"engine": "horovod"}, "engine='horovod' is not one of scratch, ddp, fsdp, deepspeed"),
        ({"stage": 4}, "zero=4 is not one of 0, 1, 2, 3"),
        ({"stage": 1, "ranks": 1}, "nothing to share"),
    ],
)
def test_a_job_that_cannot_run_is_refused(arguments, named):
    with pytest.raises(SpecError, match=named):
        check(make_job(**{"experiment": "zero", "ranks": 2, "sequences": 12, **arguments}))


def test_a_stage_that_its_engine_does_not_have_is_refused():
    with pytest.raises(SpecError, match="stage=2 with engine='ddp': give one of its stages, 0"):
        check(Job("zero", lab.Training(seq_len=64, dp=2, zero=2), "ddp"))


@pytest.mark.parametrize("seq_len", [1, 65])
def test_a_sequence_that_the_model_has_no_positions_for_is_refused(seq_len):
    with pytest.raises(SpecError, match=f"seq_len={seq_len} is outside"):
        Job("zero", lab.Training(seq_len=seq_len))


def test_the_program_answers_a_bad_value_in_one_line(capsys, monkeypatch):
    monkeypatch.setattr(train, "launch", None)  # no process is started
    with pytest.raises(SystemExit) as ended:
        main(["--ranks", "5"], "data_parallel")
    assert ended.value.code == 2 and capsys.readouterr().err.count("\n") == 1

"""Pipeline stages as one rank of many: how many micro-batches are in flight, and what other ranks' stages would say."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, schedules

import llmlab as lab
from llmlab.base.errors import NotAvailable

CARD = "A100-40GB"
WIDTH, MICRO_BATCHES = 512, 8
ACTIVATION = WEIGHT = WIDTH * WIDTH * 4  # bytes: micro-batches of as many rows as a row has channels
WHOLE = MICRO_BATCHES * WIDTH, WIDTH


def stage(index, stages, **shapes):
    return PipelineStage(nn.Linear(WIDTH, WIDTH, bias=False).cuda(), index, stages, torch.device("cuda"), **shapes)


def loss(output, target):
    return (output - target).square().mean()


def peaks(sim, schedule, *inputs, **targets):
    """Bytes that a step takes at most, from the first, which makes the buffers, to the third."""
    found = []
    for _ in range(3):
        sim.reset_peak()
        before = sim.allocated
        schedule.step(*inputs, **targets)
        found.append(sim.peak_allocated - before)
    return found


@pytest.mark.parametrize(("name", "ranks", "in_flight"), [
    ("ScheduleGPipe", 2, MICRO_BATCHES), ("ScheduleGPipe", 4, MICRO_BATCHES), ("Schedule1F1B", 2, 2),
    ("Schedule1F1B", 4, 4),
])  # fmt: skip
def test_the_first_stage_holds_its_micro_batches_in_flight(name, ranks, in_flight):
    with lab.simulator(CARD, world_size=ranks) as sim:
        dist.init_process_group("nccl")
        schedule = getattr(schedules, name)(stage(0, ranks), MICRO_BATCHES, loss_fn=loss)
        x = torch.empty(WHOLE, device="cuda")
        before = sim.allocated
        _, *later = peaks(sim, schedule, x)
        # Outputs in flight and the newest gradient, which is added to that of the micro-batches before.
        assert later == [in_flight * ACTIVATION + WEIGHT] * 2
        buffers = MICRO_BATCHES * ACTIVATION  # for the gradients that the next stage sends
        workspaces = 2 * 8_519_680  # cuBLAS's, of forward's thread and of backward's
        assert sim.allocated - before == buffers + WEIGHT + workspaces
        assert not sim.notes


@pytest.mark.parametrize("name", [
    "ScheduleInterleaved1F1B", "ScheduleLoopedBFS", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble",
    "ScheduleDualPipeV",
])  # fmt: skip
def test_two_stages_of_one_rank_take_what_the_first_sends(name):
    first_and_last = "V" in name
    with lab.simulator(CARD, world_size=2) as sim:
        dist.init_process_group("nccl")
        own = [stage(0, 4), stage(3 if first_and_last else 2, 4)]
        schedule = getattr(schedules, name)(own, MICRO_BATCHES, loss_fn=loss)
        x = torch.empty(WHOLE, device="cuda")
        peaks(sim, schedule, x, **({"target": torch.empty_like(x), "losses": []} if first_and_last else {}))
        assert [each.grad.shape for held in own for each in held.submod.parameters()] == [(WIDTH, WIDTH)] * 2
        assert [note.code for note in sim.notes] == ["stage-shapes"]


def test_a_later_stage_s_inputs_are_said_or_refused():
    with lab.simulator(CARD, world_size=2) as sim:
        dist.init_process_group("nccl", rank=1, world_size=2)
        target = torch.empty(WHOLE, device="cuda")
        with pytest.raises(NotAvailable, match=r"stage 1 receives what stage 0.* input_args.*test_pipelining.py"):
            schedules.Schedule1F1B(stage(1, 2), MICRO_BATCHES, loss_fn=loss).step(target=target)
        shapes = {"input_args": torch.empty(WIDTH, WIDTH, device="meta")}
        said = schedules.Schedule1F1B(stage(1, 2, **shapes), MICRO_BATCHES, loss_fn=loss)
        losses = []
        said.step(target=target, losses=losses)
        assert len(losses) == MICRO_BATCHES and str(losses[0].item()) == "?"
        assert not sim.notes


def test_each_later_stage_of_1f1b_holds_one_micro_batch_less():
    layers, ranks, held = 6, 4, []
    for rank in range(ranks):
        with lab.simulator(CARD, world_size=ranks, rank=rank) as sim:
            dist.init_process_group("nccl")
            device = torch.device(f"cuda:{dist.get_rank() % torch.cuda.device_count()}")
            module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))).to(device)
            shapes = {"input_args": torch.empty(WIDTH, WIDTH, device="meta")}
            own = PipelineStage(module, dist.get_rank(), ranks, device, **shapes)
            x = torch.empty(WHOLE, device=device)
            last = {"target": x, "losses": []} if rank == ranks - 1 else {}
            schedule = schedules.Schedule1F1B(own, MICRO_BATCHES, loss_fn=loss)
            held.append(peaks(sim, schedule, *([] if rank else [x]), **last)[-1])
    assert held[0] - held[1] == held[1] - held[2] == layers * ACTIVATION
    assert held[3] < held[2]


def test_what_other_ranks_send_is_not_known():
    with lab.simulator(CARD, world_size=2):
        dist.init_process_group("nccl")
        dist.send_object_list(["mine"], dst=1)
        with pytest.raises(NotAvailable, match="recv_object_list"):
            dist.recv_object_list([None], src=1)
        with pytest.raises(NotAvailable, match="scatter_object_list"):
            dist.scatter_object_list([None], None, src=1)
        with pytest.raises(NotAvailable, match="recv of whole numbers"):
            dist.recv(torch.zeros(2, dtype=torch.int64), src=1)
        size = torch.zeros(1, dtype=torch.int64, device="cuda")
        dist.recv(size, src=1)
        assert not hasattr(size, "simulated_value")

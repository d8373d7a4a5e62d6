"""What a rank knows after a collective."""

import pytest
import torch
import torch.distributed as dist

import llmlab as lab

CARD, RANKS = "A100-40GB", 8
WIDTH, LAYERS = 256, 4  # tensors below 1 MiB, whose blocks are rounded to 512 B and no further


def test_collectives_give_shapes_and_this_rank_s_own_values():
    with lab.simulator(CARD, world_size=RANKS):
        dist.init_process_group("nccl")
        pair = dist.new_group([0, 1], backend="gloo")  # which would wait for rank 1
        assert (dist.get_rank(), dist.get_world_size(), dist.get_world_size(pair)) == (0, RANKS, 2)
        on_host, on_card = torch.ones(4), torch.ones(4, device="cuda")
        dist.all_reduce(on_host)
        assert on_host.tolist() == [RANKS] * 4
        dist.all_reduce(on_host, op=dist.ReduceOp.AVG)
        assert on_host.tolist() == [RANKS] * 4
        gathered = [torch.empty_like(on_card) for _ in range(RANKS)]
        dist.all_gather(gathered, on_card)
        objects, one = [None] * RANKS, [None]
        dist.all_gather_object(objects, {"loss": 2})
        assert objects == [{"loss": 2}] * RANKS
        dist.scatter_object_list(one, list(range(10, 10 + RANKS)), src=0)
        dist.broadcast_object_list(one, src=0)
        assert one == [10]
        dist.barrier()


def test_sizes_that_ranks_exchange_are_known():
    with lab.simulator(CARD, world_size=RANKS):
        dist.init_process_group("nccl")
        for device in ("cuda", "cpu"):
            mine = torch.tensor([5], device=device)
            gathered = [torch.zeros_like(mine) for _ in range(RANKS)]
            dist.all_gather(gathered, mine)
            assert [each.item() for each in gathered] == [5] * RANKS
            exchanged = torch.empty(RANKS, dtype=torch.long, device=device)
            dist.all_to_all_single(exchanged, torch.arange(RANKS, device=device))
            assert exchanged.tolist() == [0] * RANKS
            ragged = torch.empty(2 * RANKS, dtype=torch.long, device=device)
            sent = torch.arange(RANKS + 1, device=device)
            dist.all_to_all_single(ragged, sent, [2] * RANKS, [2, *[1] * (RANKS - 1)])
            assert ragged.tolist() == [0, 1] * RANKS
            for op, times in ((dist.ReduceOp.SUM, RANKS), (dist.ReduceOp.MAX, 1), (dist.ReduceOp.AVG, 1)):
                total = mine.clone()
                dist.all_reduce(total, op=op)
                assert total.tolist() == [5 * times]
            assert torch.zeros(int(total), device=device).shape == (5,)


def test_what_a_rank_does_not_know_is_unknown_after_a_collective():
    with lab.simulator(CARD, world_size=RANKS):
        dist.init_process_group("nccl")
        chosen = torch.rand(4, 5000, device="cuda").argmax(-1)[:1]
        gathered = [torch.zeros_like(chosen) for _ in range(RANKS)]
        dist.all_gather(gathered, chosen)
        assert str(gathered[3].item()) == "?"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_functional_collectives_of_known_values_too():
    from torch.distributed import _functional_collectives as functional

    with lab.simulator(CARD, world_size=RANKS):
        dist.init_process_group("nccl")
        sizes = torch.tensor([3, 5], device="cuda")
        assert functional.all_reduce(sizes, "sum", dist.group.WORLD).tolist() == [3 * RANKS, 5 * RANKS]
        assert functional.all_reduce(sizes, "max", dist.group.WORLD).tolist() == [3, 5]
        assert functional.all_gather_tensor(sizes, 0, dist.group.WORLD).tolist() == [3, 5] * RANKS
        each = torch.arange(RANKS, device="cuda") + 7
        assert functional.reduce_scatter_tensor(each, "avg", 0, dist.group.WORLD).tolist() == [7]
        assert functional.all_to_all_single(each, None, None, dist.group.WORLD).tolist() == [7] * RANKS


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_waiting_for_what_ranks_send_takes_no_memory():
    """wait_tensor returns the tensor that it is given (torch/csrc/distributed/c10d/Functional.cpp)."""
    from torch.distributed import _functional_collectives as functional

    with lab.simulator(CARD, world_size=RANKS) as sim:
        dist.init_process_group("nccl")
        mine = torch.empty(WIDTH * WIDTH, device="cuda")
        held = sim.allocated
        sim.reset_peak()
        everyone = functional.wait_tensor(functional.all_gather_tensor(mine, 0, dist.group.WORLD))
        assert everyone.numel() == RANKS * mine.numel()
        assert sim.peak_allocated - held == sim.allocated - held == RANKS * 4 * mine.numel()


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_collectives_in_one_call_run_one_by_one():
    """Megatron-LM's gradient buffers reduce and gather their buckets so."""
    with lab.simulator(CARD, world_size=RANKS) as sim:
        from torch.distributed import _coalescing_manager

        dist.init_process_group("nccl")
        whole, own = torch.arange(RANKS, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")
        floats, part = torch.ones(RANKS * 1024, device="cuda"), torch.empty(1024, device="cuda")
        peak = sim.peak_allocated
        with _coalescing_manager(async_ops=True) as manager:
            dist.reduce_scatter_tensor(part, floats, async_op=True)
        manager.wait()
        with _coalescing_manager() as manager:
            dist.all_gather_into_tensor(whole, own, async_op=True)
        assert whole.tolist() == [0] * RANKS
        assert sim.peak_allocated == peak

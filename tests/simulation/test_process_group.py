"""Scripts for several GPUs, run as rank 0 of many: what each engine holds a rank, and nothing left behind."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import llmlab as lab
from llmlab.base.errors import NotAvailable, SpecError

CARD, RANKS = "A100-40GB", 8
WIDTH, LAYERS = 256, 4  # tensors below 1 MiB, whose blocks are rounded to 512 B and no further
PARAMETERS = LAYERS * (WIDTH * WIDTH + WIDTH)
BLOCK = 512  # bytes that an allocation is rounded up to


def layers():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def train(model, steps=2):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(steps):
        loss = model(torch.randn(8, WIDTH, device="cuda")).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    del loss
    return optimizer


def sharded():
    model = layers()
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def workspaces():
    """Bytes that cuBLAS keeps, whatever the ranks: all that one process holds beside weights and two moments."""
    with lab.simulator(CARD) as sim:
        kept = train(layers().cuda())
        assert len(kept.state) == 2 * LAYERS
        return sim.allocated - 3 * 4 * PARAMETERS


def test_ddp_keeps_the_gradients_a_second_time_in_its_buckets():
    with lab.simulator(CARD) as sim:
        model = layers().cuda()
        kept = train(model)
        alone = sim.allocated
    with lab.simulator(CARD, world_size=RANKS) as sim:
        dist.init_process_group("nccl")
        rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(rank)
        model = DistributedDataParallel(layers().to(rank), device_ids=[rank])
        kept = train(model)
        together = sim.allocated
    assert len(kept.state) == 2 * LAYERS
    assert 4 * PARAMETERS <= together - alone < 4 * PARAMETERS + 20 * BLOCK


def test_ddp_leaves_a_layer_that_no_rank_uses_without_a_gradient():
    with lab.simulator(CARD, world_size=RANKS):
        dist.init_process_group("nccl")
        model = layers().cuda()
        unused = nn.Linear(8, 8, device="cuda")
        model.unused = unused
        model.forward = lambda x: nn.Sequential(*[layer for layer in model if layer is not unused])(x)
        kept = train(DistributedDataParallel(model, find_unused_parameters=True))
        assert unused.weight.grad is None and unused.weight not in kept.state
    assert len(kept.state) == 2 * LAYERS


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_fsdp_keeps_a_rank_its_share_of_weights_gradients_and_states(ranks):
    with lab.simulator(CARD, world_size=ranks) as sim:
        dist.init_process_group("nccl", device_id=torch.device("cuda:0"))
        model = sharded()
        loaded = sim.allocated
        kept = train(model)
        assert all(parameter.device_mesh.device_type == "cuda" for parameter in model.parameters())
        trained = sim.allocated
    tensors = 2 * LAYERS
    assert 0 <= loaded - 4 * PARAMETERS / ranks <= tensors * BLOCK
    assert abs(trained - workspaces() - 3 * loaded) <= 2 * tensors * BLOCK  # weights, and AdamW's two moments
    assert len(kept.state) == tensors


def test_fsdp_gathers_a_layer_at_a_time():
    peaks = {}
    for count in (4, 8):
        with lab.simulator(CARD, world_size=64) as sim:
            dist.init_process_group("nccl")
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))
            for layer in model:
                fully_shard(layer)
            fully_shard(model)
            kept = train(model)
            peaks[count] = sim.peak_allocated
    layer = 4 * (WIDTH * WIDTH + WIDTH)
    assert kept
    assert peaks[8] - peaks[4] < layer / 2  # whole, four layers more would be four layers more


def test_offloaded_shards_gradients_and_moments_are_on_the_host():
    with lab.simulator(CARD, world_size=2) as sim:
        dist.init_process_group("nccl")
        model = layers()
        assert sim.host_peak == 4 * PARAMETERS and sim.host_pinned == 0
        for layer in model:
            fully_shard(layer, offload_policy=CPUOffloadPolicy())
        kept = train(fully_shard(model, offload_policy=CPUOffloadPolicy()))
        shard, temporary = 4 * PARAMETERS // 2, 4 * WIDTH * WIDTH // 2
        assert len(kept.state) == 2 * LAYERS and sim.host_pinned == shard  # the weights: their sizes are powers of two
        # AdamW on the host updates one tensor after the other.
        assert 4 * shard < sim.host_peak <= 4 * shard + 3 * temporary
        assert sum(sim.host_lines.values()) == sim.host_peak


def test_a_script_with_fsdp_is_what_simulate_says_of_it():
    from transformers import AutoConfig, AutoModelForCausalLM

    spec = lab.model({**lab.model("HuggingFaceTB/SmolLM2-135M").config, "num_hidden_layers": 16})
    run = lab.Training(seq_len=256, zero=3, dp=RANKS)
    report = lab.simulate(spec, run, CARD)
    with lab.simulator(CARD, world_size=RANKS) as sim:
        dist.init_process_group()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**spec.config), attn_implementation="sdpa")
        for block in model.model.layers:
            fully_shard(block)
        fully_shard(model)
        model.to_empty(device="cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        ids = torch.randint(spec.vocab, (1, run.seq_len), device="cuda")
        for _ in range(2):
            sim.reset_peak()
            output = model(input_ids=ids, labels=ids, use_cache=False)
            output.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            output = None
    assert sim.peak_allocated == pytest.approx(report.peak_allocated, rel=0.003)  # blocks fall a little differently
    assert sim.peak_reserved == pytest.approx(report.peak_reserved, rel=0.01)


def test_accelerate_shards_with_its_own_launcher_s_environment():
    accelerate = pytest.importorskip("accelerate")
    plugin = {"fsdp_version": 2, "reshard_after_forward": True, "auto_wrap_policy": "size_based_wrap"}
    with lab.simulator(CARD, world_size=RANKS) as sim:
        sharding = accelerate.FullyShardedDataParallelPlugin(**plugin, min_num_params=1)
        accelerator = accelerate.Accelerator(fsdp_plugin=sharding)
        model = layers()
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
        assert accelerator.num_processes == RANKS
        accelerator.backward(model(torch.randn(8, WIDTH, device=accelerator.device)).pow(2).mean())
        optimizer.step()
        optimizer.zero_grad()
        held = sim.allocated
    assert abs(held - workspaces() - 3 * 4 * PARAMETERS / RANKS) <= 8 * LAYERS * BLOCK


def test_nccl_takes_memory_of_the_card_once_there_is_a_group():
    card = lab.gpu("A100-80GB")
    with lab.simulator(card, world_size=8):
        free, total = torch.cuda.mem_get_info()
        assert (free, total) == (card.room(), card.memory)
        dist.init_process_group("nccl")
        assert torch.cuda.mem_get_info() == (card.room(8), card.memory) and card.room() - card.room(8) == card.nccl
        with pytest.raises(torch.cuda.OutOfMemoryError, match=f"this process has {card.outside(8) / 2**30:.2f} GiB"):
            torch.empty(card.room(8) + 2**20, dtype=torch.uint8, device="cuda")


def test_a_second_group_can_follow_the_first():
    with lab.simulator(CARD, world_size=RANKS):
        for _ in range(2):
            dist.init_process_group("nccl")
            train(DistributedDataParallel(layers().cuda()), steps=1)
            dist.destroy_process_group()


def test_a_real_group_around_the_block_stays_what_it_is():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with lab.simulator(CARD) as sim:
            assert dist.get_backend() == "gloo"
            kept = torch.ones(4, device="cuda")
            assert sim.allocated == BLOCK and kept.is_cuda
        with pytest.raises(SpecError, match="before init_process_group"), lab.simulator(CARD, world_size=2):
            pass
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_of_the_group(fails):
    before = dict(os.environ)
    patched = [DistributedDataParallel.__init__, dist.init_process_group, dist.new_group, torch.UntypedStorage.resize_]
    try:
        with lab.simulator(CARD, world_size=RANKS):
            dist.init_process_group("nccl")
            train(sharded(), steps=1)
            if fails:
                raise RuntimeError("the script's own")
    except RuntimeError as error:
        assert fails and "own" in str(error)
    assert not dist.is_initialized()
    assert dict(os.environ) == before
    now = [DistributedDataParallel.__init__, dist.init_process_group, dist.new_group, torch.UntypedStorage.resize_]
    assert now == patched


def test_the_number_of_ranks_must_be_said():
    with lab.simulator(CARD), pytest.raises(NotAvailable, match=r"world_size=8.*test_process_group\.py"):
        dist.init_process_group("nccl")
    with pytest.raises(SpecError, match="world_size=0"), lab.simulator(CARD, world_size=0):
        pass
    with lab.simulator(CARD, world_size=4), pytest.raises(SpecError, match="rank=4 with world_size=4"):
        dist.init_process_group("nccl", rank=4, world_size=4)
    with lab.simulator(CARD):
        dist.init_process_group("nccl", rank=1, world_size=2)  # as a script without a launcher says it
        assert dist.get_rank() == 1


def test_tensor_parallel_linears_under_fsdp_leave_a_rank_an_eighth():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with lab.simulator(CARD, world_size=RANKS) as sim:
        dist.init_process_group("nccl")
        mesh = init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp", "tp"))
        model = nn.Sequential(nn.Linear(WIDTH, 512, bias=False), nn.ReLU(), nn.Linear(512, WIDTH, bias=False)).cuda()
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        assert sim.allocated == 4 * 2 * WIDTH * 512 // RANKS
        kept = train(model)
        forward_and_backward = 2 * lab.gpu(CARD).cublas_workspace
        assert 0 <= sim.allocated - 3 * 4 * 2 * WIDTH * 512 // RANKS - forward_and_backward <= 8 * BLOCK
    assert len(kept.state) == 2


def test_a_node_has_its_cards_and_this_process_the_first():
    with lab.simulator(CARD, world_size=16):
        assert torch.cuda.device_count() == torch.accelerator.device_count() == 8
        assert torch.cuda.get_device_properties(7).name == torch.cuda.get_device_properties(0).name
        with pytest.raises(torch.AcceleratorError, match="invalid device ordinal 8"):
            torch.cuda.get_device_properties(8)
        with pytest.raises(torch.AcceleratorError, match="invalid device ordinal 1"):
            torch.zeros(2, device="cuda:1")
    with lab.simulator(CARD):
        assert torch.cuda.device_count() == 1


def test_a_mesh_before_the_group_makes_one():
    from torch.distributed.device_mesh import init_device_mesh

    with lab.simulator(CARD, world_size=RANKS):
        assert init_device_mesh("cuda", (RANKS,)).size() == RANKS == dist.get_world_size()


def test_barriers_of_gloo_have_nobody_to_wait_for():
    with lab.simulator(CARD, world_size=RANKS):
        dist.init_process_group("nccl")
        dist.new_group(backend="gloo").monitored_barrier()
        dist.monitored_barrier()


def test_spawned_ranks_are_this_process():
    ranks = []

    def worker(rank, size):
        dist.init_process_group("nccl", rank=rank, world_size=size)
        ranks.append((rank, dist.get_world_size()))

    with lab.simulator(CARD, world_size=4):
        size = torch.cuda.device_count()
        torch.multiprocessing.spawn(worker, args=(size,), nprocs=size)
    assert ranks == [(0, 4)]


def test_weights_are_drawn_once_where_values_are_assumed():
    with lab.simulator(CARD, assume=1.0):
        weight = torch.empty(8, 8, device="cuda")
        assert nn.init.trunc_normal_(weight, std=0.02) is weight


def test_what_is_between_ranks_alone_is_refused():
    from torch.distributed import _symmetric_memory, rpc

    with lab.simulator(CARD, world_size=RANKS):
        dist.init_process_group("nccl")
        for call in (lambda: rpc.init_rpc("first"), lambda: _symmetric_memory.empty(4, device="cuda")):
            with pytest.raises(NotAvailable, match=r"needs other ranks.*test_process_group.py"):
                call()

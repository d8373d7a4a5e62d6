"""PyTorch's first FSDP on the simulated GPU: its own code, in bytes that can be computed by hand."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    CPUOffload,
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import llmlab as lab
from llmlab.base.errors import NotAvailable
from llmlab.ranks.launch import launch

CARD, RANKS, WIDTH, LAYERS = "A100-40GB", 8, 256, 4
LAYER = WIDTH * WIDTH + WIDTH  # 65 792, which 8 divides: no padding
# What stays beside the model: cuBLAS's workspaces of two threads, cuBLASLt's of forward's linears with a bias, and the
# zero that clip_grad_norm_ keeps (fully_sharded_data_parallel.py, _zero_scalar).
KEPT = 2 * lab.gpu(CARD).cublas_workspace + 2**20 + 512
FULL, GRAD_OP = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP


def layers(count=LAYERS):
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))


def wrapped(module, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return FullyShardedDataParallel(module, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **options)


def step(model, optimizer):
    loss = model(torch.randn(8, WIDTH, device="cuda")).pow(2).mean()
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def blocks(size):
    """Bytes of `size` in blocks of the allocator."""
    return -(-size // 512) * 512


def measured(world_size=RANKS, steps=2, count=LAYERS, **options):
    """Return what is held once it is loaded and between steps, and the peak of a step, less cuBLAS's workspaces."""
    with lab.simulator(CARD, world_size=world_size) as sim:
        dist.init_process_group("nccl")
        model = wrapped(layers(count), device_id=0, **options)
        loaded = sim.allocated
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(steps):
            sim.reset_peak()
            step(model, optimizer)
        return loaded, sim.allocated - KEPT, sim.peak_allocated - KEPT


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
def test_a_rank_holds_its_share_of_weights_and_states(strategy):
    loaded, trained, _ = measured(sharding_strategy=ShardingStrategy[strategy])
    share = blocks(4 * LAYER // RANKS)
    assert loaded == LAYERS * share
    assert trained == 3 * loaded  # fp32 weights and two moments; the gradients went with zero_grad


def test_a_hybrid_shards_in_a_node_alone():
    loaded, trained, _ = measured(16, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    assert loaded == LAYERS * blocks(4 * LAYER // 8) and trained == 3 * loaded


def test_original_parameters_keep_their_gradients_until_the_next_forward():
    """_flat_param.py, _reset_flat_param_grad_info_if_needed: zero_grad knows views, and they are of one gradient."""
    loaded, trained, _ = measured(use_orig_params=True)
    assert trained == 4 * loaded


def test_gathered_layers_stay_until_backward_where_they_are_not_resharded():
    grown = {}
    for strategy in (FULL, GRAD_OP):
        peaks = [measured(sharding_strategy=strategy, count=count)[2] for count in (LAYERS, 2 * LAYERS)]
        grown[strategy] = peaks[1] - peaks[0]
    assert abs(grown[FULL] - LAYERS * 3 * blocks(4 * LAYER // RANKS)) < 4 * LAYER  # two are whole, of 4 as of 8
    assert abs(grown[GRAD_OP] - grown[FULL] - LAYERS * 4 * LAYER) < 4 * LAYER


def test_layers_are_gathered_in_half_precision():
    half = MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)
    loaded, trained, peak = measured(mixed_precision=half)
    assert loaded == LAYERS * blocks(4 * LAYER // RANKS) and trained == 3 * loaded
    assert peak < measured()[2]


def test_padding_makes_a_flat_parameter_a_multiple_of_the_ranks():
    with lab.simulator(CARD, world_size=RANKS) as sim:
        dist.init_process_group("nccl")
        model = FullyShardedDataParallel(nn.Linear(1000, 1001, bias=False), device_id=0)
        assert model._handle.flat_param.numel() == 125_125
        model = FullyShardedDataParallel(nn.Linear(1000, 1001), device_id=0)
        assert model._handle.flat_param.numel() == 125_251  # an eighth of 1 002 001 and 7 more
        assert sim.allocated == blocks(4 * 125_125) + blocks(4 * 125_251)


def test_offloaded_shards_are_on_the_host():
    with lab.simulator(CARD, world_size=RANKS) as sim:
        dist.init_process_group("nccl")
        model = wrapped(layers(), cpu_offload=CPUOffload(True))
        assert sim.allocated == 0
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer)
        assert sim.allocated == KEPT
        assert all(state["exp_avg"].device.type == "cpu" for state in optimizer.state.values())


def test_models_on_meta_and_models_made_before_the_block():
    before = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))
    with lab.simulator(CARD, world_size=RANKS) as sim:
        dist.init_process_group("nccl")
        with torch.device("meta"):
            model = layers()
        to_card = lambda module: module.to_empty(device="cuda", recurse=False)  # noqa: E731
        model = wrapped(model, device_id=0, param_init_fn=to_card, sync_module_states=True)
        assert sim.allocated == LAYERS * blocks(4 * LAYER // RANKS)
        model = wrapped(before, device_id=torch.device("cuda", 0))
        assert model(torch.randn(8, WIDTH)).is_cuda and model.module[1].running_mean.is_cuda


def test_states_are_whole_or_a_share():
    with lab.simulator(CARD, world_size=RANKS) as sim, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("nccl")
        model = wrapped(layers(), device_id=0)
        step(model, torch.optim.AdamW(model.parameters()))
        held, whole = sim.allocated, LAYERS * (4 * WIDTH * WIDTH + 4 * WIDTH)
        state = model.state_dict()
        assert sim.allocated - held == whole and state["3.weight"].shape == (WIDTH, WIDTH)
        del state
        with FullyShardedDataParallel.summon_full_params(model):
            assert sim.allocated - held == whole and model.module[0].weight.shape == (WIDTH, WIDTH)
        assert sim.allocated == held
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            assert model.state_dict()["3.weight"].local_shards()[0].tensor.shape == (WIDTH // RANKS, WIDTH)
        with (
            FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT),
            pytest.raises(NotAvailable, match=r"SHARDED_STATE_DICT.*test_moving\.py"),
        ):
            model.state_dict()


def test_states_of_other_ranks_parameters_are_refused():
    with lab.simulator(CARD, world_size=RANKS), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group("nccl")
        model = wrapped(layers(), device_id=0, use_orig_params=True)
        optimizer = torch.optim.AdamW(model.parameters())
        step(model, optimizer)
        with pytest.raises(NotAvailable, match=r"save_only_model.*use_orig_params=False.*test_moving\.py"):
            FullyShardedDataParallel.optim_state_dict(model, optimizer)


def test_a_note_says_that_a_slow_card_reserves_more():
    with lab.simulator(CARD, world_size=RANKS) as sim:
        dist.init_process_group("nccl")
        model = wrapped(layers(), device_id=0)
        assert not sim.notes
        step(model, torch.optim.AdamW(model.parameters()))
        assert [note.code for note in sim.notes] == ["record-stream"]


def held(model, optimizer):
    flat = [each._handle.flat_param for each in FullyShardedDataParallel.fsdp_modules(model) if each._handle]
    size = lambda tensors: sum(each.untyped_storage().nbytes() for each in tensors if each is not None)  # noqa: E731
    return {
        "weights": size(each._local_shard for each in flat),
        "gathered": size(each._full_param_padded for each in flat),
        "gradients": size(each.grad for each in flat),
        "states": size(v for state in optimizer.state.values() for v in state.values() if v.dim()),
        "padded": [each._padded_unsharded_size.numel() for each in flat],
    }


def course(device):
    """Return what a rank holds before and after each optimizer's step, of sizes that two ranks do not divide."""
    found = []
    for original in (False, True):
        for strategy in (FULL, GRAD_OP):
            model = nn.Sequential(*(nn.Linear(33, 33) for _ in range(3)))
            place = torch.device(device)
            model = wrapped(model, device_id=place, use_orig_params=original, sharding_strategy=strategy)
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(2):
                model(torch.randn(4, 33, device=device)).pow(2).mean().backward()
                found.append(held(model, optimizer))
                optimizer.step()
                optimizer.zero_grad()
                found.append(held(model, optimizer))
    return found


def test_a_simulated_rank_holds_what_a_real_one_does():
    real = launch(course, 2, "cpu")
    with lab.simulator(CARD, world_size=2):
        dist.init_process_group("nccl")
        assert course("cuda:0") == real[0]


def test_sharded_weights_are_initialized_on_the_card():

    with lab.simulator(CARD, world_size=4) as sim:
        dist.init_process_group("nccl")
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        model.to_empty(device="cuda")
        held = sim.allocated
        nn.init.kaiming_uniform_(model[0].weight)
        nn.init.uniform_(model[0].bias)
        nn.init.trunc_normal_(model[1].weight)
        assert sim.allocated == held
        model(torch.randn(2, 256, device="cuda")).sum().backward()
        assert model[1].weight.grad.to_local().shape == (64, 256)

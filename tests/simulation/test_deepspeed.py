"""DeepSpeed on the simulated GPU: its own engine, in bytes that can be computed by hand, beside real ranks."""

import subprocess
import sys

import pytest
import torch
from torch import nn

import llmlab as lab
from llmlab.base.errors import NotAvailable
from llmlab.ranks.launch import launch

pytest.importorskip("deepspeed")

CARD, RANKS, WIDTH, LAYERS = "A100-40GB", 8, 256, 4
MODEL = LAYERS * (WIDTH * WIDTH + WIDTH)  # 263 168 parameters, of which each rank has 32 896
SHARD = MODEL // RANKS
BUCKET = 100_000  # elements, as reduce_bucket_size
KEPT = 2 * lab.gpu(CARD).cublas_workspace + 2**20  # workspaces of cuBLAS, of two threads, and of cuBLASLt
SCALARS = 4 * 512  # FusedAdam's flag, the gradients' norm, ZeRO-3's flag of overflows: a block each
ROUNDED = 8 * 512  # what blocks are rounded up by


def layers():
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def started(stage, precision="bf16", optimizer=None, **zero):
    import deepspeed

    model = layers()
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=model.parameters(),
        config={
            "train_micro_batch_size_per_gpu": 8,
            precision: {"enabled": True},
            "gradient_clipping": 1.0,
            "optimizer": optimizer or {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": stage, "reduce_bucket_size": BUCKET, **zero},
        },
    )
    return engine


def step(engine):
    loss = engine(torch.randn(8, WIDTH, device="cuda", dtype=next(engine.parameters()).dtype)).pow(2).mean()
    engine.backward(loss)
    engine.step()


def measured(stage, *args, **zero):
    """Return bytes held once the engine is there and between steps, and a step's peak, less the workspaces."""
    with lab.simulator(CARD, world_size=RANKS) as sim:
        engine = started(stage, *args, **zero)
        loaded = sim.allocated
        for _ in range(3):
            sim.reset_peak()
            step(engine)
        assert engine.skipped_steps == 0
        return loaded, sim.allocated - KEPT, sim.peak_allocated - KEPT


def about(found, size, also=0):
    return 0 <= found - size <= SCALARS + ROUNDED + also


@pytest.mark.parametrize(("stage", "precision"), [(1, "bf16"), (2, "fp16")])
def test_zero_1_and_2_hold_half_precision_weights_and_a_share_of_the_states(stage, precision):
    loaded, trained, peak = measured(stage, precision)
    assert about(loaded, 2 * MODEL + 4 * SHARD)  # the flat weights, and an fp32 copy of a share
    assert about(trained, 2 * MODEL + 12 * SHARD)
    # The bucket, and what a rank keeps of the gradients until it steps: its share at stage 2, all at stage 1.
    gradients = 2 * (MODEL if stage == 1 else SHARD)
    assert peak - trained >= 2 * BUCKET + gradients


def test_overlap_takes_a_second_bucket():
    alone = measured(2)[2]
    assert 2 * BUCKET <= measured(2, overlap_comm=True)[2] - alone + 512 <= 2 * BUCKET + 2 * WIDTH * WIDTH


def test_zero_3_holds_a_share_and_the_layers_below_the_threshold():
    loaded, trained, _ = measured(3, stage3_param_persistence_threshold=0)
    share = 2 * SHARD + 4 * SHARD + 2 * SHARD  # half-precision weights, their fp32 copy, gradients
    assert about(loaded, 2 * BUCKET + share)
    assert about(trained, 2 * BUCKET + share + 8 * SHARD)
    persisting = measured(3, stage3_param_persistence_threshold=WIDTH * WIDTH + 1)[1]
    assert about(persisting, trained - SCALARS + 2 * MODEL)


def test_offloaded_states_are_on_the_host():
    cpu = {"device": "cpu", "pin_memory": True}
    loaded, trained, _ = measured(2, offload_optimizer=cpu)
    largest = 2 * WIDTH * WIDTH  # the buffer by which gradients go to the host
    assert about(loaded, 2 * MODEL + largest) and about(trained, 2 * MODEL + largest)
    threshold = {"stage3_param_persistence_threshold": 0}
    loaded, trained, _ = measured(3, offload_optimizer=cpu, offload_param=cpu, **threshold)
    assert about(loaded, 2 * BUCKET) and about(trained, 2 * BUCKET)


def test_weights_made_under_zero_init_are_shares_at_once():
    import deepspeed

    with lab.simulator(CARD, world_size=RANKS) as sim:
        with deepspeed.zero.Init(config_dict_or_path={"train_batch_size": RANKS, "zero_optimization": {"stage": 3},
                                                      "bf16": {"enabled": True}}):  # fmt: skip
            model = layers()
        assert about(sim.allocated, 2 * SHARD) and sim.peak_allocated < 2 * MODEL + ROUNDED
        assert [each.numel() for each in model.parameters()] == [0] * (2 * LAYERS)
        with deepspeed.zero.GatheredParameters(model[0].weight):
            assert model[0].weight.shape == (WIDTH, WIDTH)


def test_what_is_not_a_rank_of_zero_is_refused():
    import deepspeed

    with lab.simulator(CARD, world_size=RANKS):
        with pytest.raises(NotAvailable, match=r"compiled.*torch\.optim\.AdamW.*fused_lamb.*test_deepspeed\.py"):
            started(1, optimizer={"type": "Lamb", "params": {}})
        with pytest.raises(NotAvailable, match="Muon"):
            started(1, optimizer={"type": "Muon", "params": {}})
    with lab.simulator(CARD, world_size=RANKS):
        deepspeed.init_distributed()
        pipeline = deepspeed.PipelineModule([nn.Linear(8, 8)] * 2, num_stages=2, loss_fn=nn.MSELoss())
        with pytest.raises(NotAvailable, match="PipelineEngine"):
            deepspeed.initialize(model=pipeline, config={"train_batch_size": RANKS})


def test_nothing_is_left_of_the_card_or_the_group():
    import deepspeed

    before = deepspeed.comm.comm.cdb, deepspeed.ops.adam.fused_adam.FusedAdamBuilder, dict(vars(deepspeed.utils.groups))
    with lab.simulator(CARD, world_size=RANKS):
        started(2)
        assert deepspeed.get_accelerator().device_name() == "cuda"
    now = deepspeed.comm.comm.cdb, deepspeed.ops.adam.fused_adam.FusedAdamBuilder, dict(vars(deepspeed.utils.groups))
    assert now == before and not torch.distributed.is_initialized()


def test_a_later_simulation_knows_nothing_of_zero_3():
    llama = {"model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 172,
             "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}  # fmt: skip
    run = lab.Training(micro_batch=2, seq_len=64, precision="fp16", lora=lab.LoRA(rank=8))
    before, linear = lab.simulate(llama, run, CARD), nn.functional.linear
    with lab.simulator(CARD, world_size=RANKS):
        step(started(3))
    after = lab.simulate(llama, run, CARD)
    assert nn.functional.linear is linear
    assert (after.peak_allocated, after.flops) == (before.peak_allocated, before.flops)


def test_its_first_import_in_a_block_says_nothing():
    code = (
        "import llmlab as lab\n"
        "with lab.simulator('A100-40GB', world_size=2) as sim:\n"
        "    import deepspeed\n"
        "    assert deepspeed.get_accelerator().device_name() == 'cuda'\n"
        "assert deepspeed.get_accelerator().device_name() == 'cpu'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "accelerator" not in done.stderr.split("CPU. If")[0] and "cc:" not in done.stderr


# ---- beside real ranks


def held(engine, stage):
    optimizer = engine.optimizer
    size = lambda tensors: sum(each.numel() * each.element_size() for each in tensors)  # noqa: E731
    states = [value for state in optimizer.optimizer.state.values() for value in state.values()]
    found = {"states": size(each for each in states if isinstance(each, torch.Tensor) and each.dim())}
    if stage == 3:
        parameters = list(engine.module.parameters())
        return found | {
            "shards": size(each.ds_tensor for each in parameters),
            "whole": size(parameters),
            "masters": size(optimizer.fp32_partitioned_groups_flat),
            "gradients": size([optimizer.grad_partitions_flat_buffer]),
        }
    gradients = [each for group in optimizer.averaged_gradients.values() for each in group or ()]
    return found | {
        "flat": size(optimizer.bit16_groups_flat),
        "masters": size(optimizer.single_partition_of_fp32_groups),
        "gradients": size(each for each in gradients if each is not None),
    }


def course(device, stage):
    """Return what a rank holds around each step, with a model whose parameters two ranks do not divide."""
    import deepspeed

    model = nn.Sequential(*(nn.Linear(33, 33) for _ in range(3)))
    zero = {"stage": stage, "reduce_bucket_size": 2000, "stage3_param_persistence_threshold": 50}
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), foreach=True),
        config={"train_micro_batch_size_per_gpu": 4, "zero_optimization": zero, "zero_allow_untested_optimizer": True},
    )
    found = [held(engine, stage)]
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 33, device=device)).pow(2).mean())
        found.append(held(engine, stage))
        engine.step()
        found.append(held(engine, stage))
    return found


def real_course(stages):
    from llmlab.course.experiments.engines import quiet_deepspeed

    quiet_deepspeed()
    return [course("cpu", stage) for stage in stages]


def test_a_simulated_rank_holds_what_a_real_one_does():
    real = launch(real_course, 2, [1, 2, 3])[0]
    for stage, expected in zip((1, 2, 3), real, strict=True):
        with lab.simulator(CARD, world_size=2):
            assert course("cuda", stage) == expected, stage

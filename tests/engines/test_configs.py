"""The engines take the settings that a Training gives, and do what it says."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

import llmlab as lab
from llmlab.base.errors import SpecError
from llmlab.course.experiments.job import tiny_gpt
from llmlab.course.techniques.training_loop import next_token_loss
from llmlab.ranks.launch import launch

ids = torch.arange(2 * 2 * 16).view(4, 16) % 384


def with_deepspeed():
    """Run in each rank: what DeepSpeed made of each config, and whether a step works."""
    from llmlab.course.architectures.gpt import GPT
    from llmlab.course.experiments.engines import quiet_deepspeed

    quiet_deepspeed()
    import deepspeed

    found = {}
    for zero, precision in ((0, "fp32"), (1, "mixed-bf16"), (2, "autocast-bf16"), (3, "mixed-bf16")):
        run = lab.Training(micro_batch=2, accumulation=2, dp=2, zero=zero, precision=precision)
        model = GPT(tiny_gpt())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=run.to_deepspeed())
        for micro_batch in ids.split(2):
            loss = next_token_loss(engine(micro_batch), micro_batch)
            engine.backward(loss)
            engine.step()
        found[f"{zero} {precision}"] = {
            "batch": engine.train_batch_size(),
            "stage": engine.zero_optimization_stage(),
            "steps": engine.global_steps,
            "bf16": engine.bfloat16_enabled(),
            "clipping": engine.gradient_clipping(),
        }
    return found


def with_fsdp():
    """Run in each rank: dtypes that the blocks compute in, and what is held after a forward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from llmlab.course.architectures.gpt import GPT

    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),)), {}
    for zero in (2, 3):
        run = lab.Training(dp=2, zero=zero, precision="mixed-bf16")
        model, seen = GPT(tiny_gpt()), []
        for block in model.h:
            fully_shard(block, mesh=mesh, **run.to_fsdp())
            block.mlp.register_forward_hook(lambda m, _, y, seen=seen: seen.append(str(y.dtype)))
        fully_shard(model, mesh=mesh, **run.to_fsdp())
        loss = next_token_loss(model(ids), ids)
        whole = type(model.h[0].mlp.c_fc.weight).__name__ == "Parameter"
        loss.backward()
        found[str(zero)] = {"dtypes": sorted(set(seen)), "whole": whole, "shard": str(model.h[0].ln_1.weight.dtype)}
    return found


def through_accelerate():
    """Run in each rank: whether a block has sharded gradients, and whole ones, after each of two micro-batches."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, GradientAccumulationPlugin
    from torch.distributed.fsdp import fully_shard

    from llmlab.course.architectures.gpt import GPT

    found = {}
    for options in ({}, {"sync_each_batch": True}):
        plugin = GradientAccumulationPlugin(num_steps=2, **options)
        accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
        state = accelerator.state  # which on a CPU would have DDP
        state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, FullyShardedDataParallelPlugin(fsdp_version=2)
        model = GPT(tiny_gpt())
        for module in (*model.h, model):
            fully_shard(module, **lab.Training(dp=2, zero=3).to_fsdp())
        seen, block = [], model.h[0]
        for micro_batch in ids.split(2):
            with accelerator.accumulate(model):
                accelerator.backward(next_token_loss(model(micro_batch), micro_batch))
            sharded = {p.grad is not None for p in block.parameters()}
            block.unshard()
            whole = {p.grad is not None and p.grad.shape == p.shape for p in block.parameters()}
            block.reshard()
            seen.append([*sharded, *whole])
        found[str(plugin.sync_each_batch)] = seen
    return found


def test_accelerate_leaves_fsdps_gradients_whole_until_the_last_micro_batch():
    """What the readers take from it: unless sync_each_batch is set, which is not its default."""
    pytest.importorskip("accelerate", reason="the torch extra")
    for rank in launch(through_accelerate, 2, patience=60):
        assert rank == {"False": [[False, True], [True, False]], "True": [[True, False], [True, False]]}


def test_deepspeed_takes_the_config_and_batch_sizes_agree():
    pytest.importorskip("deepspeed", reason="the distributed extra")
    for rank in launch(with_deepspeed, 2, patience=60):
        for name, found in rank.items():
            stage, precision = name.split()
            assert found["stage"] == int(stage) and found["bf16"] == (precision == "mixed-bf16")
            assert found["batch"] == 2 * 2 * 2 and found["steps"] == 1  # two micro-batches are one step
            assert not found["clipping"]


@pytest.mark.parametrize(("said", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_fsdps_policy_reduces_in_the_runs_dtype(said, dtype):
    run = lab.Training(dp=2, zero=3, precision="mixed-bf16", reduce_dtype=said)
    assert run.to_fsdp()["mp_policy"].reduce_dtype == dtype


def test_fully_shard_takes_the_arguments():
    for rank in launch(with_fsdp, 2, patience=60):
        for found in rank.values():
            assert found["dtypes"] == ["torch.bfloat16"] and found["shard"] == "torch.float32"
        assert rank["2"]["whole"] and not rank["3"]["whole"]


SCRIPT = """
import json, pathlib
from accelerate import Accelerator
a = Accelerator(cpu=True)
said = json.dumps([a.num_processes, a.mixed_precision, str(a.distributed_type)])
pathlib.Path(f"rank-{a.process_index}.json").write_text(said)  # lines that two processes print can run into one
a.end_training()
"""


def test_accelerate_launch_reads_the_config(tmp_path):
    run = lab.Training(dp=2, precision="autocast-bf16")
    config = {**run.to_accelerate(), "use_cpu": True}  # tests run where no GPU is
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", "config.json", "script.py"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr
    said = [json.loads(path.read_text()) for path in tmp_path.glob("rank-*.json")]
    assert said == [[2, "bf16", "DistributedType.MULTI_CPU"]] * 2


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_accelerates_own_classes_know_every_key(zero):
    from accelerate.commands.config.config_args import ClusterConfig

    precision = "autocast-bf16" if zero == 0 else "mixed-bf16"
    config = lab.Training(dp=4, zero=zero, precision=precision).to_accelerate()
    given = ClusterConfig(**config)  # an unknown key raises
    assert given.num_processes == 4 and given.mixed_precision == "bf16"
    assert str(given.distributed_type).split(".")[-1] == ["MULTI_GPU", "DEEPSPEED", "DEEPSPEED", "FSDP"][zero]


def as_launched(run, tmp_path, monkeypatch):
    """Set what `accelerate launch` puts into the environment of the ranks that it starts with this run's config."""
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env

    (tmp_path / "config.json").write_text(json.dumps(run.to_accelerate()))
    given = launch_command_parser().parse_args(["--config_file", str(tmp_path / "config.json"), "script.py"])
    given, read, _ = _validate_launch_command(given)
    given.deepspeed_fields_from_accelerate_config = ",".join(read.deepspeed_config)
    made = prepare_deepspeed_cmd_env(given)[1] if given.use_deepspeed else prepare_multi_gpu_env(given)
    for name, value in made.items():
        monkeypatch.setenv(name, value)


def test_deepspeed_through_accelerate_clips_no_gradients_either(tmp_path, monkeypatch):
    """Accelerate fills an absent value with 1.0, and leaves 0.0 to DeepSpeed, whose default is 1.0."""
    from accelerate.utils import DeepSpeedPlugin

    run = lab.Training(dp=2, zero=2, accumulation=3, precision="mixed-bf16", offload="optimizer")
    as_launched(run, tmp_path, monkeypatch)
    plugin = DeepSpeedPlugin()
    plugin.fill_match("gradient_clipping", must_match=False, gradient_clipping=1.0)  # Accelerator.prepare does
    made = plugin.deepspeed_config
    assert made["gradient_clipping"] >= 1e9
    assert made["gradient_accumulation_steps"] == 3 and made["zero_optimization"]["stage"] == 2
    assert made["zero_optimization"]["offload_optimizer"]["device"] == "cpu"


@pytest.mark.parametrize(("checkpointing", "offload"), [(None, None), ("full", "optimizer+parameters")])
def test_accelerates_fsdp_is_what_the_run_says(checkpointing, offload, tmp_path, monkeypatch):
    from accelerate.utils import FullyShardedDataParallelPlugin

    run = lab.Training(dp=2, zero=3, precision="mixed-bf16", checkpointing=checkpointing, offload=offload)
    as_launched(run, tmp_path, monkeypatch)
    plugin = FullyShardedDataParallelPlugin()
    plugin.set_mixed_precision(os.environ["ACCELERATE_MIXED_PRECISION"])
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward
    assert plugin.activation_checkpointing == (checkpointing == "full")
    assert type(plugin.cpu_offload).__name__ == ("CPUOffloadPolicy" if offload else "OffloadPolicy")
    policy = plugin.mixed_precision_policy
    assert policy.param_dtype == policy.reduce_dtype == torch.bfloat16  # as the readers have it


@pytest.mark.parametrize(
    ("run", "method", "words"),
    [
        (lab.Training(tp=2), "to_deepspeed", "tp=2 with DeepSpeed"),
        (lab.Training(zero=3, dp=4, dp_replicate=2), "to_deepspeed", "dp_replicate=2 with DeepSpeed"),
        (lab.Training(zero=3, dp=4, dp_replicate=2), "to_accelerate", "dp_replicate=2 with Accelerate"),
        (lab.Training(precision="bf16"), "to_deepspeed", "precision='bf16'"),
        (lab.Training(offload="optimizer"), "to_deepspeed", "give zero >= 1"),
        (lab.Training(precision="mixed-bf16"), "to_accelerate", "zero=0: give fp32, autocast-fp16"),
        (lab.Training(pp=2), "to_accelerate", "pp=2 with Accelerate"),
        (lab.Training(zero=1, dp=2), "to_fsdp", "give zero=2 or 3"),
        (lab.Training(zero=3, dp=2, precision="autocast-bf16"), "to_fsdp", "under autocast"),
        (lab.Training(zero=3, dp=2, offload="optimizer"), "to_fsdp", "together"),
        (lab.Training(zero=3, dp=2, accumulation=2, sync_each_batch=False), "to_deepspeed", "sync_each_batch=False"),
        (lab.Training(zero=3, dp=2, precision="bf16", reduce_dtype="bf16"), "to_deepspeed", "reduce_dtype='bf16'"),
    ],
)
def test_what_an_engine_cannot_do_is_refused(run, method, words):
    with pytest.raises(SpecError, match=words):
        getattr(run, method)()

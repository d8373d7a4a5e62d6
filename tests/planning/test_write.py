"""The files of a run: whole or not at all, read by the tools that they are for, and true to the plan."""

import argparse
import errno
import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from torch.distributed import TCPStore

import llmlab as lab
from llmlab.base.compat import KNOWN
from llmlab.base.errors import SpecError
from llmlab.cli.main import cli
from llmlab.course.experiments.engines import quiet_deepspeed
from llmlab.engines.torchtitan import torchtitan_config
from llmlab.engines.tuners import axolotl_config, llama_factory_config
from llmlab.ranks.launch import new_process

TINY = {
    "model_type": "llama", "vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}  # fmt: skip
ADAPTERS = lab.LoRA(rank=4)
# Options of each tool that the files use, as its own code has them: Megatron-LM 0.20.0's parse_args and validate_args
# (commit d98e8a64), Axolotl 0.18.0's AxolotlConfigWCapabilities with LigerArgs (067b021c), LLaMA-Factory's
# get_train_args (ff6d4d12), SkyPilot 0.14.1's Task.from_yaml; some 1,000 written files went through these by hand.
MEGATRON = {
    "num-layers": int, "hidden-size": int, "ffn-hidden-size": int, "num-attention-heads": int, "seq-length": int,
    "max-position-embeddings": int, "micro-batch-size": int, "global-batch-size": int, "norm-epsilon": float,
    "tensor-model-parallel-size": int, "pipeline-model-parallel-size": int, "context-parallel-size": int,
    "optimizer": str, "clip-grad": float, "attention-backend": str, "recompute-granularity": str,
    "recompute-modules": str, "recompute-method": str, "recompute-num-layers": int, "num-query-groups": int,
    "normalization": str, "position-embedding-type": str, "rotary-base": int, "attention-dropout": float,
    "hidden-dropout": float, "make-vocab-size-divisible-by": int, "transformer-impl": str,
    "num-virtual-stages-per-pipeline-rank": int, "kv-channels": int, "rope-scaling-factor": float,
    "rotary-seq-len-interpolation-factor": int, "cross-entropy-fusion-impl": str,
}  # fmt: skip
MEGATRON_FLAGS = ("bf16", "fp16", "use-distributed-optimizer", "sequence-parallel", "swiglu", "disable-bias-linear",
                  "untie-embeddings-and-output-weights", "group-query-attention", "tp-comm-overlap",
                  "use-rope-scaling", "cross-entropy-loss-fusion", "overlap-grad-reduce",
                  "overlap-param-gather")  # fmt: skip
AXOLOTL = {
    "base_model", "sequence_len", "micro_batch_size", "gradient_accumulation_steps", "optimizer", "bf16",
    "fp16", "float16", "max_grad_norm", "gradient_checkpointing", "gradient_checkpointing_kwargs",
    "attn_implementation", "torch_compile", "output_dir", "adapter", "load_in_4bit", "load_in_8bit", "lora_r",
    "lora_alpha", "lora_dropout", "lora_target_modules", "lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel",
    "lora_embedding_kernel", "plugins", "liger_rope", "liger_rms_norm", "liger_glu_activation",
    "liger_fused_linear_cross_entropy", "deepspeed", "bnb_config_kwargs",
}
LLAMA_FACTORY = {
    "model_name_or_path", "stage", "finetuning_type", "cutoff_len", "flash_attn",
    "disable_gradient_checkpointing", "use_reentrant_gc", "enable_liger_kernel", "pure_bf16", "lora_rank",
    "lora_dropout", "lora_target", "lora_alpha", "quantization_bit", "double_quantization",
}  # fmt: skip; besides those of TrainingArguments


def written(folder, run, gpus="A100-80GB", model=TINY):
    return lab.write(model, run, gpus, folder)


def settings(folder, name):
    return yaml.safe_load((folder / name).read_text())


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_deepspeed_reads_its_settings_and_they_come_back(tmp_path, monkeypatch, stage):
    from deepspeed.runtime.config import DeepSpeedConfig

    run = lab.Training(micro_batch=2, accumulation=4, zero=stage, dp=2, precision="mixed-bf16", seq_len=64)
    written(tmp_path / "out", run, "2xA100-80GB")
    path = tmp_path / "out" / "ds_config.json"
    monkeypatch.setattr("deepspeed.comm.get_world_size", lambda *_: 2)  # of a group that no test needs to start
    monkeypatch.setattr("deepspeed.comm.get_rank", lambda *_: 0)
    read = DeepSpeedConfig(json.loads(path.read_text()))
    assert (read.train_batch_size, read.train_micro_batch_size_per_gpu, read.zero_config.stage) == (16, 2, stage)
    assert lab.Training.from_deepspeed(path, seq_len=64) == run


def test_accelerate_reads_its_settings_and_they_come_back(tmp_path):
    from accelerate.commands.config.config_args import load_config_from_file

    for zero in (0, 1, 3):
        run = lab.Training(zero=zero, dp=2, precision="mixed-bf16" if zero else "autocast-bf16", seq_len=64,
                           reduce_dtype="bf16" if zero == 3 else "fp32")  # fmt: skip
        written(tmp_path / str(zero), run, "2xA100-80GB")
        path = tmp_path / str(zero) / "accelerate.yaml"
        assert load_config_from_file(str(path)).num_processes == 2
        assert lab.Training.from_accelerate(path, seq_len=64) == run


@pytest.mark.parametrize("sync", [True, False])
def test_what_no_key_of_accelerates_says_is_written_beside_it(tmp_path, sync):
    """When FSDP reduces gradients is the plugin's of the script; torchtitan and DeepSpeed have no choice."""
    from accelerate.utils import GradientAccumulationPlugin

    run = lab.Training(dp=2, zero=3, precision="mixed-bf16", seq_len=64, accumulation=4, sync_each_batch=sync)
    assert torchtitan_config(replace(run, sync_each_batch=True), "meta-llama/Llama-3.1-8B")
    left_out = written(tmp_path / "out", run, "2xA100-80GB").left_out
    text = (tmp_path / "out" / "accelerate.yaml").read_text()
    said = text[text.index("GradientAccumulationPlugin(") : text.index(").\n", text.index("Plugin("))]
    plugin = eval(said, {"GradientAccumulationPlugin": GradientAccumulationPlugin})
    assert (plugin.num_steps, plugin.sync_each_batch) == (4, sync)
    assert ("sync_each_batch" in left_out.get("ds_config.json", "")) is not sync
    if not sync:
        with pytest.raises(SpecError, match="torchtitan has no sync_each_batch=False"):
            torchtitan_config(run, "meta-llama/Llama-3.1-8B")
        read = lab.Training.from_accelerate(tmp_path / "out" / "accelerate.yaml", seq_len=64, accumulation=4)
        assert read == replace(run, reduce_dtype="bf16")
        half = replace(run, sync_each_batch=True, reduce_dtype="bf16")
        with pytest.raises(SpecError, match="mixed_precision_reduce is float32"):
            torchtitan_config(half, "meta-llama/Llama-3.1-8B")


def test_megatrons_parser_takes_its_arguments(tmp_path):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    for name, kind in MEGATRON.items():
        parser.add_argument(f"--{name}", type=kind, nargs="+" if name == "recompute-modules" else None)
    for name in MEGATRON_FLAGS:
        parser.add_argument(f"--{name}", action="store_true")
    run = lab.Training(dp=2, tp=2, pp=2, zero=1, accumulation=4, precision="mixed-bf16", sequence_parallel=True,
                       stack=lab.Megatron(recompute="selective", tp_comm_overlap=True,
                                          cross_entropy_fusion_impl="native"))  # fmt: skip
    done = written(tmp_path / "out", run, "8xH100-80GB", "meta-llama/Llama-3.1-8B")
    lines = (tmp_path / "out" / "megatron_args.txt").read_text().splitlines()
    read = parser.parse_args(" ".join(line for line in lines if not line.startswith("#")).split())
    assert (read.global_batch_size, read.tensor_model_parallel_size, read.num_query_groups) == (8, 2, 8)
    assert read.use_distributed_optimizer and read.sequence_parallel and read.bf16 and read.tp_comm_overlap
    assert read.overlap_grad_reduce and read.overlap_param_gather
    assert read.cross_entropy_loss_fusion and read.cross_entropy_fusion_impl == "native"
    started = (tmp_path / "out" / "launch.sh").read_text()
    assert "train.py" in done.left_out and "megatron_args.txt" in started
    assert "--data " not in started  # train.py's; Megatron-LM has --data-path


@pytest.mark.parametrize("run", [
    lab.Training(precision="bf16", seq_len=64, lora=ADAPTERS, quantization="nf4", checkpointing="full"),
    lab.Training(precision="bf16", seq_len=64, optimizer="adafactor", kernels="liger"),
])  # fmt: skip
def test_axolotl_and_llama_factory_have_what_is_set(tmp_path, run):
    from dataclasses import fields

    from transformers import TrainingArguments

    written(tmp_path / "out", run)
    axolotl = settings(tmp_path / "out", "axolotl.yaml")
    assert set(axolotl) <= AXOLOTL and axolotl["bf16"] is True
    assert axolotl.get("lora_mlp_kernel") is (False if run.lora else None)  # left out they are on
    assert bool(axolotl.get("liger_rms_norm")) == (run.kernels == "liger")  # left out they are off
    others = {f.name for f in fields(TrainingArguments)} | {"do_train"}
    assert set(settings(tmp_path / "out", "llama_factory.yaml")) - others <= LLAMA_FACTORY


@pytest.mark.parametrize(("precision", "lora", "axolotl", "llama_factory"), [
    ("autocast-bf16", None, "the dtype that it casts to", {"bf16": True}),
    ("autocast-fp16", None, "the dtype that it casts to", {"fp16": True}),
    ("bf16", None, {"bf16": True}, {"pure_bf16": True}),
    ("fp16", None, {"float16": True, "fp16": False}, "fp32 weights under autocast"),
    ("autocast-bf16", ADAPTERS, "the dtype that it casts to", "a frozen model in half precision"),
    ("bf16", ADAPTERS, {"bf16": True}, {"pure_bf16": True, "bf16": False}),
    ("fp16", ADAPTERS, {"float16": True, "bf16": False}, {"fp16": True, "bf16": False}),
])  # fmt: skip
def test_the_weights_have_the_dtype_that_was_planned_or_it_is_said_why_not(
    tmp_path, precision, lora, axolotl, llama_factory
):
    """Axolotl's resolve_dtype loads weights in the dtype of bf16 and fp16; LLaMA-Factory's init_adapter makes trained
    weights fp32 unless pure_bf16 is set, and frozen ones half."""
    done = written(tmp_path / "out", lab.Training(precision=precision, seq_len=64, lora=lora))
    for name, said in (("axolotl.yaml", axolotl), ("llama_factory.yaml", llama_factory)):
        if isinstance(said, str):
            assert said in done.left_out[name]
        else:
            assert said.items() <= settings(tmp_path / "out", name).items()


def test_axolotl_and_llama_factory_quantize_scales_and_keep_layers_in_half_as_planned(tmp_path):
    """Axolotl quantizes the scales unless bnb_config_kwargs says otherwise (src/axolotl/loaders/model.py)."""
    run = lab.Training(precision="autocast-bf16", seq_len=64, lora=ADAPTERS, quantization="nf4", half_layers="all")
    for double in (False, True):
        written(tmp_path / str(double), replace(run, double_quant=double))
        axolotl = settings(tmp_path / str(double), "axolotl.yaml")
        assert axolotl["bnb_config_kwargs"] == {"bnb_4bit_use_double_quant": double} and axolotl["bf16"] is True
        llama_factory = settings(tmp_path / str(double), "llama_factory.yaml")
        assert llama_factory["double_quantization"] is double and "pure_bf16" not in llama_factory
    norms_in_fp32 = replace(run, half_layers="embeddings")
    assert llama_factory_config(norms_in_fp32, "m")["upcast_layernorm"] is True
    with pytest.raises(SpecError, match="half_layers='all'"):
        axolotl_config(norms_in_fp32, "m")


def test_megatrons_arguments_stretch_positions_and_name_heads_of_another_width(tmp_path):
    run = lab.Training(precision="mixed-bf16", seq_len=64)
    stretched = {"rope_scaling": {"rope_type": "llama3", "factor": 32.0}}
    for config, said in (
        (stretched, {"--use-rope-scaling", "--rope-scaling-factor 32.0"}),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, {"--rotary-seq-len-interpolation-factor 4"}),
        ({"model_type": "mistral", "head_dim": 32}, {"--kv-channels 32"}),
    ):
        folder = tmp_path / next(iter(said))
        written(folder, run, model=TINY | config)
        assert said <= set((folder / "megatron_args.txt").read_text().splitlines())
    for config in ({"attention_bias": True}, {"model_type": "mistral", "sliding_window": 32},
                   {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}):  # fmt: skip
        done = lab.write(TINY | config, run, "A100-80GB", tmp_path / "none", force=True)
        assert "not among the arguments" in done.left_out["megatron_args.txt"]


def test_megatrons_arguments_name_the_experts(tmp_path):
    """As examples/mixtral/train_mixtral_8x7b_distributed.sh has them."""
    run = lab.Training(dp=8, ep=8, pp=2, zero=1, accumulation=4, precision="mixed-bf16", checkpointing="full")
    written(tmp_path / "out", run, "2x8xH100-80GB", "mistralai/Mixtral-8x7B-v0.1")
    said = (tmp_path / "out" / "megatron_args.txt").read_text()
    assert {"--num-experts 8", "--moe-router-topk 2", "--expert-model-parallel-size 8"} <= set(said.splitlines())
    selective = replace(run, checkpointing="selective")
    with pytest.raises(SpecError, match="recomputes less, attention's core alone"):
        written(tmp_path / "selective", selective, "2x8xH100-80GB", "mistralai/Mixtral-8x7B-v0.1")


def test_torchtitans_job_config_comes_back(tmp_path):
    run = lab.Training(dp=4, tp=2, micro_batch=2, accumulation=2, seq_len=4096, compile=True,
                       stack="torchtitan:ac=full")  # fmt: skip
    written(tmp_path / "out", run, "8xH100-80GB", "meta-llama/Llama-3.1-8B")
    assert lab.Training.from_torchtitan(tmp_path / "out" / "torchtitan.toml") == run
    assert "-m torchtitan.train" in (tmp_path / "out" / "launch.sh").read_text()
    assert settings(tmp_path / "out", "sky.yaml")["setup"] == f"pip install torchtitan=={KNOWN['torchtitan'][1]}\n"


def test_torchtitans_own_parser_takes_its_job_config(tmp_path):
    config = pytest.importorskip("torchtitan.config", reason="torchtitan is not installed (make stacks)")
    run = lab.Training(dp=4, tp=2, micro_batch=2, accumulation=2, seq_len=4096, compile=True,
                       stack="torchtitan:ac=full")  # fmt: skip
    written(tmp_path / "out", run, "8xH100-80GB", "meta-llama/Llama-3.1-8B")
    read = config.ConfigManager().parse_args(["--job.config_file", str(tmp_path / "out" / "torchtitan.toml")])
    assert (read.training.local_batch_size, read.training.global_batch_size, read.training.seq_len) == (2, 16, 4096)
    degrees = read.parallelism
    assert (degrees.data_parallel_shard_degree, degrees.tensor_parallel_degree) == (4, 2)
    assert (read.activation_checkpoint.mode, read.compile.enable) == ("full", True)


def test_nothing_is_replaced_or_half_written(tmp_path):
    run = lab.Training(precision="mixed-bf16", seq_len=64)
    out = tmp_path / "out"
    out.mkdir()
    (out / "train.py").write_text("mine")
    with pytest.raises(SpecError, match=r"already has train\.py"):
        written(out, run)
    assert [path.name for path in tmp_path.rglob("*")] == ["out", "train.py"]
    assert (out / "train.py").read_text() == "mine"
    lab.write(TINY, run, "A100-80GB", out, force=True)
    assert (out / "train.py").read_text() != "mine" and [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="cannot be written"):
        written(tmp_path / "file" / "out", run)


@pytest.mark.parametrize(("fault", "seen"), [
    (OSError(errno.ENOSPC, "No space left on device"), SpecError), (KeyboardInterrupt(), KeyboardInterrupt),
])  # fmt: skip
@pytest.mark.parametrize("there", [False, True])
def test_what_stops_in_the_middle_leaves_nothing(tmp_path, monkeypatch, fault, seen, there):
    real, done = Path.write_text, []

    def stops(path, *args, **options):
        if len(done) == 3:
            raise fault
        done.append(path)
        return real(path, *args, **options)

    if there:
        (tmp_path / "out").mkdir()
    before = list(tmp_path.rglob("*"))
    monkeypatch.setattr(Path, "write_text", stops)
    with pytest.raises(seen):
        written(tmp_path / "out", lab.Training(precision="mixed-bf16", seq_len=64))
    assert len(done) == 3 and list(tmp_path.rglob("*")) == before


def test_what_nothing_runs_is_refused_with_each_tools_reason(tmp_path):
    run = lab.Training(dp=2, tp=2, lora=lab.LoRA(), precision="bf16", seq_len=64)
    with pytest.raises(SpecError, match=r"train.py: tp=2.*torchtitan.toml.*megatron_args.txt"):
        written(tmp_path / "out", run, "4xA100-80GB")
    with pytest.raises(SpecError, match="for 1 GPUs"):
        written(tmp_path / "out", lab.Training(seq_len=64), "2xA100-80GB")
    assert not (tmp_path / "out").exists()


def train(folder, said, before=int, name="0.log", words=()):
    """Run in each rank: the script as it is started, but in a process that has imported what it imports."""
    os.chdir(folder)
    os.environ.update(said)
    log = os.open(name, os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    before()
    sys.argv = ["train.py", "--lr", "1e-3", "--steps", "2", *words]
    runpy.run_path("train.py", run_name="__main__")


@pytest.fixture
def started():
    """A function that writes the files of `run`, has train.py take two steps, and returns what its first rank printed.

    The ranks are told what torchrun tells them, which test_the_launch_line_starts_plain_pytorch_with_muon runs itself.
    """

    def start(folder, run, trained="model.safetensors", before=int):
        written(folder, run, f"{run.dp}xA100-80GB")
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        said = {
            "WORLD_SIZE": run.dp, "LOCAL_WORLD_SIZE": run.dp, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port,
            "TORCHELASTIC_USE_AGENT_STORE": True, "TORCHELASTIC_RESTART_COUNT": 0, "CUDA_VISIBLE_DEVICES": "",
        }  # fmt: skip
        ranks = []
        for rank in range(run.dp):
            place = {name: str(value) for name, value in {**said, "RANK": rank, "LOCAL_RANK": rank}.items()}
            ranks.append(new_process(train, (folder, place, before, f"{rank}.log"), f"rank {rank}"))
            ranks[-1].start()
        for rank in ranks:
            rank.join()
        logs = [(folder / f"{rank}.log").read_text() for rank in range(run.dp)]
        assert not any(rank.exitcode for rank in ranks), "\n".join(logs)
        assert (folder / "trained" / trained).exists()
        return logs[0]

    return start


BOTH = "optimizer+parameters"


def without_code():
    """Run the graphs that torch.compile traces as they are: the code that inductor writes of them takes a compiler of
    C++ longer than everything else here."""
    from torch._dynamo.backends.debugging import aot_eager
    from torch._inductor import compile_fx

    def traced(graph, inputs, **_):
        print("traced a graph")
        return aot_eager(graph, inputs)

    compile_fx.compile_fx = traced


def compiled_by_deepspeed():
    quiet_deepspeed()
    without_code()


def losses(said):
    return [float(line.split()[-1]) for line in said.splitlines() if line.startswith("step")]


def test_plain_pytorch_shards_and_offloads_over_two_ranks(tmp_path, started):
    run = lab.Training(dp=2, zero=3, precision="mixed-bf16", seq_len=32, accumulation=2, checkpointing="full")
    sharded = losses(started(tmp_path / "sharded", run))
    assert len(sharded) == 2 and losses(started(tmp_path / "offloaded", replace(run, offload=BOTH))) == sharded
    waits = losses(started(tmp_path / "waits", replace(run, sync_each_batch=False, optimizer="adamw-fused")))
    assert waits == pytest.approx(sharded, abs=1e-3)  # sums of other order
    half = losses(started(tmp_path / "half", replace(run, reduce_dtype="bf16")))
    assert half == pytest.approx(sharded, abs=0.05)


def test_plain_pytorch_shards_a_frozen_model_and_its_adapters_over_two_ranks(tmp_path, started):
    pytest.importorskip("peft")
    run = lab.Training(dp=2, zero=3, precision="bf16", seq_len=32, lora=ADAPTERS, checkpointing="full")
    sharded = losses(started(tmp_path / "sharded", run, "adapter_model.safetensors"))
    offloaded = losses(started(tmp_path / "offloaded", replace(run, offload=BOTH), "adapter_model.safetensors"))
    assert len(sharded) == 2 and offloaded == pytest.approx(sharded, abs=0.05)  # bf16


def test_the_launch_line_starts_plain_pytorch_with_muon(tmp_path):
    run = lab.Training(dp=2, precision="mixed-bf16", seq_len=32, optimizer="muon")
    written(tmp_path / "out", run, "2xA100-80GB")
    there = {"LR": "1e-3", "CUDA_VISIBLE_DEVICES": "",
             "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}  # fmt: skip
    done = subprocess.run(["bash", tmp_path / "out" / "launch.sh", "--steps", "2"], capture_output=True, text=True,
                          env=os.environ | there)  # fmt: skip
    first, second = losses(done.stdout)
    assert first != second, done.stderr
    left_out = lab.write(TINY, run, "2xA100-80GB", tmp_path / "again").left_out
    assert {"axolotl.yaml", "llama_factory.yaml", "torchtitan.toml", "megatron_args.txt"} <= set(left_out)


def test_one_gpus_offloaded_states_have_ranks_of_their_own_and_compiled_blocks(tmp_path, started):
    run = lab.Training(zero=3, precision="mixed-fp16", seq_len=32, checkpointing="selective", offload=BOTH)
    eager = losses(started(tmp_path / "eager", run))
    said = started(tmp_path / "compiled", replace(run, compile=True), before=without_code)
    assert len(eager) == 2 and losses(said) == pytest.approx(eager, abs=1e-3) and "traced a graph" in said
    assert "torchrun --nproc-per-node 1 train.py" in (tmp_path / "eager" / "launch.sh").read_text()


@pytest.mark.parametrize("fields", [
    {"precision": "autocast-bf16", "checkpointing": "selective"}, {"precision": "mixed-bf16", "compile": True},
])  # fmt: skip
def test_deepspeed_offloads_and_compiles_what_the_trainer_starts(tmp_path, started, fields):
    run = lab.Training(seq_len=32, zero=2, offload="optimizer", **fields)
    said = started(tmp_path / "out", run, before=compiled_by_deepspeed)
    assert "'train_loss': '6." in said and ("traced a graph" in said) == run.compile
    assert "offload_optimizer" in json.loads((tmp_path / "out" / "ds_config.json").read_text())["zero_optimization"]


@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeeds_own_options_are_started_by_the_trainer_on_two_ranks(tmp_path, started, stage):
    run = lab.Training(seq_len=32, dp=2, zero=stage, precision="mixed-bf16",
                       stack=lab.DeepSpeed(torch_adam=True, reduce_bucket_size=100_000))  # fmt: skip
    assert "'train_loss': '6." in started(tmp_path / "out", run, before=quiet_deepspeed)
    assert "accelerate.yaml" not in os.listdir(tmp_path / "out")  # which would say less
    assert "offload_optimizer" not in (tmp_path / "out" / "ds_config.json").read_text()
    assert lab.Training.from_deepspeed(tmp_path / "out" / "ds_config.json", seq_len=32, stack="deepspeed") == run


def test_the_trainer_runs_it(tmp_path, started):
    run = lab.Training(precision="autocast-bf16", seq_len=32, checkpointing="selective")
    assert "train_loss" in started(tmp_path / "out", run)


WAITS = {"dp": 8, "zero": 3, "sync_each_batch": False}


@pytest.mark.parametrize("fields", [{}, WAITS, {**WAITS, "reduce_dtype": "bf16"}], ids=["alone", "waits", "in half"])
def test_a_written_script_takes_the_memory_that_was_predicted(tmp_path, monkeypatch, fields):
    run = lab.Training(precision="mixed-bf16", seq_len=256, micro_batch=2, accumulation=2, **fields)
    short = {**lab.model("gpt2").config, "n_layer": 3}
    written(tmp_path / "out", run, f"{run.dp}xA100-40GB", short)
    monkeypatch.chdir(tmp_path / "out")
    words = ["run", "--gpu", "A100-40GB", "--json", "--steps", "2", "--world-size", str(run.dp), "train.py"]
    data = json.loads(CliRunner().invoke(cli, [*words, "--lr", "1e-4"]).stdout)
    assert data["peak_allocated"] == pytest.approx(lab.simulate(short, run, "A100-40GB").peak_allocated, rel=0.05)


def test_the_command_line_reads_the_four_files(tmp_path):
    run = lab.Training(dp=2, zero=3, precision="mixed-bf16", seq_len=64)
    written(tmp_path / "out", run, "2xA100-80GB")
    for name in ("ds_config.json", "accelerate.yaml"):
        words = ["estimate", "gpt2", "--from", str(tmp_path / "out" / name), "--seq-len", "64", "--json"]
        result = CliRunner().invoke(cli, words)
        assert json.loads(result.stdout)["run"]["zero"] == 3, result.output
    (tmp_path / "arguments.json").write_text(json.dumps({"per_device_train_batch_size": 2, "bf16": True}))
    result = CliRunner().invoke(cli, ["estimate", "gpt2", "--from", str(tmp_path / "arguments.json"), "--json"])
    assert json.loads(result.stdout)["run"]["precision"] == "autocast-bf16"


def test_a_folder_of_ones_own_has_weights_and_a_written_config_has_none(tmp_path, monkeypatch):
    written(tmp_path / "out", lab.Training(precision="autocast-bf16", seq_len=32))
    script = runpy.run_path(str(tmp_path / "out" / "train.py"))
    for words, drawn in (([], True), (["--model", "mine"], False), (["--model", "mine", "--from-scratch"], True)):
        monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1e-3", *words])
        assert script["arguments"]().from_scratch is drawn


def test_a_folder_without_a_tokenizer_is_said_in_a_line(tmp_path, monkeypatch):
    written(tmp_path / "out", lab.Training(precision="autocast-bf16", seq_len=32))
    script = runpy.run_path(str(tmp_path / "out" / "train.py"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(TINY))
    words = ["--model", str(tmp_path / "mine"), "--data", __file__]
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1e-3", *words])
    with pytest.raises(SystemExit) as ended:
        script["rows"](script["arguments"](), 512)
    assert str(tmp_path / "mine") in str(ended.value) and "tokenizer" in str(ended.value)
    assert "\n" not in str(ended.value)


def train_in_turn(folders, words):
    for folder in folders:
        train(folder, {"CUDA_VISIBLE_DEVICES": ""}, words=words)


def test_trl_trains_adapters_on_quantized_weights(tmp_path):
    pytest.importorskip("trl", reason="TRL is not installed")
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    LlamaForCausalLM(LlamaConfig(**TINY)).save_pretrained(tmp_path / "base")
    words = Tokenizer(BPE({f"t{number}": number for number in range(TINY["vocab_size"])}, []))
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token="t0", pad_token="t1").save_pretrained(tmp_path / "base")
    run = lab.Training(precision="bf16", seq_len=32, lora=ADAPTERS, checkpointing="full")
    folders = [tmp_path / quantization for quantization in ("nf4", "int8")]
    for folder in folders:
        written(folder, replace(run, quantization=folder.name))
    process = new_process(train_in_turn, (folders, ["--model", str(tmp_path / "base")]), "TRL")
    process.start()
    process.join()
    for folder in folders:
        assert "'train_loss': '6." in (folder / "0.log").read_text(), (folder / "0.log").read_text()
        assert (folder / "trained" / "adapter_model.safetensors").exists()


def test_files_that_train_on_text_are_not_written_for_other_runs(tmp_path):
    with pytest.raises(SpecError, match="train language models"):
        lab.write("gpt2", lab.Training(num_labels=2), "T4", tmp_path)
    for fields in ({"images": 1}, {"num_labels": 2}):
        with pytest.raises(SpecError, match="train language models"):
            lab.plan("gpt2", "T4", 8, fixed=fields)

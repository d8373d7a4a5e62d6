"""Settings of engines as a Training: what they say comes back, and what is not theirs is refused by name."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

import llmlab as lab
from llmlab.base.errors import SpecError
from llmlab.engines import readers

HALVES = ("fp16", "bf16")
COUNTS = st.integers(1, 64)


@st.composite
def runs(draw, ways):
    zero = draw(st.sampled_from([0, 1, 2, 3]))
    offloads = [None] + ["optimizer"] * (zero > 0) + ["optimizer+parameters"] * (zero == 3)
    return {
        "micro_batch": draw(COUNTS), "accumulation": draw(COUNTS), "dp": draw(st.integers(2, 64)), "zero": zero,
        "precision": draw(st.sampled_from(["fp32", *(f"{way}-{half}" for way in ways(zero) for half in HALVES)])),
        "offload": draw(st.sampled_from(offloads)),
    }  # fmt: skip


@given(runs(lambda zero: ("mixed", "autocast")), st.booleans())
def test_deepspeeds_config_of_a_training_is_read_back(fields, as_text):
    run = lab.Training(**fields, seq_len=2048)
    config = run.to_deepspeed()
    assert lab.Training.from_deepspeed(json.dumps(config) if as_text else config, seq_len=2048) == run


@given(runs(lambda zero: ("mixed",) if zero else ("autocast",)), st.booleans())
def test_accelerates_config_of_a_training_is_read_back(fields, as_text):
    if fields["zero"] == 3 and fields["offload"] == "optimizer":
        fields["offload"] = "optimizer+parameters"
    if fields["zero"] in (1, 2) and fields["offload"]:
        fields["offload"] = "optimizer"
    if fields["zero"] == 3 and fields["precision"] != "fp32":
        fields["reduce_dtype"] = fields["precision"].removeprefix("mixed-")  # whatever the run says
    run = lab.Training(**fields)
    config = run.to_accelerate()
    read = lab.Training.from_accelerate(
        yaml.safe_dump(config) if as_text else config, micro_batch=run.micro_batch, accumulation=run.accumulation,
        sync_each_batch=True,  # which no key says
    )  # fmt: skip
    assert read == run


def test_the_batch_sizes_tell_the_ranks_or_are_asked_for():
    both = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}
    assert lab.Training.from_deepspeed(both, dp=8).accumulation == 2
    assert lab.Training.from_deepspeed({**both, "gradient_accumulation_steps": 2}).dp == 8
    with pytest.raises(SpecError, match="give dp="):
        lab.Training.from_deepspeed(both)
    with pytest.raises(SpecError, match="train_batch_size=64 does not agree with micro_batch=4 × dp=3"):
        lab.Training.from_deepspeed(both, dp=3)


def test_fsdp1_of_accelerate_is_read_by_its_strategy():
    config = {"distributed_type": "FSDP", "num_processes": 8, "mixed_precision": "bf16",
              "fsdp_config": {"fsdp_sharding_strategy": "SHARD_GRAD_OP"}}  # fmt: skip
    expected = lab.Training(dp=8, zero=2, precision="mixed-bf16", reduce_dtype="bf16")
    assert lab.Training.from_accelerate(config) == expected


def test_a_model_may_checkpoint_itself_where_accelerates_config_does_not():
    config = {"distributed_type": "FSDP", "num_processes": 8, "fsdp_config": {"fsdp_version": 2}}
    assert lab.Training.from_accelerate(config, checkpointing="full").checkpointing == "full"
    config["fsdp_config"]["fsdp_activation_checkpointing"] = True
    assert lab.Training.from_accelerate(config).checkpointing == "full"
    with pytest.raises(SpecError, match="checkpointing='selective' with fsdp_activation_checkpointing"):
        lab.Training.from_accelerate(config, checkpointing="selective")


@pytest.mark.parametrize(("strategy", "waits"), [("FULL_SHARD", True), ("SHARD_GRAD_OP", True), ("NO_SHARD", False)])
def test_fsdp_of_accelerate_reduces_after_the_last_of_several_micro_batches(strategy, waits):
    config = {"distributed_type": "FSDP", "num_processes": 8, "mixed_precision": "bf16",
              "fsdp_config": {"fsdp_sharding_strategy": strategy}}  # fmt: skip
    if strategy == "NO_SHARD":
        config["mixed_precision"] = "no"
    assert lab.Training.from_accelerate(config, accumulation=4).sync_each_batch is not waits
    assert lab.Training.from_accelerate(config).sync_each_batch
    assert lab.Training.from_accelerate(config, accumulation=4, sync_each_batch=True).sync_each_batch
    assert lab.Training.from_accelerate({"num_processes": 8}, accumulation=4).sync_each_batch
    deepspeed = {"distributed_type": "DEEPSPEED", "num_processes": 8, "deepspeed_config": {"zero_stage": 3}}
    assert lab.Training.from_accelerate(deepspeed, accumulation=4).sync_each_batch


def test_the_engines_know_every_key_that_is_read_or_passed_over():
    pytest.importorskip("deepspeed", reason="the distributed extra")
    from accelerate.commands.config.config_args import ClusterConfig
    from accelerate.commands.launch import launch_command_parser
    from deepspeed.runtime import constants
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
    words = {value for value in vars(constants).values() if isinstance(value, str)}
    options = {action.dest for action in launch_command_parser()._actions}
    unknown = {
        "zero": (readers.ZERO_READ | readers.ZERO_PASSED) - zero,
        "deepspeed": (readers.DEEPSPEED_READ | readers.DEEPSPEED_PASSED) - words,
        "accelerate": (readers.ACCELERATE_READ | readers.ACCELERATE_PASSED) - set(ClusterConfig.__dataclass_fields__),
        "fsdp": (readers.FSDP_READ | readers.FSDP_PASSED) - options,
        "plugin": (readers.PLUGIN_READ | readers.PLUGIN_PASSED) - options,
    }
    assert unknown == ELSEWHERE


# In other files of DeepSpeed than its constants; and a name that old files of Accelerate have.
ELSEWHERE: dict[str, set[str]] = {
    "zero": set(),
    "deepspeed": {"comms_logger", "csv_monitor", "flops_profiler", "tensorboard", "wandb", "zero_optimization"},
    "accelerate": set(),
    "fsdp": {"fsdp_backward_prefetch_policy"},
    "plugin": set(),
}
DEEPSPEED, ACCELERATE = lab.Training.from_deepspeed, lab.Training.from_accelerate


@pytest.mark.parametrize(
    ("read", "config", "told", "says"),
    [
        (DEEPSPEED, {"zero_optimisation": {"stage": 3}}, {}, "zero_optimisation"),
        (DEEPSPEED, {"zero_optimization": {"stge": 3}}, {}, "zero_optimization.*stge"),
        (DEEPSPEED, {"zero_optimization": {"stage": 1}, "fsdp_config": {}}, {}, "fsdp_config.*Accelerate"),
        (DEEPSPEED, {"per_device_train_batch_size": 4}, {}, "per_device_train_batch_size.*the Trainer"),
        (DEEPSPEED, {"fp16": {"enabled": True}, "bf16": {"enabled": True}}, {}, "fp16 and bf16"),
        (DEEPSPEED, {"zero_optimization": {"stage": 2}}, {"dp": 2, "zero": 3}, "zero=3 with zero_optimization.stage"),
        (DEEPSPEED, {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, {}, "nvme"),
        (DEEPSPEED, {"zero_optimization": 3}, {}, "is a int"),
        (DEEPSPEED, {"optimizer": {"type": "OneBitAdam"}}, {}, "OneBitAdam"),
        (DEEPSPEED, {}, {"sequence": 4}, "no field sequence"),
        (DEEPSPEED, "{", {}, "not a config of DeepSpeed"),
        (DEEPSPEED, "[1]", {}, "cannot be read|settings by name"),
        (DEEPSPEED, "no-such-file.json", {}, "cannot be read"),
        (ACCELERATE, {"zero_optimization": {}}, {}, "zero_optimization.*DeepSpeed"),
        (ACCELERATE, {"distributed_type": "FSDP", "deepspeed_config": {"zero_stage": 2}}, {}, "two engines"),
        (ACCELERATE, {"distributed_type": "MEGATRON_LM"}, {}, "MEGATRON_LM"),
        (ACCELERATE, "a: [", {}, "not a config of Accelerate"),
    ],
)
def test_bad_settings_are_refused_by_name(read, config, told, says):
    with pytest.raises(SpecError, match=says):
        read(config, **told)


def test_stage_3s_settings_have_two_names_and_a_section_that_is_off_says_nothing():
    """As configs in public repositories have them."""
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    zero = {"stage": 3, "max_live_parameters": 0, "gather_16bit_weights_on_model_save": True}
    assert DeepSpeedZeroConfig(**zero).max_live_parameters == 0
    off = {"amp": {"enabled": False, "opt_level": "O1"}, "activation_checkpointing": {"partition_activations": False}}
    config = {"bf16": {"enabled": True}, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    read = DEEPSPEED({**config, **off, "zero_optimization": zero}, dp=8)
    assert read == lab.Training(zero=3, precision="mixed-bf16", dp=8)
    with pytest.raises(SpecError, match="settings activation_checkpointing are not supported"):
        DEEPSPEED({**config, "activation_checkpointing": {"partition_activations": True}}, dp=8)
    own = DEEPSPEED({**config, "zero_optimization": {"stage": 3, "max_live_parameters": 10}}, dp=8, stack="deepspeed")
    assert own.stack.stage3_max_live_parameters == 10


@pytest.mark.parametrize(("text", "command"), [
    ("base_model: gpt2\ndatasets:\n- path: x\nmicro_batch_size: 2", "axolotl train"),
    ("model_name_or_path: gpt2\nfinetuning_type: lora\nper_device_train_batch_size: 1", "llamafactory-cli train"),
])  # fmt: skip
def test_settings_that_only_their_program_reads_name_it(text, command):
    with pytest.raises(SpecError, match=f"llmlab run --gpu NAME {command} FILE"):
        lab.Training.from_accelerate(text)

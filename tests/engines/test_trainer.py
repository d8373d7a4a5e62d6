"""The arguments of transformers' Trainer as a Training, and back."""

import json

import pytest

import llmlab as lab
from llmlab.base.errors import SpecError


def test_a_pasted_config_of_the_trainers_resolves_auto_by_what_is_given():
    config = {
        "bf16": {"enabled": "auto"}, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}, "overlap_comm": True,
                              "stage3_prefetch_bucket_size": "auto"},
        "gradient_accumulation_steps": "auto", "gradient_clipping": "auto", "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
    }  # fmt: skip
    options = {"precision": "mixed-bf16", "micro_batch": 2, "accumulation": 4, "dp": 8}
    assert lab.Training.from_deepspeed(config, **options) == lab.Training(**options, zero=3)
    for field in ("precision", "micro_batch", "accumulation"):
        with pytest.raises(SpecError, match=f'"auto".*give {field}='):
            lab.Training.from_deepspeed(config, **{k: v for k, v in options.items() if k != field})


@pytest.mark.parametrize("kind", ["arguments", "to_dict", "file"])
@pytest.mark.parametrize("sync", [None, False, True])
def test_the_trainers_fsdp_waits_too_unless_its_accelerator_config_says_otherwise(sync, kind, tmp_path):
    from transformers import TrainingArguments

    more = {} if sync is None else {"accelerator_config": {"gradient_accumulation_kwargs": {"sync_each_batch": sync}}}
    given = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4, "bf16": True, "fsdp": "full_shard"}
    arguments = {**given, **more}
    if kind == "file" and more:  # of accelerator_config alone
        (tmp_path / "accelerator.json").write_text(json.dumps(more["accelerator_config"]))
        arguments["accelerator_config"] = str(tmp_path / "accelerator.json")
    elif kind != "file":
        alone = {name: value for name, value in arguments.items() if name != "fsdp"}  # which starts its plugin
        arguments = TrainingArguments("out", use_cpu=True, **alone)
        arguments.fsdp = "full_shard"
        arguments = arguments.to_dict() if kind == "to_dict" else arguments
    run = lab.Training.from_trainer(arguments, dp=8)
    assert run == lab.Training(accumulation=4, precision="mixed-bf16", zero=3, dp=8, sync_each_batch=bool(sync),
                               reduce_dtype="bf16", optimizer="adamw-fused")  # fmt: skip
    assert lab.Training.from_trainer({**given, "fsdp": ""}, dp=8).sync_each_batch  # DDP


def test_the_trainers_micro_batches_can_stand_in_its_accelerator_config():
    config = {"gradient_accumulation_kwargs": {"num_steps": 2}}
    run = lab.Training.from_trainer({"fsdp": "full_shard", "accelerator_config": config}, dp=8)
    assert run.accumulation == 2 and not run.sync_each_batch


def test_the_trainers_arguments_are_read():
    from transformers import TrainingArguments

    from llmlab.engines.trainer import trainer_arguments

    run = lab.Training(micro_batch=4, accumulation=2, precision="autocast-bf16", optimizer="adafactor", seq_len=512)
    assert lab.Training.from_trainer(trainer_arguments(run), seq_len=512) == run
    arguments = TrainingArguments("out", per_device_train_batch_size=4, bf16=True, use_cpu=True,
                                  gradient_checkpointing=True, optim="adamw_torch")  # fmt: skip
    expected = lab.Training(micro_batch=4, precision="autocast-bf16", checkpointing="full")
    assert lab.Training.from_trainer(arguments) == expected
    auto = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}, "train_micro_batch_size_per_gpu": "auto"}
    read = lab.Training.from_trainer({"bf16": True, "deepspeed": auto, "per_device_train_batch_size": 2}, dp=4)
    assert read == lab.Training(micro_batch=2, precision="mixed-bf16", zero=2, dp=4, optimizer="adamw-fused")


@pytest.mark.parametrize(("optim", "ours"), [
    ("adamw_torch", "adamw"), ("adamw_torch_fused", "adamw-fused"), ("adamw_bnb_8bit", "adamw-8bit"),
])  # fmt: skip
def test_each_adamw_of_the_trainer_is_one_of_ours_and_written_as_it_is_read(optim, ours):
    from transformers import TrainingArguments

    from llmlab.engines.trainer import trainer_arguments

    read = lab.Training.from_trainer(TrainingArguments("out", use_cpu=True, optim=optim))
    assert read.optimizer == ours and trainer_arguments(read)["optim"] == optim


def test_the_trainers_own_default_is_adamw_fused_and_beside_deepspeeds_own_it_is_that():
    from transformers import TrainingArguments

    for arguments in (TrainingArguments("out", use_cpu=True), TrainingArguments("out", use_cpu=True).to_dict(), {}):
        assert lab.Training.from_trainer(arguments).optimizer == "adamw-fused"
    settings = {"bf16": True, "deepspeed": {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}}
    assert lab.Training.from_trainer(settings, dp=4).optimizer == "adamw-fused"
    assert lab.Training.from_trainer(settings, dp=4, stack="deepspeed").optimizer == "adamw"


@pytest.mark.parametrize(("arguments", "said"), [
    ({"per_device_batch": 2}, "no per_device_batch"),
    ({"deepspeed": {"zero_optimization": {}}, "fsdp": "full_shard"}, "deepspeed and fsdp are both set"),
    ({"bf16": True, "fp16": True}, "bf16 and fp16 are both set"),
    ({"optim": "galore_adamw"}, "optim='galore_adamw'"),
    ({"zero_optimization": {"stage": 2}}, "no zero_optimization"),
    (3, "a int is not TrainingArguments"),
])  # fmt: skip
def test_the_trainers_arguments_that_are_wrong_are_named(arguments, said):
    with pytest.raises(SpecError, match=said):
        lab.Training.from_trainer(arguments)

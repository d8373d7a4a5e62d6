"""Specs check themselves, and their errors show the value, the field and what is allowed."""

import json

import pytest

import llmlab as lab
from llmlab.specs.run import PRECISIONS, run_from_dict


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"precision": "fp17"}, ["precision='fp17'", *PRECISIONS]),
        ({"micro_batch": 0}, ["micro_batch=0", ">= 1"]),
        ({"seq_len": -5}, ["seq_len=-5", ">= 1"]),
        ({"seq_len": 12.5}, ["seq_len=12.5", "float", "whole number"]),
        ({"micro_batch": True}, ["micro_batch=True", "bool"]),
        ({"optimizer": "adam"}, ["optimizer='adam'", "adamw"]),
        ({"checkpointing": "some"}, ["checkpointing='some'", "None", "selective", "full"]),
        ({"attention": "paged"}, ["attention='paged'", "eager", "sdpa", "flash", "efficient"]),
        ({"zero": 4, "dp": 8}, ["zero=4", "0, 1, 2, 3"]),
        ({"zero": True, "dp": 8}, ["zero=True"]),
        ({"zero": 3}, ["zero=3", "dp=1"]),
        ({"dp": 8, "ep": 3}, ["ep=3", "dp=8"]),
        ({"zero": 3, "dp": 8, "dp_replicate": 3}, ["dp_replicate=3", "dp=8", "divisor"]),
        ({"zero": 3, "dp": 8, "dp_replicate": 8}, ["dp_replicate=8", "at least 2"]),
        ({"schedule": "gpipe"}, ["schedule='gpipe'", "pp=1", "pp >= 2"]),
        ({"virtual_stages": 2}, ["virtual_stages=2 with pp=1", "pp >= 2"]),
        ({"pp": 2, "schedule": "gpipe", "virtual_stages": 2}, ["schedule='gpipe'", "virtual_stages=2"]),
        ({"pp": 2, "accumulation": 3, "virtual_stages": 2}, ["pp=2", "accumulation=3"]),
        ({"dp": 8, "dp_replicate": 2}, ["dp_replicate=2", "zero=0", "zero >= 1"]),
        ({"zero": 3, "dp": 8, "ep": 8, "dp_replicate": 2}, ["ep=8", "4 ranks"]),
        ({"zero": 3, "dp": 8, "dp_replicate": 2, "offload": "optimizer"}, ["dp_replicate=2", "give one"]),
        ({"sync_each_batch": False, "zero": 3, "dp": 2}, ["sync_each_batch=False", "accumulation=1", "leave it out"]),
        ({"sync_each_batch": False, "dp": 2, "accumulation": 2}, ["zero=0", "DDP", "give zero=2 or 3"]),
        ({"sync_each_batch": False, "zero": 3, "dp": 2, "pp": 2, "accumulation": 2}, ["pp=2", "leave it out"]),
        ({"sync_each_batch": False, "zero": 3, "dp": 2, "accumulation": 2, "offload": "optimizer"},
         ["offload='optimizer'", "'optimizer+parameters'"]),
        ({"sync_each_batch": False, "zero": 3, "dp": 2, "accumulation": 2, "stack": "deepspeed"},
         ["deepspeed has no sync_each_batch=False", "litgpt", "give sync_each_batch=True"]),
        ({"reduce_dtype": "bf16", "precision": "mixed-bf16", "dp": 2}, ["reduce_dtype='bf16'", "zero=0", "2 or 3"]),
        ({"reduce_dtype": "fp16", "precision": "mixed-bf16", "dp": 2, "zero": 3}, ["precision='mixed-fp16'"]),
        ({"reduce_dtype": "bf16", "precision": "autocast-bf16", "dp": 2, "zero": 3}, ["precision='autocast-bf16'"]),
        ({"sequence_parallel": True}, ["sequence_parallel", "tp=1"]),
        ({"loss_parallel": False}, ["loss_parallel=False", "tp=1", "tp >= 2"]),
        ({"loss_parallel": False, "tp": 2, "kernels": "liger"}, ["loss_parallel=False", "kernels='liger'"]),
        ({"loss_parallel": False, "tp": 2, "stack": "megatron"}, ["megatron has no loss_parallel=False"]),
        ({"offload": "optimizer+parameters"}, ["offload", "zero=3"]),
        ({"quantization": "nf4"}, ["quantization='nf4'", "lora"]),
        ({"lora": 16}, ["lora=16", "lab.LoRA"]),
        ({"lora": 16, "stack": "litgpt"}, ["lora=16", "lab.LoRA"]),
        ({"compile": "yes"}, ["compile='yes'", "True, False"]),
        ({"micro_batch": 2**53 + 1}, ["micro_batch=9007199254740993", "too large", "<= 9007199254740992"]),
        ({"seq_len": 10**400}, ["seq_len", "1329 bits", "too large", "<= 9007199254740992"]),
        ({"seq_len": -(10**5000)}, ["seq_len", "bits", "too small"]),  # Python refuses to print that many digits
        ({"zero": 10**5000, "dp": 8}, ["zero", "bits", "0, 1, 2, 3"]),
    ],
)
def test_a_value_that_cannot_be_is_shown_with_what_is_allowed(fields, words):
    with pytest.raises(lab.SpecError) as error:
        lab.Training(**fields)
    message = str(error.value)
    assert "\n" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "fields",
    [
        {"rank": 0}, {"alpha": 0}, {"targets": ()}, {"targets": "q_proj"}, {"targets": None}, {"targets": 5},
        {"targets": ("q_proj", 5)}, {"dropout": 1.0}, {"dropout": "x"}, {"dropout": None}, {"dropout": float("nan")},
    ],
)  # fmt: skip
def test_lora_checks_itself(fields):
    with pytest.raises(lab.SpecError, match=next(iter(fields))):
        lab.LoRA(**fields)


@pytest.mark.parametrize("fields", [{"batch": 0}, {"weights": "fp8"}, {"kv": "nf4"}, {"new_tokens": 0}])
def test_inference_checks_itself(fields):
    with pytest.raises(lab.SpecError, match=next(iter(fields))):
        lab.Inference(**fields)


def test_global_batch_and_world():
    run = lab.Training(micro_batch=2, accumulation=4, dp=8, tp=4, pp=2)
    assert (run.global_batch, run.world_size) == (64, 64)


def test_an_unknown_field_is_refused_by_name():
    with pytest.raises(lab.SpecError, match="no field batch_size"):
        run_from_dict("training", {"batch_size": 4})
    with pytest.raises(lab.SpecError, match="fine-tuning"):
        run_from_dict("fine-tuning", {})


@pytest.mark.parametrize(
    "fields",
    [
        {"images": -1}, {"images": True}, {"pixels": 100}, {"images": 1, "pixels": (1, 2, 3)},
        {"images": 1, "pixels": 0}, {"num_labels": 0}, {"num_labels": 2, "images": 1},
        {"images": 1, "stack": "torchtitan"}, {"num_labels": 2, "pp": 2}, {"num_labels": 2, "kernels": "liger"},
    ],
)  # fmt: skip
def test_fields_that_cannot_be_are_refused(fields):
    with pytest.raises(lab.SpecError, match=r"give|leave out"):
        lab.Training(**fields)


def test_an_image_one_pixel_high_survives_json():
    run = lab.Training(images=1, pixels=(1, 1280))
    assert lab.Training(**json.loads(json.dumps(run.to_dict()))) == run


@pytest.mark.parametrize("share", [0, 1, 1.5, -0.1, "0.5"])
def test_an_engine_has_a_share_of_the_gpus_memory(share):
    with pytest.raises(lab.SpecError, match="0 < share < 1"):
        lab.Training(method="grpo", completion_len=8, generations=1, gpu_memory_utilization=share)

"""DeepSpeed's settings."""

import pytest

import llmlab as lab

OFFLOADED = {"zero": 3, "offload": "optimizer", "stack": lab.DeepSpeed(sub_group_size=1e8, overlap_comm=False)}
SUMMED = {"zero": 2, "stack": lab.DeepSpeed(grad_accum_dtype="fp32")}
AT_ONCE = {"zero": 1, "stack": lab.DeepSpeed(grad_accum_dtype="fp32", immediate_grad_update=True)}


@pytest.mark.parametrize("given", [{"zero": 1}, OFFLOADED, SUMMED, AT_ONCE])
def test_deepspeeds_settings_there_and_back(given):
    run = lab.Training(**{"dp": 8, "micro_batch": 2, "stack": "deepspeed", **given})
    settings = run.to_deepspeed()
    assert lab.Training.from_deepspeed(settings, dp=8, stack="deepspeed") == run
    options = settings["zero_optimization"]
    assert ("sub_group_size" in options) == (given is OFFLOADED)


def test_deepspeeds_buckets_are_read_for_its_stack_alone():
    settings = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8}}
    assert lab.Training.from_deepspeed(settings, dp=8).stack == "transformers"
    assert lab.Training.from_deepspeed(settings, dp=8, stack="deepspeed").stack.reduce_bucket_size == 200_000_000
    with pytest.raises(lab.SpecError, match="enable bf16"):
        lab.Training.from_deepspeed({"zero_optimization": {"stage": 2}}, dp=8, stack="deepspeed")
    with pytest.raises(lab.SpecError, match="data_types"):
        lab.Training.from_deepspeed({"data_types": {"grad_accum_dtype": "fp32"}}, dp=8)


def test_deepspeed_runs_a_stage_of_zero_on_one_gpu_and_no_other_stack_does():
    assert lab.Training(zero=3, stack="deepspeed").dp == 1
    with pytest.raises(lab.SpecError, match=r"zero=3 .*dp=1"):
        lab.Training(zero=3)

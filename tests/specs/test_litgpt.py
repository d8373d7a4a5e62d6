"""What LitGPT runs."""

import llmlab as lab


def test_litgpts_recipes_follow_the_devices():
    alone, several = lab.Training(stack="litgpt"), lab.Training(dp=8, stack="litgpt")
    assert (alone.precision, alone.zero, alone.checkpointing) == ("bf16", 0, None)
    assert (several.precision, several.zero, several.checkpointing) == ("bf16", 3, "full")
    assert several.sync_each_batch and not lab.Training(dp=8, accumulation=2, stack="litgpt").sync_each_batch
    assert lab.Training(accumulation=2, stack="litgpt").sync_each_batch  # one device reduces nothing

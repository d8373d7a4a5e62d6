"""The moments of a step of DeepSpeed's engine."""


import pytest

import llmlab as lab


def test_deepspeed_flattens_weights_on_the_host_if_the_gpu_has_room_for_one_copy():
    """zero/stage_1_and_2.py, flatten_on_accelerator. The two GPUs differ in their memory alone."""
    spec = lab.model("meta-llama/Llama-3.1-8B")
    run = lab.Training(seq_len=128, dp=64, zero=2, precision="mixed-bf16", checkpointing="full", stack="deepspeed")
    for gpu, copies in (("RTX-A6000", 2), ("RTX-3090", 1)):
        report = lab.estimate(spec, run, gpu)
        assert report.phases["load"] == pytest.approx(copies * 2 * spec.parameters, rel=0.05)
        assert report.outcome != "out of memory"

"""The engine that generates completions beside the trained model."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.serving.rollout import completion_lengths

TINY = {"model_type": "llama", "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 8192, "max_position_embeddings": 4096,
        "tie_word_embeddings": True}  # fmt: skip
GPU, GENERATED = "A100-80GB", {"completion_len": 256, "generations": 4, "micro_batch": 4}


def run_of(method, **fields):
    return lab.Training(**{"method": method, "micro_batch": 4, "seq_len": 512, "precision": "bf16", **fields})


def test_the_phases_of_grpo_are_not_summed_and_the_engine_has_its_share():
    run = run_of("grpo", **GENERATED, lora=lab.LoRA())
    small, large = (lab.estimate(TINY, replace(run, gpu_memory_utilization=share), GPU) for share in (0.2, 0.8))
    assert large.phases["generate"] - small.phases["generate"] == pytest.approx(0.6 * lab.gpu(GPU).memory, rel=1e-6)
    assert large.phases["backward"] == small.phases["backward"] and small.outcome == large.outcome == "fits"
    assert large.step_seconds == pytest.approx(sum(large.time.values()))
    update = {name: seconds for name, seconds in large.time.items() if name != "generation"}
    assert update == {name: seconds for name, seconds in small.time.items() if name != "generation"}


def generated(**fields):
    run = lab.Training(method="grpo", precision="bf16", checkpointing="full", seq_len=2048, completion_len=1024,
                       micro_batch=2, accumulation=32, lora=lab.LoRA(), **fields)  # fmt: skip
    return lab.estimate("meta-llama/Llama-3.1-8B", run, "H100-80GB")


def test_generation_lasts_until_the_longest_completion():
    equal, half = (generated(gpu_memory_utilization=0.6, mean_completion_len=mean) for mean in (1024, 512))
    assert equal.time == generated(gpu_memory_utilization=0.6).time
    assert half.peak_allocated == equal.peak_allocated  # TRL pads
    # All are generated together, so fewer tokens do not shorten it in proportion.
    assert 0.7 * equal.time["generation"] < half.time["generation"] < 0.95 * equal.time["generation"]
    # With a small cache, others take the place of those that are finished.
    equal, half = (generated(mean_completion_len=mean).time["generation"] for mean in (1024, 512))
    assert half == pytest.approx(equal / 2, rel=0.15)


@pytest.mark.parametrize("mean", [1, 200, 900, 1024])
def test_completions_have_the_mean_that_was_given(mean):
    lengths = completion_lengths(2000, mean, 1024)
    assert sum(lengths) / 2000 == pytest.approx(mean, rel=0.01)
    if 1 < mean < 1024:  # each token ends one with the same probability, until the limit
        over = [sum(length > tokens for length in lengths) for tokens in (0, 300, 600)]
        assert over[1] / over[0] == pytest.approx(over[2] / over[1], rel=0.03)


def test_an_engine_whose_share_holds_no_sequence_is_out_of_memory():
    run = lab.Training(method="grpo", precision="bf16", seq_len=2048, completion_len=1024, micro_batch=8,
                       gpu_memory_utilization=0.2, lora=lab.LoRA())  # fmt: skip
    report = lab.estimate("meta-llama/Llama-3.1-8B", run, "H100-80GB")  # its weights alone are 15 of 16 GiB
    assert report.outcome == "out of memory" and "gpu_memory_utilization" in report.where

"""What a service may be, its engine's limits, and the tokens of a step with a draft."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import llmlab as lab
from llmlab.base.errors import SpecError

H100 = lab.gpu("H100")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"engine": "tgi"}, "'tgi': give one of 'vllm'"),
        ({"gpu_memory_utilization": 1.2}, "gpu_memory_utilization=1.2"),
        ({"tp": 0}, "tp=0: give a whole number"),
        ({"tp": 4, "ep": 2}, "give 1 or tp"),
        ({"rate": 1.0, "concurrency": 2}, "give one of them"),
        ({"rate": -1.0}, "above 0"),
        ({"prefix_hit": 1.0}, "prefix_hit=1.0"),
        ({"range_ratio": 0.0}, "range_ratio=0.0"),
        ({"tp": 4, "dp_attention": 3}, "does not divide tp=4"),
        ({"prompt_len": 200_000}, "131072 tokens that a request may have"),
        ({"max_model_len": 200_000}, "has 131072 positions"),
        ({"tp": 3}, "tp=3 does not divide the 32 heads"),
        ({"weights": "nvfp4"}, "H100-80GB has no fp4 units"),
        ({"pp": 0}, "pp=0: give a whole number"),
        ({"pp": 40}, "has 32 layers"),
        ({"draft": "eagle3"}, "give both"),
        ({"acceptance": 0.5}, "give both"),
        ({"draft": "eagle3", "acceptance": 1.5}, "acceptance=1.5"),
        ({"draft": "eagle3", "acceptance": 0.5, "draft_tokens": 0}, "draft_tokens=0"),
        ({"draft": "eagle3", "acceptance": 0.5, "pp": 2}, "do not combine"),
        ({"draft": "mtp", "acceptance": 0.5}, "has no layer for it"),
        ({"draft": "gpt2", "acceptance": 0.5}, "a vocabulary of 50257"),
        ({"prefill_interval": 0}, "prefill_interval=0"),
        ({"max_num_batched_tokens": 1}, "max_num_batched_tokens=1: give a whole number >= 16"),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 256}, "vLLM wants a token or more for each request"),
        ({"engine": "llama.cpp", "gpu_memory_utilization": 0.5}, "llama.cpp takes what it needs"),
        ({"engine": "llama.cpp", "weights": "q4_k_m", "pp": 2}, "not predicted for llama.cpp"),
    ],
)
def test_what_cannot_be_served_is_refused(fields, message):
    with pytest.raises(SpecError, match=message):
        lab.serve("meta-llama/Llama-3.1-8B", lab.Service(**fields), "H100")


def test_the_limits_of_a_step_are_those_of_the_engine_unless_given():
    assert lab.Service().limits(H100) == lab.Service("sglang").limits(lab.gpu("B200")) == (1024, 8192)
    assert lab.Service().limits(lab.gpu("B200")) == (1024, 16_384)
    assert {lab.Service().limits(lab.gpu(name)) for name in ("A100-80GB", "GB10", "T4")} == {(256, 2048)}
    assert replace(lab.Service(), max_num_seqs=7, max_num_batched_tokens=99).limits(H100) == (7, 99)
    assert replace(lab.Service(), max_num_batched_tokens=99).limits(H100) == (99, 99)


@settings(deadline=None)
@given(st.floats(0, 0.99), st.integers(1, 12))
def test_tokens_per_step_are_leviathans(acceptance, proposed):
    """arXiv 2211.17192, eq. 1."""
    service = lab.Service(draft="eagle3", acceptance=acceptance, draft_tokens=proposed)
    assert service.tokens_per_step == pytest.approx((1 - acceptance ** (proposed + 1)) / (1 - acceptance))
    assert replace(service, acceptance=1.0).tokens_per_step == proposed + 1

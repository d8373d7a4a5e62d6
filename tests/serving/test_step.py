"""The seconds of one step of an engine: more work takes longer, drafts, and pipelines."""

from collections import defaultdict
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import llmlab as lab
from llmlab.serving.layers import Attention
from llmlab.serving.memory import divided_memory
from llmlab.serving.step import Step, _mixer, step_seconds
from llmlab.specs.model import model

LLAMA, LLAMA_1B = model("meta-llama/Llama-3.1-8B"), "meta-llama/Llama-3.2-1B"
H100 = lab.gpu("H100")
DRAFTED = lab.Service(draft="eagle3", acceptance=0.7, draft_tokens=4, concurrency=1)
FAMILIES = ("meta-llama/Llama-3.1-8B", "openai/gpt-oss-20b", "Qwen/Qwen3-Next-80B-A3B-Instruct",
            "deepseek-ai/DeepSeek-V3", "google/gemma-3-27b-pt")  # fmt: skip


@settings(deadline=None)
@given(
    st.sampled_from(FAMILIES), st.sampled_from(["vllm", "sglang", "trtllm"]), st.sampled_from([1, 2, 8]),
    st.integers(1, 256), st.integers(64, 30_000), st.integers(0, 4096),
)  # fmt: skip
def test_more_work_takes_longer(name, engine, tp, sequences, context, tokens):
    """Within 10 %: measured kernels are not monotonic, an all-reduce changes its algorithm, a matmul its tiles."""
    spec, service = model(name), lab.Service(engine=engine, tp=tp)

    def seconds(*sizes):
        return sum(step_seconds(spec, service, H100, Step(*sizes)).values())

    here = seconds(sequences, context, tokens)
    assert 0.9 * here < seconds(2 * sequences, context, tokens)
    assert 0.9 * here < seconds(sequences, 2 * context, tokens)
    assert 0.9 * here < seconds(sequences, context, tokens + 2048)


def test_a_step_with_a_draft_computes_its_tokens_whatever_is_accepted():
    step, hopeless = Step(8, 1000), replace(DRAFTED, acceptance=0.0)
    plain = replace(DRAFTED, draft=None, acceptance=None)
    seconds = {name: sum(step_seconds(LLAMA, service, H100, step).values())
               for name, service in (("drafted", DRAFTED), ("hopeless", hopeless), ("plain", plain))}  # fmt: skip
    assert seconds["drafted"] == seconds["hopeless"] > 1.1 * seconds["plain"]
    other = replace(DRAFTED, draft=LLAMA_1B)
    read = 4 * 2 * model(LLAMA_1B).parameters / H100.bandwidth  # four times its weights
    assert read < step_seconds(LLAMA, other, H100, step)["draft"] < 2.5 * read


def test_a_pipeline_divides_memory_and_is_idle_with_one_user():
    spec, whole = model("meta-llama/Llama-3.1-70B"), lab.Service(tp=4, concurrency=1)
    staged = replace(whole, tp=2, pp=2)
    one, half = divided_memory(spec, replace(whole, tp=2), H100), divided_memory(spec, staged, H100)
    assert half.per_token * 2 == one.per_token
    assert half.weights == pytest.approx(one.weights / 2, rel=0.02)
    step = Step(1, 1000)
    alone, piped = (sum(step_seconds(spec, service, H100, step).values()) for service in (replace(whole, tp=2), staged))
    assert alone < piped < 1.02 * alone  # a token passes the stages one after the other
    many = {pp: sum(step_seconds(spec, replace(staged, pp=pp), H100, Step(128, 1000)).values()) for pp in (1, 2)}
    assert 1.1 < many[1] / many[2] < 2  # half of the requests in each stage
    notes = [note.code for note in lab.serve(spec, staged, "H100").notes]
    assert "bubbles" in notes
    assert "bubbles" not in [note.code for note in lab.serve(spec, replace(staged, concurrency=8), "H100").notes]


def test_copies_of_attention_share_eight_prompts_and_not_one():
    spec, service = model("Qwen/Qwen3-235B-A22B"), lab.Service(tp=8, ep=8, dp_attention=8)
    one, eight = (sum(step_seconds(spec, service, H100, Step(64, 1000, 8192, prompts=n)).values()) for n in (1, 8))
    assert 1.5 * eight < one


def test_a_gated_attention_projects_its_queries_twice():
    """Queries and gates of 16 heads, keys and values of 2; on two GPUs half of each, and one key-value head."""
    seen = []
    kernels = SimpleNamespace(matmul=lambda *sizes: seen.append(sizes[:3]) or 0.0, attention=lambda *sizes: 0.0)
    for gated, tp, columns in ((False, 1, 16 + 4), (True, 1, 32 + 4), (True, 2, 16 + 2)):
        mixer = Attention(heads=16, kv_heads=2, head_dim=64, gated=gated)
        with suppress(AttributeError, TypeError):  # what follows the two projections
            _mixer(defaultdict(float), kernels, lab.Service(tp=tp), 1024, mixer, Step(8, 100), "bf16")
        assert seen[-2:] == [(8, columns * 64, 1024), (8, 1024, 16 * 64 // tp)]

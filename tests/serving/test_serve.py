"""lab.serve: what holds for any deployment, and what others logged."""

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import llmlab as lab
from llmlab.base.errors import SpecError
from llmlab.cli.main import cli
from llmlab.serving.load import arrivals_of, goodput, latency, prefill_seconds, prompt_seconds
from llmlab.serving.memory import divided_memory
from llmlab.serving.replay import Arrival, replay
from llmlab.serving.sizing import deployments, frontier, least_utilization, longest_context, separated
from llmlab.serving.step import Step, step_seconds
from llmlab.specs.model import model

LLAMA = model("meta-llama/Llama-3.1-8B")
H100 = lab.gpu("H100")
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


def test_a_mixture_takes_as_long_as_nvidia_says():
    """aiconfigurator 0.12: Qwen3-30B-A3B on one H100 under vLLM, one request: 188 tokens/s."""
    report = lab.serve("Qwen/Qwen3-30B-A3B", lab.Service(concurrency=1), "H100")
    assert report.tokens_per_second_per_user == pytest.approx(188, rel=0.1)


# KV caches in GiB that vLLM logged: llm-d-planner's docs/empirical-vllm-memory-results.md (0.11, H100s of 79.18 GiB);
# a log of 2026-04 (0.19, A100); a calibration script (V1, A6000: 517,264 tokens). memory.SAMPLING is from the
# activations of the first two, memory.OUTSIDE from the first.
LOGGED = {
    "gpt-oss-20b on H100": ("openai/gpt-oss-20b", "H100", 79.18,
                            {"weights": "mxfp4", "gpu_memory_utilization": 0.9}, 50.28),
    "Qwen3-32B on H100": ("Qwen/Qwen3-32B", "H100", 79.18, {"gpu_memory_utilization": 0.9}, 4.45),
    "Mistral-Small on H100": ("Mistral-Small-24B-Base-2501", "H100", 79.18, {"gpu_memory_utilization": 0.95}, 28.20),
    "gpt-oss-20b on A100": ("openai/gpt-oss-20b", "A100-80GB", None,
                            {"weights": "mxfp4", "gpu_memory_utilization": 0.65}, 36.56),
    "Qwen2.5-7B on A6000": ("Qwen/Qwen2.5-7B", "RTX-A6000", None,
                            {"weights": "fp16", "gpu_memory_utilization": 0.92}, 517_264 * 57_344 / 2**30),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGGED)
def test_the_cache_has_the_size_that_vllm_logged(name):
    source, gpu, memory, fields, logged = LOGGED[name]
    card = replace(lab.gpu(gpu), memory=int(memory * 2**30)) if memory else lab.gpu(gpu)
    divided = divided_memory(model(source), lab.Service(**fields), card)
    assert divided.cache / 2**30 == pytest.approx(logged, rel=0.1)


def test_users_who_wait_are_always_served():
    """Little's law: the users are what comes per second times how long each waits."""
    service = lab.Service(concurrency=16, prompt_len=512, output_len=128)
    memory = divided_memory(LLAMA, service, H100)
    found = latency(LLAMA, service, H100, memory)
    waited = (found.ttft + found.tpot * 127) * found.requests_per_second
    assert waited == pytest.approx(16, rel=0.25)


def test_requests_come_at_the_rate():
    requests = arrivals_of(lab.Service(rate=4.0, range_ratio=0.5, prompt_len=1000, output_len=200))
    assert len(requests) / requests[-1].at == pytest.approx(4, rel=0.15)
    assert {500 <= one.prompt <= 1000 and 100 <= one.new <= 200 for one in requests} == {True}


def test_a_queue_that_grows_is_said_to_grow():
    calm = lab.serve(LLAMA, lab.Service(rate=1.0, prompt_len=512, output_len=128), "H100")
    full = lab.serve(LLAMA, lab.Service(rate=200.0, prompt_len=512, output_len=128), "H100")
    assert "queue-grows" not in [note.code for note in calm.notes]
    assert "queue-grows" in [note.code for note in full.notes]
    assert full.latency.ttft > 5 * calm.latency.ttft


def test_a_cached_prefix_makes_the_first_token_earlier_and_prompts_cheaper():
    whole, half = (
        lab.serve(LLAMA, lab.Service(concurrency=8, prompt_len=8000, output_len=200, prefix_hit=share), "H100")
        for share in (0.0, 0.5)
    )
    assert half.latency.ttft < 0.8 * whole.latency.ttft
    assert half.usd_per_million_input < 0.8 * whole.usd_per_million_input


def test_what_does_not_fit_says_by_how_much_and_what_does():
    report = lab.serve("meta-llama/Llama-3.1-70B", lab.Service(), "H100")
    assert report.outcome == "out of memory" and report.latency is None
    assert "it fits with tp=2" in report.notes
    assert lab.serve("meta-llama/Llama-3.1-70B", lab.Service(tp=2), "H100").outcome == "fits"
    assert "-" not in str(report).split("Out of memory")[1]


def test_more_users_more_throughput_less_speed():
    points = frontier(LLAMA, lab.Service(), H100)
    assert [point.users for point in points][:3] == [1, 2, 4]
    assert all(a.tokens_per_second < b.tokens_per_second for a, b in pairwise(points))
    assert all(0.98 * a.tpot < b.tpot for a, b in pairwise(points))


def test_separate_gpus_for_prompts_meet_the_service_level_with_no_longer_steps():
    service = lab.Service(prompt_len=4000, output_len=200)
    found = separated(LLAMA, service, 20.0, 1.0, 0.015, H100)
    assert found.ttft <= 1 and found.tpot <= 0.015
    reading = 20 * 4000 * 2 * LLAMA.parameters / 989e12  # GPUs that do nothing else, at the peak
    assert reading < found.prefill < 4 * reading
    assert separated(LLAMA, service, 20.0, 1.0, 1e-4, H100) is None


def test_a_prompt_alone_takes_longer_than_beside_others_whose_step_reads_the_weights_anyway():
    service = lab.Service(prompt_len=928, output_len=260, concurrency=8)
    alone, added = prefill_seconds(LLAMA, service, H100), prompt_seconds(LLAMA, service, H100)
    read = 2 * LLAMA.parameters / 3.35e12
    assert added + read < alone < added + 2 * read
    assert prefill_seconds(LLAMA, replace(service, prefix_hit=0.5), H100) < 0.7 * alone


def test_room_for_users():
    """Llama-3.1-8B: a cached token has 131,072 bytes, a request of N users that share the cache so many tokens."""
    cache = divided_memory(LLAMA, lab.Service(), H100).cache
    assert longest_context(LLAMA, lab.Service(), H100, 10) == cache // 10 // 131_072
    assert longest_context(LLAMA, lab.Service(), H100, 1) == LLAMA.max_positions
    assert longest_context(model("meta-llama/Llama-3.1-70B"), lab.Service(), H100, 1) == 0
    share = least_utilization(LLAMA, lab.Service(), H100, 32)
    exact = lab.Service(gpu_memory_utilization=share + 1e-9)
    assert divided_memory(LLAMA, exact, H100).requests == 32
    assert least_utilization(LLAMA, lab.Service(), H100, 10_000) is None


def test_goodput_counts_requests_within_both_limits():
    served = replay([Arrival(0.0, 1, 3), Arrival(0.0, 1, 2), Arrival(0.0, 1, 2)], lambda _: 1.0, max_batch=2)
    assert goodput(served, 1, 1) == 2 / 4 and goodput(served, 3, 1) == 3 / 4 and goodput(served, 3, 0.5) == 0


def test_the_cheapest_deployment_meets_the_service_level():
    cards = [lab.gpu(name) for name in ("A100-80GB", "H100", "H200")]
    found = deployments(LLAMA, lab.Service(), 20.0, 1.0, 0.02, cards)
    assert found and all(one.point.ttft <= 1 and one.point.tpot <= 0.02 for one in found)
    assert all(one.copies * one.point.requests_per_second >= 20 for one in found)
    assert [one.usd_per_hour for one in found] == sorted(one.usd_per_hour for one in found)
    assert not deployments(LLAMA, lab.Service(), 20.0, 1.0, 1e-4, cards)


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
    ],
)
def test_what_cannot_be_served_is_refused(fields, message):
    with pytest.raises(SpecError, match=message):
        lab.serve(LLAMA, lab.Service(**fields), "H100")


def test_heads_on_more_gpus_than_there_are_are_copied():
    report = lab.serve("Qwen/Qwen3-30B-A3B", lab.Service(tp=8), "H100")
    assert "each of the 4 key and value heads is on 2 GPUs" in report.notes


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--gpu", "2xH100", "--concurrency", "8"], 0, "2 × H100-80GB"),
        (["--gpu", "T4"], 1, "Out of memory"),
        (["--gpu", "H100", "--frontier"], 0, "tokens/s per user"),
        (["--gpu", "H100", "--users", "10"], 0, "Each of 10 users can have"),
        (["--gpu", "H100", "--users", "0"], 2, "give 1 or more"),
        (["--gpu", "8xH200", "--launch", "--kv", "fp8"], 0, "--tensor-parallel-size 8"),
        (["--gpu", "H100", "--slo", "ttft=2s,tpot=30ms", "--rate", "3"], 0, "1 × tp=1"),
        (["--gpu", "H100", "--slo", "ttft=2s,tpot=1ms", "--rate", "3"], 1, "No deployment"),
        (["--slo", "ttft=2s,tpot=30ms"], 2, "--slo needs --rate"),
        (["--slo", "ttft=2s", "--rate", "3"], 2, "give both"),
        (["--slo", "latency=2s", "--rate", "3"], 2, "is no limit"),
        ([], 2, "--gpu is missing"),
    ],
)
def test_the_command(options, code, words):
    result = CliRunner().invoke(cli, ["serve", "meta-llama/Llama-3.1-8B", *options])
    assert result.exit_code == code
    assert words in result.output


def test_json_has_what_the_report_has():
    result = CliRunner().invoke(cli, ["serve", "gpt-oss-20b", "--weights", "mxfp4", "--gpu", "H100", "--json"])
    data = json.loads(result.output)
    report = lab.serve("gpt-oss-20b", lab.Service(weights="mxfp4"), "H100")
    assert data["latency"]["tpot"] == report.latency.tpot
    assert data["memory"]["tokens"] == report.memory.tokens > 0


def test_the_limits_of_a_step_are_those_of_the_engine_unless_given():
    assert lab.Service().limits(H100) == (1024, 8192)
    assert lab.Service().limits(lab.gpu("A100-80GB")) == lab.Service().limits(lab.gpu("T4")) == (256, 2048)
    assert replace(lab.Service(), max_num_seqs=7, max_num_batched_tokens=99).limits(H100) == (7, 99)

"""lab.serve: what holds for any deployment, and what others logged."""

import json
from dataclasses import replace
from itertools import pairwise
from statistics import median

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import llmlab as lab
from benchmarks.serving.kv_cache import NOW, logs, off
from llmlab.base.errors import SpecError
from llmlab.cli.main import cli
from llmlab.serving.launch import launch_line
from llmlab.serving.load import arrivals_of, first_token, goodput, latency, prefill_seconds, prompt_seconds
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


def change_that_fits(report):
    (note,) = [note for note in report.notes if note.code == "fits-with"]
    return note.partition(" with ")[2]


def test_a_mixture_takes_as_long_as_nvidia_says():
    """aiconfigurator 0.12: Qwen3-30B-A3B on one H100 under vLLM, one request: 188 tokens/s."""
    report = lab.serve("Qwen/Qwen3-30B-A3B", lab.Service(concurrency=1), "H100")
    assert report.tokens_per_second_per_user == pytest.approx(188, rel=0.1)


def test_the_cache_has_the_size_that_vllm_logged():
    """Of the versions whose profiled step is described; 0.11 had the scales of gpt-oss-120b's experts twice."""
    errors = {(row["model"], row["tp"], row["vllm"]): abs(off(row, found)) for row, found in logs()}
    now = [error for (name, _, version), error in errors.items() if version in NOW and "120b" not in name]
    assert len(now) == 9
    assert median(now) < 0.04 and max(now) < 0.12
    assert median(errors.values()) < 0.04


def test_users_who_wait_are_always_served():
    """Little's law: the users are what comes per second times how long each waits."""
    service = lab.Service(concurrency=16, prompt_len=512, output_len=128)
    memory = divided_memory(LLAMA, service, H100)
    found = latency(LLAMA, service, H100, memory)
    waited = (found.ttft + found.tpot * 127) * found.requests_per_second
    assert waited == pytest.approx(16, rel=0.25)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
def test_the_median_without_a_replay_is_that_of_a_replay(engine):
    for users, prompt in ((4, 8000), (32, 1000), (64, 4000)):
        lengths = {"prompt_len": prompt, "output_len": 1000, "range_ratio": 0.8}
        service = lab.Service(engine, concurrency=users, prefill_interval=4, **lengths)
        found = latency(LLAMA, service, H100, divided_memory(LLAMA, service, H100)).ttft
        assert first_token(LLAMA, service, H100) == pytest.approx(found, rel=0.3)


def test_requests_come_at_the_rate():
    requests = arrivals_of(lab.Service(rate=4.0, range_ratio=0.5, prompt_len=1000, output_len=200))
    assert len(requests) / requests[-1].at == pytest.approx(4, rel=0.15)
    assert {500 <= one.prompt <= 1000 and 100 <= one.new <= 200 for one in requests} == {True}


def test_a_queue_that_grows_is_said_to_grow():
    calm = lab.serve(LLAMA, lab.Service(rate=4.0, prompt_len=512, output_len=2048), "H100")  # half of its capacity
    full = lab.serve(LLAMA, lab.Service(rate=200.0, prompt_len=512, output_len=128), "H100")
    assert "queue-grows" not in [note.code for note in calm.notes]
    assert "queue-grows" in [note.code for note in full.notes]
    assert full.latency.ttft > 5 * calm.latency.ttft


def test_goodput_is_of_the_requests_within_the_level():
    service = lab.Service(rate=2.0, prompt_len=512, output_len=128)
    loose, tight, none = (lab.serve(LLAMA, service, "H100", slo=(ttft, 1.0)) for ttft in (10.0, 0.03, 1e-6))
    assert loose.goodput == loose.latency.requests_per_second
    assert loose.goodput > tight.goodput >= none.goodput == 0


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
    assert change_that_fits(report) == "tp=2"
    assert lab.serve("meta-llama/Llama-3.1-70B", lab.Service(tp=2), "H100").outcome == "fits"
    assert "-" not in str(report).split("Out of memory")[1].partition("note")[0]


@pytest.mark.parametrize(("name", "gpu", "tp", "kind"), [
    ("openai/gpt-oss-120b", "H100", 1, "mxfp4"), ("deepseek-ai/DeepSeek-R1", "H200", 8, "fp8"),
])  # fmt: skip
def test_a_checkpoint_that_is_published_quantized_is_named(name, gpu, tp, kind):
    """OpenAI's README: gpt-oss-120b runs on a single 80 GB GPU; DeepSeek's: V3 on 8 H200s, in fp8."""
    wide, own = (lab.serve(name, lab.Service(tp=tp, weights=weights), gpu) for weights in ("bf16", kind))
    assert (wide.outcome, own.outcome) == ("out of memory", "fits")
    assert [note.code for note in wide.notes[:1]] == ["checkpoint"] and change_that_fits(wide) == f'weights="{kind}"'
    assert "checkpoint" not in [note.code for note in own.notes]
    given = lab.model({**lab.model(name).config, "quantization_config": {"quant_method": kind}})
    assert given.checkpoint == kind and not lab.model(lab.model(name).config).checkpoint


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
    assert found and all(one.latency.ttft <= 1 and one.latency.tpot <= 0.02 for one in found)
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
        lab.serve(LLAMA, lab.Service(**fields), "H100")


@pytest.mark.parametrize(("name", "words"), [
    ("bert-base-uncased", "fills in masked tokens"), ("t5-base", "has an encoder"),
    ("openai/whisper-small", "has an encoder"),
])  # fmt: skip
def test_models_that_no_decoder_writes_are_refused(name, words):
    with pytest.raises(SpecError, match=words):
        lab.serve(name, lab.Service(prompt_len=100, output_len=100), "H100")


def test_an_engine_or_dtype_that_the_gpu_lacks_is_said():
    with pytest.raises(SpecError, match="runs on NVIDIA's GPUs"):
        lab.serve(LLAMA, lab.Service("trtllm"), "MI300X")
    assert lab.serve(LLAMA, lab.Service("vllm"), "MI300X").outcome == "fits"
    short = lab.Service(prompt_len=8, output_len=8)
    wide, half = (lab.serve("gpt2", replace(short, weights=kind), "T4") for kind in ("bf16", "fp16"))
    assert "fp16" in [note.code for note in wide.notes] and "fp16" not in [note.code for note in half.notes]
    assert wide.memory == half.memory


@pytest.mark.parametrize(("fields", "words"), [
    ({"gpu_memory_utilization": 0.1}, "gpu_memory_utilization=0.92"),
    ({"max_num_batched_tokens": 10**7}, "max_num_seqs=1024 and max_num_batched_tokens=8192"),
])  # fmt: skip
def test_limits_that_leave_no_room_are_named(fields, words):
    assert change_that_fits(lab.serve(LLAMA, lab.Service(**fields), "H100")) == words


@settings(deadline=None)
@given(st.sampled_from(FAMILIES), st.integers(64, 30_000))
def test_the_longest_requests_together_fill_the_cache(name, tokens):
    """vLLM's "Maximum concurrency": of N requests at once each has max_model_len tokens, of N + 1 not."""
    spec, service = model(name), lab.Service(weights="fp8", tp=8, max_model_len=tokens)
    memory = divided_memory(spec, service, H100)
    if users := int(memory.longest):
        assert longest_context(spec, service, H100, users) >= tokens
    assert longest_context(spec, service, H100, users + 1) < -(-tokens // 16) * 16


@pytest.mark.parametrize(("gib", "longest", "draft", "logged"), [
    (3.81, 20_000, None, 1.56), (2.89, 29_000, None, 0.82), (51.63, 131_072, "eagle3", 3.13),
])  # fmt: skip
def test_the_longest_requests_are_as_many_as_vllm_logged(gib, longest, draft, logged):
    """"Maximum concurrency" of Llama-3.1-8B, vllm-project/vllm#10517 and #19996 (with EAGLE's layer)."""
    service = lab.Service(max_model_len=longest, draft=draft, acceptance=0.7 if draft else None)
    memory = replace(divided_memory(LLAMA, service, H100), cache=int(gib * 2**30))
    assert memory.longest == pytest.approx(logged, abs=0.006)


def test_heads_on_more_gpus_than_there_are_are_copied():
    report = lab.serve("Qwen/Qwen3-30B-A3B", lab.Service(tp=8), "H100")
    assert "each of the 4 key and value heads is on 2 GPUs" in report.notes


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--gpu", "2xH100", "--concurrency", "8"], 0, "2 × H100-80GB"),
        (["--gpu", "4xH100", "--pp", "2"], 0, "on 4 × H100-80GB"),
        (["--gpu", "3xH100", "--pp", "2"], 2, "--pp 2 does not divide the 3 GPUs"),
        (["--gpu", "H100", "--draft", "eagle3", "--acceptance", "0.7"], 0, "gives each 2.53 tokens"),
        (["--gpu", "H100", "--draft", "nobody/nothing", "--acceptance", "0.7"], 2, "nobody/nothing"),
        (["--gpu", "T4"], 1, "Out of memory"),
        (["--gpu", "H100", "--frontier"], 0, "tokens/s per user"),
        (["--gpu", "H100", "--plot", "frontier.svg"], 2, "give --frontier as well"),
        (["--gpu", "H100", "--frontier", "--plot", "frontier.doc"], 2, "ends in .png, .svg or .pdf"),
        (["--gpu", "H100", "--frontier", "--plot", "nowhere/frontier.svg"], 2, "there is no folder nowhere"),
        (["--gpu", "H100", "--users", "10"], 0, "Each of 10 users can have"),
        (["--gpu", "H100", "--users", "0"], 2, "give 1 or more"),
        (["--gpu", "8xH200", "--launch", "--kv", "fp8"], 0, "--tensor-parallel-size 8"),
        (["--gpu", "H100", "--slo", "ttft=2s,tpot=30ms", "--rate", "3"], 0, "H100-80GB"),
        (["--gpu", "H100", "--slo", "ttft=2s,tpot=1ms", "--rate", "3"], 1, "No deployment"),
        (["--slo", "ttft=2s,tpot=30ms"], 2, "--slo needs --rate"),
        (["--slo", "ttft=2s", "--rate", "3"], 2, "give both"),
        (["--slo", "latency=2s", "--rate", "3"], 2, "latency=2s"),
        (["--slo", "ttft=2s,tpot=30ms,tpot=9ms", "--rate", "3"], 2, "each once"),
        (["--gpu", "any"], 2, "--gpu any is for --slo"),
        (["--gpu", "3xH100", "--launch"], 2, "does not divide the 32 heads"),
        (["--gpu", "3xH100", "--users", "2"], 2, "does not divide the 32 heads"),
        (["--gpu", "H100", "--slo", "ttft=2s,tpot=1ms", "--rate", "3", "--prompt-len", "200000"], 2, "131072 tokens"),
        ([], 2, "--gpu is missing"),
    ],
)
def test_the_command(options, code, words):
    result = CliRunner().invoke(cli, ["serve", "meta-llama/Llama-3.1-8B", *options])
    assert result.exit_code == code
    assert words in result.output


def test_where_nothing_meets_the_level_one_user_alone_is_shown():
    """DeepSeek-V3 in bf16 fits on no eight H200s, and is published in fp8."""
    words = ["serve", "deepseek-ai/DeepSeek-V3", "--gpu", "H200", "--slo", "ttft=2s,tpot=50ms", "--rate", "2"]
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 1 and "--weights fp8" in result.output
    result = CliRunner().invoke(cli, [*words[:1], "bert-base-uncased", *words[2:]])
    assert result.exit_code == 2 and "fills in masked tokens" in result.output


def test_json_has_what_the_report_has():
    result = CliRunner().invoke(cli, ["serve", "gpt-oss-20b", "--weights", "mxfp4", "--gpu", "H100", "--json"])
    data = json.loads(result.output)
    report = lab.serve("gpt-oss-20b", lab.Service(weights="mxfp4"), "H100")
    assert data["latency"]["tpot"] == report.latency.tpot
    assert data["memory"]["tokens"] == report.memory.tokens > 0


def test_the_limits_of_a_step_are_those_of_the_engine_unless_given():
    assert lab.Service().limits(H100) == lab.Service("sglang").limits(lab.gpu("B200")) == (1024, 8192)
    assert lab.Service().limits(lab.gpu("B200")) == (1024, 16_384)
    assert {lab.Service().limits(lab.gpu(name)) for name in ("A100-80GB", "GB10", "T4")} == {(256, 2048)}
    assert replace(lab.Service(), max_num_seqs=7, max_num_batched_tokens=99).limits(H100) == (7, 99)
    assert replace(lab.Service(), max_num_batched_tokens=99).limits(H100) == (99, 99)


DRAFTED = lab.Service(draft="eagle3", acceptance=0.7, draft_tokens=4, concurrency=1)
LLAMA_1B = "meta-llama/Llama-3.2-1B"


@settings(deadline=None)
@given(st.floats(0, 0.99), st.integers(1, 12))
def test_tokens_per_step_are_leviathans(acceptance, proposed):
    """arXiv 2211.17192, eq. 1."""
    service = replace(DRAFTED, acceptance=acceptance, draft_tokens=proposed)
    assert service.tokens_per_step == pytest.approx((1 - acceptance ** (proposed + 1)) / (1 - acceptance))
    assert replace(service, acceptance=1.0).tokens_per_step == proposed + 1


def test_sglang_without_a_draft_is_as_fast_as_published():
    """docs.sglang.io, speculative decoding: Llama-3.1-8B on one H100, MT-Bench: 158 tokens/s; predicted are 126."""
    report = lab.serve(LLAMA, lab.Service("sglang", concurrency=1, prompt_len=200, output_len=500), "H100")
    assert report.tokens_per_second_per_user == pytest.approx(158, rel=0.22)


def test_a_draft_pays_for_few_users_and_not_for_many():
    def speedup(users):
        with_draft = replace(DRAFTED, concurrency=users, prompt_len=256, output_len=256)
        without = replace(with_draft, draft=None, acceptance=None)
        times = [lab.serve(LLAMA, service, "H100").latency.tpot for service in (without, with_draft)]
        return times[0] / times[1]

    assert 1.8 < speedup(1) < DRAFTED.tokens_per_step
    assert speedup(512) < 0.8 * speedup(1)


def test_a_step_with_a_draft_computes_its_tokens_whatever_is_accepted():
    step, hopeless = Step(8, 1000), replace(DRAFTED, acceptance=0.0)
    plain = replace(DRAFTED, draft=None, acceptance=None)
    seconds = {name: sum(step_seconds(LLAMA, service, H100, step).values())
               for name, service in (("drafted", DRAFTED), ("hopeless", hopeless), ("plain", plain))}  # fmt: skip
    assert seconds["drafted"] == seconds["hopeless"] > 1.1 * seconds["plain"]
    other = replace(DRAFTED, draft=LLAMA_1B)
    read = 4 * 2 * model(LLAMA_1B).parameters / H100.bandwidth  # four times its weights
    assert read < step_seconds(LLAMA, other, H100, step)["draft"] < 2.5 * read


def test_a_draft_takes_memory_for_its_weights_and_cache():
    plain, draft = lab.Service(), model(LLAMA_1B)
    with_draft = replace(plain, draft=LLAMA_1B, acceptance=0.7)
    one, two = divided_memory(LLAMA, plain, H100), divided_memory(LLAMA, with_draft, H100)
    assert two.weights - one.weights == pytest.approx(2 * draft.parameters, rel=0.01)
    assert two.per_token - one.per_token == 4 * draft.layers * draft.kv_heads * draft.head_dim
    deepseek = model("deepseek-ai/DeepSeek-V3")
    mtp = lab.Service(weights="fp8", tp=8, draft="mtp", acceptance=0.85)
    without = replace(mtp, draft=None, acceptance=None)
    added = divided_memory(deepseek, mtp, H100).weights - divided_memory(deepseek, without, H100).weights
    assert 8 * added == pytest.approx(11.5e9 + 8 * 3 * 2 * 7168**2, rel=0.1)  # 11.5B parameters of the layer: README


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


def test_a_prompt_is_read_by_one_copy_of_attention():
    spec = model("Qwen/Qwen3-235B-A22B")
    together, copies = (lab.Service(tp=8, ep=8, dp_attention=copies, prompt_len=8000) for copies in (1, 8))
    assert prompt_seconds(spec, copies, H100) > 1.5 * prompt_seconds(spec, together, H100)


def test_users_beyond_the_cache_are_preempted_by_vllm_and_wait_for_tensorrt_llm():
    service = lab.Service(concurrency=300, prompt_len=2000, output_len=2000, gpu_memory_utilization=0.6)
    vllm, trtllm = (lab.serve(LLAMA, replace(service, engine=engine), "H100") for engine in ("vllm", "trtllm"))
    assert vllm.memory.requests < 300
    assert vllm.latency.preempted > 0 == trtllm.latency.preempted
    assert "preemption" in [note.code for note in vllm.notes]
    calm = lab.serve(LLAMA, replace(service, max_num_seqs=vllm.memory.requests), "H100")
    assert calm.latency.preempted == 0


LAUNCHED = {
    "vllm": ("--pipeline-parallel-size 2", '"method": "eagle3", "model": "a/b", "num_speculative_tokens": 4'),
    "sglang": ("--pp-size 2", "--speculative-algorithm EAGLE3 --speculative-draft-model-path a/b"),
    "trtllm": ("--pp_size 2", '"decoding_type": "Eagle3", "max_draft_len": 4, "speculative_model": "a/b"'),
}


@pytest.mark.parametrize("engine", LAUNCHED)
def test_launch_lines_have_stages_and_drafts(engine):
    stages, draft = LAUNCHED[engine]
    assert stages in launch_line("m", lab.Service(engine, pp=2))
    assert draft in launch_line("m", replace(DRAFTED, engine=engine, draft="eagle3:a/b"))
    with pytest.raises(SpecError, match="names no checkpoint"):
        launch_line("m", replace(DRAFTED, engine=engine))


def test_the_frontier_is_drawn_with_the_numbers_of_its_table(tmp_path):
    plots = pytest.importorskip("llmlab.plots.frontier")
    picture = tmp_path / "frontier.png"
    words = ["serve", "meta-llama/Llama-3.1-8B", "--gpu", "2xH100", "--frontier", "--plot", str(picture)]
    assert CliRunner().invoke(cli, words).exit_code == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"
    points = frontier(LLAMA, lab.Service(tp=2), H100)
    (axes,) = plots.plot_frontier({"2 × H100": points}).axes
    (line,) = axes.get_lines()
    assert list(line.get_xdata()) == [1 / point.tpot for point in points]
    assert list(line.get_ydata()) == [point.tokens_per_second / 2 for point in points]

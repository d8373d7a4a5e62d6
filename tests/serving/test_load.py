"""How long prompts take in the steps of an engine, and how long requests wait."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.serving.load import arrivals_of, first_token, goodput, latency, prefill_seconds, prompt_seconds
from llmlab.serving.memory import divided_memory
from llmlab.serving.replay import Arrival, replay
from llmlab.serving.step import ROW_HOST, Step, step_seconds

LLAMA, H100 = lab.model("meta-llama/Llama-3.1-8B"), lab.gpu("H100")
LENGTHS = {"prompt_len": 2000, "output_len": 200}


def test_a_prompt_that_is_read_in_steps_of_its_own_gives_nobody_a_token():
    """A token more is sampled, sent and scheduled."""
    service = lab.Service(prompt_len=512, output_len=64)
    with_a_token = sum(step_seconds(LLAMA, service, H100, Step(1, 1, 512)).values())
    assert with_a_token - prefill_seconds(LLAMA, service, H100) > ROW_HOST / 2


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llama.cpp"])
def test_a_token_takes_its_step_and_the_prompts_of_others(engine):
    alone, many = (
        lab.serve(LLAMA, lab.Service(engine, concurrency=users, range_ratio=0.8, **LENGTHS), "H100")
        for users in (1, 16)
    )
    for report in (alone, many):
        assert sum(report.time.values()) == pytest.approx(report.latency.tpot, rel=0.02)
    assert "waiting" not in alone.time
    read = 15 * prompt_seconds(LLAMA, many.service, H100) / 200  # each other prompt, once per answer
    assert many.time["waiting"] == pytest.approx(read, rel=0.4)


def test_the_first_token_comes_after_waiting_and_reading():
    service = lab.Service(concurrency=1, **LENGTHS)
    alone = lab.serve(LLAMA, service, "H100").latency
    read = prefill_seconds(LLAMA, service, H100)
    assert alone.ttft - alone.waiting == pytest.approx(read, rel=0.05)
    many = lab.serve(LLAMA, replace(service, concurrency=32), "H100").latency
    assert many.waiting > 4 * alone.waiting and many.ttft > many.waiting + 0.9 * read


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


def test_a_prompt_alone_takes_longer_than_beside_others_whose_step_reads_the_weights_anyway():
    service = lab.Service(prompt_len=928, output_len=260, concurrency=8)
    alone, added = prefill_seconds(LLAMA, service, H100), prompt_seconds(LLAMA, service, H100)
    read = 2 * LLAMA.parameters / 3.35e12
    assert added + read < alone < added + 2 * read
    assert prefill_seconds(LLAMA, replace(service, prefix_hit=0.5), H100) < 0.7 * alone


def test_goodput_counts_requests_within_both_limits():
    served = replay([Arrival(0.0, 1, 3), Arrival(0.0, 1, 2), Arrival(0.0, 1, 2)], lambda _: 1.0, max_batch=2)
    assert goodput(served, 1, 1) == 2 / 4 and goodput(served, 3, 1) == 3 / 4 and goodput(served, 3, 0.5) == 0


def test_a_prompt_is_read_by_one_copy_of_attention():
    spec = lab.model("Qwen/Qwen3-235B-A22B")
    together, copies = (lab.Service(tp=8, ep=8, dp_attention=copies, prompt_len=8000) for copies in (1, 8))
    assert prompt_seconds(spec, copies, H100) > 1.5 * prompt_seconds(spec, together, H100)

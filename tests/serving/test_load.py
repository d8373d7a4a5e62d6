"""How long prompts take in the steps of an engine, and how long requests wait."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.serving.load import prefill_seconds, prompt_seconds
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

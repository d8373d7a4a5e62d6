"""What the chapter on serving derives by hand agrees with the verb, the step and the replay."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.serving.load import pass_time, prefill_seconds, prompt_seconds
from llmlab.serving.memory import divided_memory
from llmlab.serving.replay import arrivals, percentile, replay
from llmlab.serving.step import Step, step_seconds

MODEL, GPU = lab.model("meta-llama/Llama-3.1-8B"), lab.gpu("H100")
P, ANSWER = 928, 260
SERVICE = lab.Service(prompt_len=P, output_len=ANSWER)
C = P + ANSWER // 2
KAPPA = 4 * MODEL.layers * MODEL.kv_heads * MODEL.head_dim
W = 2 * (MODEL.parameters - MODEL.vocab * MODEL.hidden)


def seconds(*sizes):
    return sum(step_seconds(MODEL, SERVICE, GPU, Step(*sizes)).values())


def replayed(batching="continuous", **rules):
    requests, tokens = SERVICE.limits(GPU)
    room = divided_memory(MODEL, SERVICE, GPU).tokens
    limits = {"max_batch": requests, "chunk": tokens, "capacity": room, **rules}
    return replay(arrivals(speed=4), pass_time(MODEL, SERVICE, GPU), batching, **limits)


def within_level(served):
    """Without the delay of first tokens, which does not decide here."""
    return sum(one.first_token <= 0.5 and one.each_token <= 0.02 for one in served) / len(served)


@pytest.mark.parametrize("batch", [1, 16, 64, 256])
def test_a_decode_step_takes_its_bytes_and_up_to_two_thirds_more(batch):
    bound = (W + batch * C * KAPPA) / GPU.bandwidth
    assert bound < seconds(batch, C) < 1.67 * bound


def test_a_prompt_takes_its_flops_and_up_to_two_thirds_more():
    flops = 2 * (MODEL.parameters - 2 * MODEL.vocab * MODEL.hidden) * P + 2 * MODEL.layers * MODEL.hidden * P**2
    assert flops / GPU.peak("bf16") < seconds(0, 1, P) < 1.67 * flops / GPU.peak("bf16")


def test_a_chunk_below_what_arrives_makes_the_queue_grow():
    arriving = len(arrivals()) / arrivals(speed=4)[-1].at * P
    for chunk, grows in ((128, True), (512, False)):
        assert (chunk / seconds(64, C, chunk) < arriving) == grows
        first = [one.first_token for one in replayed(chunk=chunk)]
        early, late = percentile(first[:100], 0.5), percentile(first[-100:], 0.5)
        assert (late > 50 * early) == grows


def test_small_steps_lift_one_h100_above_the_level_and_static_batches_drop_it():
    shares = [within_level(replayed()), within_level(replayed(chunk=512)), within_level(replayed("static"))]
    assert 0.4 < shares[0] < 0.8
    assert shares[1] > 0.98
    assert shares[2] < 0.1
    assert within_level(replayed(prefix_hit=0.3)) > 0.98


def test_separate_pools_save_more_at_a_tighter_limit():
    def prompt(users):
        return prompt_seconds(MODEL, replace(SERVICE, concurrency=users), GPU)

    saved = []
    for limit in (0.01, 0.02, 0.03):
        together = max(b for b in range(1, 360) if seconds(b, C) + (b - 1) * prompt(b) / ANSWER <= limit)
        apart = max(b for b in range(1, 360) if seconds(b, C) <= limit)
        shared = prompt(together) + ANSWER * seconds(together, C) / together
        separate = prefill_seconds(MODEL, SERVICE, GPU) + ANSWER * seconds(apart, C) / apart
        saved.append(1 - separate / shared)
    assert saved[0] > 0.25 > 0.1 > saved[1] > saved[2] > 0

"""The replay follows the Scheduler pass by pass, and its clock adds up."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from llmlab.base.errors import SpecError
from llmlab.course.inference import Scheduler, scheduler
from llmlab.course.inference.drafts import Bigram
from llmlab.serving import replay as traffic
from llmlab.serving.replay import Arrival, Pass, arrivals, percentile, replay, throughput
from llmlab.specs.model import model

TINY = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
        "num_attention_heads": 1, "vocab_size": 8, "max_position_embeddings": 256}  # fmt: skip
REQUESTS = st.lists(st.tuples(st.just(0.0), st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=8)


@settings(max_examples=40, deadline=None)
@given(requests=REQUESTS, max_batch=st.integers(1, 4), chunk=st.sampled_from([None, 1, 3, 8]), data=st.data())
def test_each_request_ends_in_the_pass_in_which_the_scheduler_ends_it(
    requests: list[tuple[float, int, int]], max_batch: int, chunk: int | None, data: st.DataObject
) -> None:
    batching = data.draw(st.sampled_from(traffic.BATCHING))
    real = Scheduler(Bigram(torch.arange(8), model(TINY)), 64, 16, max_batch, chunk, batching)
    # first tokens all differ: a shared beginning would be read once
    submitted = [real.submit([i, *[7] * (prompt - 1)], new) for i, (_, prompt, new) in enumerate(requests)]
    ended = {}
    while real.waiting or real.running:
        for request in real.step():
            ended[id(request)] = real.steps
    served = replay([Arrival(*r) for r in requests], lambda _: 1.0, batching, max_batch=max_batch, chunk=chunk)
    assert [one.tokens[-1] for one in served] == [ended[id(request)] for request in submitted]
    assert all(len(one.tokens) == one.arrival.new for one in served)


def test_the_two_know_the_same_rules() -> None:
    assert traffic.BATCHING == scheduler.BATCHING


def test_static_batches_wait_for_their_longest_request() -> None:
    requests = [Arrival(0, 1, 2), Arrival(0, 1, 10), Arrival(0, 1, 2)]
    last = {b: [one.tokens[-1] for one in replay(requests, lambda _: 1.0, b, max_batch=2)] for b in traffic.BATCHING}
    assert last == {"static": [2, 10, 12], "continuous": [2, 10, 4]}


def test_a_chunk_bounds_what_a_pass_reads_and_the_gaps_between_tokens() -> None:
    seen: list[Pass] = []

    def seconds(one: Pass) -> float:
        seen.append(one)
        return 0.01 + one.tokens / 1000

    requests = [Arrival(0, 4, 50), Arrival(0.1, 400, 5)]
    whole, chunked = (replay(requests, seconds, chunk=chunk) for chunk in (None, 32))
    assert max(whole[0].gaps) > 0.4 > 0.05 > max(chunked[0].gaps)
    assert chunked[1].first_token > whole[1].first_token
    cut = seen[len(seen) - sum(1 for _ in chunked[0].tokens) :]
    assert max(one.tokens for one in cut) <= 33  # a chunk and the other's token


def test_a_pass_says_what_it_looks_at() -> None:
    seen: list[Pass] = []
    replay([Arrival(0, 3, 2)], lambda one: seen.append(one) or 1.0)
    assert seen == [Pass(3, 1, 1 + 2 + 3, 0, 0, 0), Pass(1, 1, 4, 4, 1, 4)]


def test_nobody_is_served_before_he_comes_and_a_full_cache_makes_wait() -> None:
    requests = [Arrival(0, 10, 10), Arrival(100.5, 10, 10)]
    assert replay(requests, lambda _: 1.0)[1].tokens[0] == 101.5
    together = replay([Arrival(0, 10, 10), Arrival(0, 10, 10)], lambda _: 1.0, capacity=20)
    assert [one.tokens[0] for one in together] == [1, 11]
    with pytest.raises(SpecError, match="20 tokens: the cache has 19"):
        replay(requests, lambda _: 1.0, capacity=19)


def test_the_trace_is_azures() -> None:
    trace = arrivals()
    assert len(trace) == 400
    assert trace[0] == Arrival(0.0, 374, 44) and trace[1] == Arrival(4.315, 396, 109)
    assert [one.at for one in trace] == sorted(one.at for one in trace)
    assert arrivals(2, speed=2)[1].at == pytest.approx(4.315 / 2)
    assert "Splitwise" in traffic.source() and "CC-BY" in traffic.source()


def test_throughput_counts_tokens_from_the_first_arrival_to_the_last_token() -> None:
    assert throughput(replay([Arrival(3, 1, 4), Arrival(3, 1, 4)], lambda _: 0.5)) == 8 / 2
    assert percentile(range(1, 101), 0.99) == 99


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: arrivals(401), "has 400 requests"),
        (lambda: arrivals(speed=0), "speed=0"),
        (lambda: replay([Arrival(0, 1, 1)], lambda _: 1.0, "dynamic"), "'dynamic'"),
        (lambda: replay([Arrival(0, 1, 1)], lambda _: 1.0, max_batch=0), "max_batch=0"),
        (lambda: Scheduler(Bigram(torch.arange(8), model(TINY)), batching="dynamic"), "'dynamic'"),
    ],
)
def test_what_cannot_be_is_refused(call, message: str) -> None:
    with pytest.raises(SpecError, match=message):
        call()


LENGTHS = st.lists(st.tuples(st.floats(0, 20), st.integers(1, 20), st.integers(1, 12)), min_size=1, max_size=8)


@settings(max_examples=60, deadline=None)
@given(
    LENGTHS, st.integers(32, 60), st.sampled_from([None, 3, 8]), st.booleans(), st.booleans(), st.integers(1, 5),
    st.booleans(),
)  # fmt: skip
def test_a_full_cache_preempts_and_nobody_loses_a_token(lengths, capacity, chunk, first, ahead, interval, patient):
    requests, seen = [Arrival(*sizes) for sizes in lengths], []

    def seconds(one: Pass) -> float:
        seen.append(one)
        return 1.0

    rules = {"prompts_first": first, "ahead": ahead, "interval": interval, "patient": patient, "chunk": chunk}
    served = replay(requests, seconds, capacity=capacity, preempts=True, **rules)
    assert all(len(one.tokens) == one.arrival.new and one.tokens == sorted(one.tokens) for one in served)
    assert all(one.first_token >= 0.999 for one in served)
    assert all(one.cached + one.tokens - one.decoding <= capacity for one in seen)


def test_prompts_first_stops_those_that_decode():
    requests = [Arrival(0, 1, 5), Arrival(0.5, 30, 2)]
    seen = []
    apart = replay(requests, lambda one: seen.append(one) or 1.0, chunk=10, prompts_first=True)
    assert all(one.decoding in (0, one.tokens) for one in seen)
    assert max(apart[0].gaps) == 4 and max(replay(requests, lambda _: 1.0, chunk=10)[0].gaps) == 1


def test_a_step_decided_while_another_runs_has_nobody_who_came_since():
    for prompt in (1, 9):  # the other one comes while a token, or a prompt, is computed
        requests = [Arrival(0, prompt, 10), Arrival(0.5, 9, 1)]
        first = {ahead: replay(requests, lambda _: 1.0, ahead=ahead)[1].tokens[0] for ahead in (False, True)}
        assert first == {False: 2, True: 3}


def test_new_requests_wait_for_the_scheduler_to_look():
    requests = [Arrival(0, 1, 20), Arrival(2.5, 1, 1), Arrival(6.5, 1, 1)]
    looks = replay(requests, lambda _: 1.0, interval=4)
    assert [one.tokens[0] for one in looks] == [1, 5, 9]  # looks before passes 1, 5, 9
    patient = replay(requests, lambda _: 1.0, interval=4, patient=True)
    assert [one.tokens[0] for one in patient] == [1, 7, 11]  # three passes more than without
    assert [one.tokens[0] for one in replay(requests, lambda _: 1.0)] == [1, 4, 8]


def test_prompts_are_tokenized_one_after_another():
    served = replay([Arrival(0, 10, 1)] * 3, lambda _: 1.0, tokenizing=0.5, delay=2.0)
    assert [one.ready for one in served] == [7, 12, 17]


def test_no_more_requests_are_there_than_users() -> None:
    served = replay([Arrival(0, 4, new) for new in (3, 5, 2, 6, 4)], lambda _: 1.0, users=2)
    for one in served:
        assert sum(other.entered <= one.entered < other.tokens[-1] for other in served) <= 2

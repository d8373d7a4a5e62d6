"""Long generation, most steps of which are played back: the allocator sees what it sees where every step runs."""

from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest

import llmlab as lab
from llmlab.base.units import MiB

report = import_module("llmlab.simulation.report")

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 500,
         "max_position_embeddings": 512}  # fmt: skip
GPT = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512, "vocab_size": 500}
WINDOW = {**LLAMA, "model_type": "mistral", "sliding_window": 32}
NEW = 30


DEEP = {**LLAMA, "num_hidden_layers": 6}


def taken(model: dict[str, Any], run: lab.Inference, card: str | None) -> tuple[Any, ...]:
    """Return what is the same however many steps run: the allocator's blocks before each step, and the report but for
    its time; then the time, and the events with the places that they come from."""
    segments, allocators = [], []

    class Seen(report.Allocator):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            allocators.append(self)
            segments.clear()

    def look(phase: str | None) -> None:
        segments.extend(each.segments() for each in allocators[-1:])

    recording = report.recorded(model, run, card, Seen, look)
    end = recording.marks[-1].time  # after it the model dies, in an order of Python's own
    events = {event: recording.engine.places.get(event.time) for event in recording.engine.events if event.time < end}
    spec, gpu = report.find_model(model), report.find_gpu(card) if card else None
    found = report._reported(spec, run, gpu, recording)
    timed = {name: getattr(found, name) for name in ("step_seconds", "step_seconds_low", "tokens_per_second", "mfu")}
    untimed = replace(found, timeline=(), step_seconds_high=None, **dict.fromkeys(timed))
    return (segments, untimed), timed, events


def agree(played: tuple[Any, ...], ran: tuple[Any, ...]) -> None:
    """Assert that both are the same, and that the first has events of the second, in their moments.

    Only the step with the highest peak has them all; those that are shown in hindsight are at addresses below 0."""
    (same, timed, events), (expected, expected_time, all_events) = played, ran
    assert same == expected
    assert timed == {name: value and pytest.approx(value, 1e-9) for name, value in expected_time.items()}
    places = {(event.time, event.size): place for event, place in all_events.items()}
    assert all(place == places[event.time, event.size] for event, place in events.items())
    if same[0]:  # a CPU's allocator never gives an address twice
        assert {event for event in events if event.address > 0} <= all_events.keys()


def calls_that_ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    ran, run = [], report.Decoder._run

    def counted(self, *args):
        ran.append(self.calls - 1)
        return run(self, *args)

    monkeypatch.setattr(report.Decoder, "_run", counted)
    return ran


@pytest.mark.parametrize(
    ("model", "weights", "prompt", "card"),
    [
        (LLAMA, "bf16", 250, "A100-80GB"),  # FlashAttention splits keys: one block more at 257
        (LLAMA, "fp16", 30, "T4"),
        (WINDOW, "bf16", 10, "A100-80GB"),  # 32 tokens are there in step 22
        (GPT, "fp32", 8, None),
    ],
    ids=["flash", "plain", "window", "cpu"],
)
def test_playing_steps_back_is_running_them(model, weights, prompt, card, monkeypatch):
    run = lab.Inference(2, prompt, NEW, weights, kv=weights)
    ran = calls_that_ran(monkeypatch)
    played = taken(model, run, card)
    assert len(ran) < NEW / 2
    monkeypatch.setattr(report, "steps_that_run", lambda run, window: set(range(run.new_tokens)))
    ran.clear()
    agree(played, taken(model, run, card))
    assert ran == list(range(NEW))


@pytest.mark.parametrize(
    ("batch", "prompt", "memory"),
    [(200, 90, None), (200, 70, None), (8000, 16, 100 * MiB)],
    ids=["large caches", "caches that become large", "little memory"],
)
def test_layers_whose_small_requests_repeat_are_skipped(batch, prompt, memory, monkeypatch):
    """The allocator's blocks are the same before each step. In little memory cached segments may be given back, so
    each request is made."""
    card = report.find_gpu("A100-80GB")
    run = lab.Inference(batch, prompt, NEW, "bf16", kv="bf16")
    if memory:
        roomy = report.recorded(DEEP, run, card)
        card = replace(card, memory=card.memory - card.room() + roomy.peak_reserved - memory)
    requests = []
    real = report.Allocator.malloc
    monkeypatch.setattr(report.Allocator, "malloc", lambda *given: requests.append(given) or real(*given))
    played, replayed = taken(DEEP, run, card), len(requests)
    monkeypatch.setattr(report, "steps_that_run", lambda run, window: set(range(run.new_tokens)))
    agree(played, taken(DEEP, run, card))
    assert (replayed < len(requests) - replayed) == (memory is None)


def test_a_step_that_was_not_foretold_makes_those_before_it_run(monkeypatch):
    """The window is not told of: the first step that runs after it is full differs from what was foretold."""
    run = lab.Inference(1, 10, NEW, "bf16", kv="bf16")
    real = report.steps_that_run
    monkeypatch.setattr(report, "steps_that_run", lambda run, window: set(range(run.new_tokens)))
    expected = taken(WINDOW, run, "A100-80GB")
    monkeypatch.setattr(report, "steps_that_run", lambda run, window: real(run, None))
    ran = calls_that_ran(monkeypatch)
    agree(taken(WINDOW, run, "A100-80GB"), expected)
    assert len(ran) > NEW  # it began again


def test_running_out_of_memory_far_on_is_the_same_outcome(monkeypatch):
    """A cache that grows by 352 MiB per token, on 15 GiB."""
    wide = {**GPT, "n_embd": 512, "n_head": 8, "vocab_size": 64}
    run = lab.Inference(90_000, 4, NEW, "fp16", kv="fp16")
    played = replace(lab.simulate(wide, run, "T4"), timeline=())
    assert played.outcome == "out of memory" and played.where.startswith("decode")
    monkeypatch.setattr(report, "steps_that_run", lambda run, window: set(range(run.new_tokens)))
    assert replace(lab.simulate(wide, run, "T4"), timeline=()) == played

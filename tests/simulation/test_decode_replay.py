"""Long generation, most steps of which are played back: the allocator sees what it sees where every step runs."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

import llmlab as lab

report = import_module("llmlab.simulation.report")

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2,
         "num_hidden_layers": 2, "intermediate_size": 96, "vocab_size": 500,
         "max_position_embeddings": 512}  # fmt: skip
GPT = {"model_type": "gpt2", "n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 512, "vocab_size": 500}
WINDOW = {**LLAMA, "model_type": "mistral", "sliding_window": 32}
NEW = 40


def taken(model: dict[str, Any], run: lab.Inference, card: str | None) -> tuple[Any, ...]:
    """What a recording says: allocations and frees with addresses, where each comes from, operators, report."""
    recording = report.recorded(model, run, card)
    end = recording.marks[-1].time  # after it the model dies, in an order of Python's own
    events = [event for event in recording.engine.events if event.time < end]
    places = [recording.engine.places.get(event.time) for event in events]
    spec, gpu = report.find_model(model), report.find_gpu(card) if card else None
    return events, places, list(recording.operators), report._reported(spec, run, gpu, recording)


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
    assert taken(model, run, card) == played
    assert ran == list(range(NEW))


def test_a_step_that_was_not_foretold_makes_those_before_it_run(monkeypatch):
    """The window is not told of: the first step that runs after it is full differs from what was foretold."""
    run = lab.Inference(1, 10, NEW, "bf16", kv="bf16")
    expected = taken(WINDOW, run, "A100-80GB")
    real = report.steps_that_run
    monkeypatch.setattr(report, "steps_that_run", lambda run, window: real(run, None))
    ran = calls_that_ran(monkeypatch)
    assert taken(WINDOW, run, "A100-80GB") == expected
    assert len(ran) > NEW  # it began again


def test_running_out_of_memory_far_on_is_the_same_outcome(monkeypatch):
    """A cache that grows by 352 MiB per token, on 15 GiB."""
    wide = {**GPT, "n_embd": 512, "n_head": 8, "vocab_size": 64}
    run = lab.Inference(90_000, 4, NEW, "fp16", kv="fp16")
    played = lab.simulate(wide, run, "T4")
    assert played.outcome == "out of memory" and played.where.startswith("decode")
    monkeypatch.setattr(report, "steps_that_run", lambda run, window: set(range(run.new_tokens)))
    assert lab.simulate(wide, run, "T4") == played

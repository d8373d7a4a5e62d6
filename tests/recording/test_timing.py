"""Counting FLOP changes nothing else of a step."""

import torch

import llmlab as lab
from llmlab.recording.timing import count_flops
from llmlab.specs.model import model
from llmlab.step.step import build_step, texts


def test_counting_holds_nothing_that_checkpointing_frees():
    small = model({**model("gpt2").config, "n_layer": 8, "n_embd": 128, "n_head": 4, "vocab_size": 1024})
    run = lab.Training(micro_batch=2, seq_len=256, checkpointing="full", attention="eager")
    peaks = []
    for counted in (False, True):
        step = build_step(small, run, torch.device("cpu"), texts(small, run))
        with lab.meter() as meter:
            count_flops(step) if counted else step()
        peaks.append(meter.peak_allocated)
    assert peaks[1] < 1.05 * peaks[0]

"""The phases of a recorded step."""

import pytest
import torch

import llmlab as lab

GPT2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512, "n_positions": 128}


def test_an_error_in_the_step_ends_the_recording(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("not about memory")

    monkeypatch.setattr("llmlab.step.step.build_optimizer", broken)
    with pytest.raises(RuntimeError, match="not about memory"):
        lab.measure(GPT2, lab.Training(seq_len=96), device="cpu")
    assert not torch._C._autograd._profiler_enabled()
    with lab.meter("cpu") as m:
        tensor = torch.empty(4)
    assert m.allocated == tensor.nbytes

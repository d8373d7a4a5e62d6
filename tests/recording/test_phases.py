"""The phases of a recorded step."""

import pytest
import torch

import llmlab as lab

SHAPE = {"micro_batch": 2, "seq_len": 96}


def test_an_error_in_the_step_ends_the_recording(gpt2, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("not about memory")

    monkeypatch.setattr("llmlab.step.step.build_optimizer", broken)
    with pytest.raises(RuntimeError, match="not about memory"):
        lab.measure(gpt2, lab.Training(**SHAPE), device="cpu")
    assert not torch._C._autograd._profiler_enabled()
    with lab.meter("cpu") as m:
        tensor = torch.empty(4)
    assert m.allocated == tensor.nbytes

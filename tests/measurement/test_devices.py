"""The device that is measured."""

import pytest
import torch

import llmlab as lab


def test_a_device_that_is_not_here_says_what_to_do():
    if not torch.cuda.is_available():
        with pytest.raises(lab.NotAvailable, match="measure small on device='cpu'"):
            lab.measure("gpt2", lab.Training(seq_len=8), device="cuda")
    with pytest.raises(lab.SpecError, match="device='gpu'"), lab.meter("gpu"):
        pass
    with pytest.raises(lab.SpecError, match="device='meta'"), lab.meter("meta"):
        pass

SHAPE = {"micro_batch": 2, "seq_len": 96}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dp": 2}, "dp=2 needs several"),
        ({"dp": 4, "zero": 3}, "dp=4, zero=3"),
        ({"offload": "optimizer"}, "offload='optimizer'"),
        ({"attention": "flash", "precision": "bf16"}, "attention='flash' needs a CUDA GPU"),
        ({"attention": "efficient"}, "attention='efficient' needs a CUDA GPU"),
        ({"kernels": "liger"}, "kernels='liger' needs a CUDA GPU"),
    ],
)
def test_what_this_machine_cannot_run_says_so_at_once(gpt2, fields, words):
    with pytest.raises(lab.NotAvailable, match=words):
        lab.measure(gpt2, lab.Training(**SHAPE, **fields), device="cpu")

"""torch.cuda's answers on a simulated GPU are those of the real one."""

import pytest
import torch

import llmlab as lab

if torch.cuda.is_available():
    pytest.skip("the simulated device must not be mistaken for a real one", allow_module_level=True)


@pytest.mark.parametrize(("gpu", "native"), [("T4", False), ("A100-40GB", True)])
def test_bf16_is_supported_by_emulation_before_ampere(gpu, native):
    """torch/cuda/__init__.py: is_bf16_supported counts emulation unless it is told not to, on a T4 too."""
    with lab.simulator(gpu):
        assert torch.cuda.is_bf16_supported()
        assert torch.cuda.is_bf16_supported(including_emulation=False) is native


def test_the_module_of_the_device_is_that_of_the_gpu():
    """torch.get_device_module without a device gives the module of the machine's accelerator, here torch.cuda."""
    with lab.simulator("T4"):
        assert torch.get_device_module() is torch.get_device_module("cuda:0") is torch.cuda
        assert torch.get_device_module("cpu") is torch.cpu
    assert torch.get_device_module() is not torch.cuda

"""torch.cuda's answers on a simulated GPU are those of the real one."""

import pytest
import torch

import llmlab as lab
from llmlab.simulation.simulator import simulator

pytestmark = pytest.mark.usefixtures("no_gpu")


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


def test_torch_cuda_counts_the_memory_of_this_process():
    with lab.simulator("T4") as card:
        free = torch.cuda.mem_get_info()[0]
        x = torch.empty(30 << 18, device="cuda")
        assert torch.cuda.memory_allocated() == torch.cuda.max_memory_allocated() == card.allocated == 30 << 20
        assert torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"] == 30 << 20
        assert torch.cuda.mem_get_info() == (free - (30 << 20), lab.gpu("T4").memory)
        del x
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.reset_accumulated_memory_stats()
        assert torch.cuda.max_memory_allocated() == 0 == torch.cuda.memory_stats()["allocated_bytes.all.freed"]
        assert torch.cuda.memory_reserved() == 30 << 20
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 0


def test_a_memory_fraction_holds_from_then_on_and_other_devices_do_not_exist():
    with lab.simulator("T4"):
        torch.cuda.set_per_process_memory_fraction(0.25)
        assert torch.cuda.get_per_process_memory_fraction() == 0.25
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(5 << 28, device="cuda")
        for ask in (torch.cuda.mem_get_info, torch.cuda.memory_stats, torch.cuda.get_device_properties):
            with pytest.raises((RuntimeError, AssertionError), match="device"):
                ask(1)


def test_the_card_answers_for_itself():
    with simulator("A100-40GB") as sim:
        assert torch.cuda.is_available() and torch.cuda.device_count() == 1 and torch.cuda.current_device() == 0
        assert "A100" in torch.cuda.get_device_name(0)
        assert torch.cuda.get_device_capability() == (8, 0)
        assert torch.cuda.get_device_properties("cuda").total_memory == sim.gpu.memory
        torch.cuda.synchronize()
        torch.manual_seed(0)
        torch.cuda.manual_seed_all(0)
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.empty(1, device="cuda:1")


def test_default_device_is_shown_as_cuda(card):
    torch.set_default_device("cuda")
    assert torch.get_default_device() == torch.device("cuda", 0)
    generator = torch.Generator(device="cuda")
    assert generator.manual_seed(3).device.type == "cuda" and isinstance(generator, torch.Generator)
    assert torch.randn(3, generator=generator).is_cuda and isinstance(torch.Generator(), torch.Generator)


@pytest.mark.parametrize("how", ["environment", "call"])
def test_a_script_s_own_allocator_settings_hold(how, monkeypatch):
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    with simulator("T4") as sim:
        if how == "environment":
            monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        else:
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        for size in range(20, 60):
            torch.empty(size << 20, device="cuda", dtype=torch.uint8)
        assert sim.reserved == 60 << 20

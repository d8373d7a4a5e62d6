"""What a simulated GPU cannot run is refused by name, with the line that asked for it and the way round."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from llmlab.base.errors import NotAvailable

pytestmark = pytest.mark.usefixtures("no_gpu")


def choose() -> Any:
    x = torch.empty(4, device="cuda")
    return torch.ops.higher_order.cond(torch.tensor(True), lambda x: x + 1, lambda x: x - 1, (x,))


def nested_rows() -> Any:
    rows = torch.nested.nested_tensor([torch.randn(5, 8), torch.randn(7, 8)], layout=torch.jagged, device="cuda")
    return rows * 2


REFUSED: dict[str, Callable[[], Any]] = {  # by what the error names
    r"cond is a kernel.*scaled_dot_product_attention": choose,
    r"_to_sparse.*to_dense": lambda: torch.eye(4, device="cuda").to_sparse(),
    r"torch.cuda.MemPool needs the driver": lambda: torch.cuda.MemPool(),
    r"torch.cuda.caching_allocator_alloc needs": lambda: torch.cuda.caching_allocator_alloc(1024),
    r"nested tensors are not simulated; use padding": nested_rows,
    r"to_dlpack gives GPU memory": lambda: torch.to_dlpack(torch.zeros(4, device="cuda")),
    r"__dlpack__ gives GPU memory": lambda: torch.from_dlpack(torch.zeros(4, device="cuda")),
    r"__cuda_array_interface__ gives": lambda: torch.zeros(4, device="cuda").__cuda_array_interface__,
}


@pytest.mark.parametrize("named", REFUSED)
def test_what_needs_a_gpu_is_refused_with_its_name_the_line_and_the_way_round(card, named):
    with pytest.raises(NotAvailable, match=named) as raised:
        REFUSED[named]()
    assert "test_unsupported.py, line" in str(raised.value)
    assert "lab.measure it" in str(raised.value)


def test_sensors_of_the_card_read_as_unknown(card):
    used = torch.cuda.device_memory_used()
    torch.zeros(3 << 20, dtype=torch.uint8, device="cuda")
    assert f"{torch.cuda.utilization()} %, {torch.cuda.temperature()} °C" == "? %, ? °C"
    assert torch.cuda.cudart().cudaMemGetInfo(0) == torch.cuda.mem_get_info()
    assert torch.cuda.device_memory_used() - used == 20 << 20 and not torch.cuda.can_device_access_peer(0, 0)


def test_the_host_may_still_be_handed_out(card):
    assert torch.equal(torch.from_dlpack(torch.arange(3)), torch.arange(3))


def test_a_profiler_of_cuda_records_the_host(card, capfd):
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        torch.zeros(4, device="cuda").sum()
    assert any(event.key == "aten::sum" for event in profile.key_averages())
    assert "CUDA event" not in capfd.readouterr().err

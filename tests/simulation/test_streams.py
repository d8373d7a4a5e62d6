"""Streams and events of a simulated GPU."""

import pytest
import torch

pytestmark = pytest.mark.usefixtures("no_gpu")
MiB = 1 << 20


def test_blocks_freed_on_a_stream_stay_its_own(card):
    """c10/cuda/CUDACachingAllocator.cpp: a pool compares streams first, so a second stream takes a second segment."""
    x = torch.empty(5 * MiB, dtype=torch.uint8, device="cuda")
    del x
    assert card.reserved == 20 * MiB
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() == side
        y = torch.empty(5 * MiB, dtype=torch.uint8, device="cuda")
    y.record_stream(torch.cuda.current_stream())
    assert card.reserved == 40 * MiB and torch.cuda.current_stream() == torch.cuda.default_stream()


def test_a_stream_has_a_cublas_workspace_of_its_own(card):
    x = torch.ones(16, 16, device="cuda")
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            x @ x
    assert card.allocated == 1024 + 2 * card.gpu.cublas_workspace


def test_events_ranges_and_random_states_are_there(card):
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    with torch.cuda.nvtx.range("step"):
        torch.ones(3, device="cuda")
    end.record()
    torch.cuda.synchronize()
    assert f"{1000 / start.elapsed_time(end):.1f} steps/s" == "? steps/s"
    torch.cuda.random.set_rng_state(torch.cuda.random.get_rng_state())
    assert torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["peak"] == 512
    assert torch.accelerator.max_memory_allocated() == 512 and torch.accelerator.current_device_index() == 0
    assert torch.version.cuda and "major=8" in str(torch.cuda.get_device_properties(0))

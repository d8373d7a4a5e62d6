"""What a simulated GPU says of its memory."""

import pytest
import torch

from llmlab.simulation.simulator import simulator

pytestmark = pytest.mark.usefixtures("no_gpu")


def test_statistics_are_those_of_the_caching_allocator():
    with simulator("T4") as sim:
        x = torch.empty(1000, 1000, device="cuda")  # 4 000 000 B: 7813 blocks of 512 B, in a segment of 20 MiB
        assert torch.cuda.memory_allocated() == sim.allocated == 7813 * 512
        assert torch.cuda.memory_reserved() == sim.reserved == 20 << 20
        del x
        assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated(0)) == (0, 7813 * 512)
        assert torch.cuda.mem_get_info() == (sim.gpu.memory - sim.gpu.context - (20 << 20), sim.gpu.memory)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats("cuda")
        assert torch.cuda.max_memory_reserved() == torch.cuda.max_memory_allocated() == 0
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == 1
        assert "CUDA memory summary" in torch.cuda.memory_summary()
    assert sim.timeline == (7813 * 512, 0)


def test_peaks_outlast_a_script_s_reset(card):
    torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    torch.cuda.reset_peak_memory_stats()
    assert torch.cuda.max_memory_allocated() == 0
    assert card.peak_allocated == card.peak_reserved == card.timeline.peak == 1 << 30
    card.reset_peak()
    assert card.peak_allocated == 0

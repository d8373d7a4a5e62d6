"""The same facts from a real GPU's allocator; run where there is one."""

import pytest
import torch

import llmlab as lab

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
RUN = lab.Training(micro_batch=2, seq_len=96)


def test_the_peaks_are_the_allocators_and_the_parts_add_up_to_them(gpt2):
    report = lab.measure(gpt2, RUN, device="cuda", repeats=2)
    assert report.outcome == "fits"
    assert report.peak_allocated == max(report.phases.values()) == sum(report.parts.values())
    assert report.peak_reserved >= report.peak_allocated
    assert report.peak_reserved % 2**21 == 0  # segments are whole multiples of 2 MiB
    assert min(report.parts.values()) > 0
    assert report.parts["weights"] >= 4 * lab.model(gpt2).parameters
    # What the events do not tell is less than the blocks that were not split.
    assert report.detail["other"].get("before the run, blocks not split", 0) < report.peak_allocated // 2


def test_allocated_is_the_same_every_time(gpt2):
    first, second = (lab.measure(gpt2, RUN, device="cuda", repeats=1) for _ in range(2))
    assert (first.phases, first.parts) == (second.phases, second.parts)


def test_running_out_is_an_outcome_and_leaves_the_gpu_usable(gpt2):
    total = torch.cuda.get_device_properties(0).total_memory
    before = torch.cuda.memory_allocated()
    torch.cuda.set_per_process_memory_fraction(256 * 2**20 / total)
    try:
        report = lab.measure(gpt2, lab.Training(micro_batch=256, seq_len=128), device="cuda", repeats=1)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert (report.outcome, report.where) == ("out of memory", "forward")
    assert torch.cuda.memory_allocated() <= before  # less where products of earlier tests had left cuBLAS's workspaces
    assert lab.measure(gpt2, RUN, device="cuda", repeats=1).outcome == "fits"


def test_a_meter_says_what_torch_says():
    with lab.meter("cuda") as m:
        a = torch.empty(1000, device="cuda")  # 4096 B: requests are rounded up to 512
        assert m.allocated == torch.cuda.memory_allocated()
        before = m.allocated
        b = torch.empty(10, device="cuda")
        assert m.allocated - before == 512
        del b
        assert m.peak_allocated == before + 512
        m.reset_peak()
        assert m.peak_allocated == before
    assert m.timeline[-3:] == (before, before + 512, before)
    assert m.reserved >= m.allocated >= a.nbytes

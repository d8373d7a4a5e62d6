"""The allocator's statistics."""

import re

import torch

from llmlab.base.units import KiB, MiB
from llmlab.simulation.allocator.caching import Allocator


def used_allocator():
    allocator = Allocator()
    addresses = [allocator.malloc(size) for size in (100, 3 * MiB, 5 * MiB, 700 * KiB, 64 * MiB)]
    allocator.free(addresses[1])
    allocator.free(addresses[3])
    return allocator


def test_stats_have_the_keys_that_torch_documents():
    documented = set()
    for name in re.findall(r'^    - ``"(.*?)"``', torch.cuda.memory_stats.__doc__, re.MULTILINE):
        choices = re.findall(r"\{(.*?)\}", name)
        names = [re.sub(r"\{.*?\}", "{}", name)]
        for choice in choices:
            names = [each.replace("{}", one, 1) for each in names for one in choice.split(",")]
        documented |= set(names)
    # The documentation's "allocated" is "allocation" in what the function returns; private pools are not simulated.
    documented = {re.sub(r"^allocated\.", "allocation.", name) for name in documented}
    documented -= {"reserved_bytes_by_private_pools"}
    assert len(documented) > 100
    given_keys = set(used_allocator().stats())
    assert documented <= given_keys
    assert given_keys - documented <= {
        "num_sync_all_streams",
        "num_device_alloc",
        "num_device_free",
        "num_oom_rejections",
    }


def test_torch_prints_its_memory_summary_from_them(monkeypatch):
    monkeypatch.setattr(torch.cuda.memory, "memory_stats", lambda device=None: used_allocator().stats())
    monkeypatch.setattr(torch.cuda.memory, "_get_device_index", lambda device, optional=False: 0)
    rows = [line.split("|") for line in torch.cuda.memory_summary().splitlines()]
    table = {row[1].strip(): [cell.strip() for cell in row[2:6]] for row in rows if len(row) > 5}
    assert table["GPU reserved memory"][0] in ("88064 KiB", "86 MiB")  # 2 + 20 + 64 MiB
    assert table["Allocations"] == ["3", "5", "5", "2"]
    assert table["GPU reserved segments"] == ["3", "3", "3", "0"]
    assert table["Non-releasable allocs"][0] == "3"  # what is free beside 100 B, and on both sides of 5 MiB


def test_peaks_and_totals_start_again_when_asked():
    allocator = used_allocator()
    allocator.statistics.reset_accumulated()
    stats = allocator.stats()
    assert stats["allocation.all.allocated"] == stats["num_device_alloc"] == 0
    assert stats["allocation.all.current"] == 3
    assert stats["max_split_size"] == -1

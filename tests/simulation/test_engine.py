"""The engine: whose memory a storage and a kernel's scratch are."""

import pytest
import torch

from llmlab.base.errors import NotAvailable
from llmlab.simulation.allocator.caching import Allocator
from llmlab.simulation.allocator.memory import HostMemory
from llmlab.simulation.devices import GPU_DEVICE
from llmlab.simulation.engine.engine import HOST, Engine, notes_of


def test_a_storage_takes_memory_once_and_until_its_last_view_dies():
    engine = Engine(HOST, HostMemory())
    with engine:
        x = torch.empty(8)
        view = x[2:]
        del x
        assert engine.memory.allocated == 32
        del view
        assert engine.memory.allocated == 0


def test_a_storage_that_grows_is_allocated_anew_before_the_old_one_is_freed():
    """native/cuda/Resize.cpp, resize_bytes_cuda."""
    engine = Engine(HOST, HostMemory())
    with engine:
        x = torch.empty(8)
        x.resize_(16)
    assert [event.size for event in engine.events] == [32, 64, -32]
    assert [event.time for event in engine.events] == [1, 2, 3] and engine.address(x) == 96  # 64 + 32


def test_memory_that_is_forgotten_stays_and_no_death_counts_after_the_end():
    engine = Engine(HOST, HostMemory())
    with engine:
        kept, counted, ended = (torch.empty(8) for _ in range(3))
        address = engine.forget(kept)
        del kept, counted
        assert engine.memory.allocated == 64
        engine.free(address)
        engine.stop()
        del ended
    assert engine.memory.allocated == 32


def test_more_than_there_is_raises_torchs_error_and_what_was_asked_for_is_known():
    engine = Engine(GPU_DEVICE, Allocator(20 << 20, total=1 << 30), workspaces={})
    with engine:
        held = torch.empty(1 << 20, device=GPU_DEVICE)
        with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 32\.00 MiB\. GPU 0 has"):
            torch.empty(8 << 20, device=GPU_DEVICE)
        assert held.numel() == 1 << 20
    assert (engine.refused.requested, engine.refused.allocated) == (32 << 20, 4 << 20)
    assert engine.refused.lacked == 32 << 20  # the segment of 20 MiB is in use


def test_numbers_are_read_where_they_are_known():
    engine = Engine(HOST, HostMemory())
    with engine:
        known, unknown = torch.tensor(7), torch.rand(1)
        assert known.item() == 7
        with pytest.raises(NotAvailable, match="needs the values of a tensor"):
            unknown.item()
        engine.placeholder = 1.0
        assert unknown.item() == 1.0
        with pytest.raises(NotAvailable):
            torch.rand(8).argmax().item()


def test_notes_name_the_operators_whose_scratch_is_unknown_and_the_kernels_launched_most():
    engine = Engine(GPU_DEVICE, Allocator(), workspaces={})
    with engine:
        torch.empty(8, device=GPU_DEVICE).cumsum(0)
    for name, count in (("a", 1), ("b", 4), ("c", 3), ("d", 2)):
        for _ in range(count):
            engine.launched(name)
    engine.launched("timed", moved=8)
    engine.uncounted["cuDNN"] = "aten.convolution.default"
    triton, library, scratch = notes_of(engine)
    assert str(triton).endswith("(number of launches): b (4), c (3), d (2).")
    assert str(library).startswith("aten.convolution.default: the workspace of cuDNN is not counted")
    assert str(scratch).startswith("aten.cumsum.default: only its output is counted")


def test_the_clock_goes_on_from_where_it_is_set():
    engine = Engine(HOST, HostMemory())
    engine.place = lambda: "here"
    engine.pass_to(40)
    address = engine.malloc(100)
    assert engine.malloc(0) == 0 and engine.now() == 42
    engine.free(address)
    assert [(event.time, event.size) for event in engine.events] == [(41, 100), (43, -100)]
    assert engine.places == {41: "here"} and engine.requests == {41: 100}

import pytest
import torch

from llmlab import NotAvailable
from llmlab.recording.events import CPUEvents, exclusive
from llmlab.recording.parts import Event
from llmlab.recording.snapshot import events_of_trace


def test_cpu_events_are_the_allocators_bytes_and_addresses():
    source = CPUEvents()
    source.start()
    a = torch.empty(1000)
    address = a.data_ptr()
    b = torch.empty(10, dtype=torch.float64)
    del a
    events = source.stop()
    assert [event.size for event in events] == [4000, 80, -4000]
    assert events[0].address == events[2].address == address
    assert events[1].address == b.data_ptr()
    assert events == sorted(events, key=lambda event: event.time)


def test_operators_inside_a_user_scope_are_recorded_too():
    source = CPUEvents()
    source.start()
    with torch.profiler.record_function("outer"), torch.profiler.record_function("inner"):
        tensor = torch.empty(100)
    assert [event.size for event in source.stop()] == [tensor.untyped_storage().nbytes()]


def test_what_was_there_before_is_no_event():
    old = torch.empty(1000)
    before = -old.nbytes
    source = CPUEvents()
    source.start()
    del old
    new = torch.empty(3)
    sizes = [event.size for event in source.stop()]
    # torch keeps the sizes of earlier recordings: if one left a tensor alive at an address that `old` got later, the
    # free of `old` has the size of that tensor.
    assert sizes[-1] == new.nbytes and before not in sizes


def test_a_second_profiler_in_the_thread_is_refused():
    source = CPUEvents()
    source.start()
    with pytest.raises(NotAvailable, match="already running in this thread"):
        CPUEvents().start()
    source.stop()
    assert not torch._C._autograd._profiler_enabled()


def test_a_cuda_trace_counts_blocks_of_512_bytes_until_their_free_is_completed():
    trace = [
        {"action": "segment_alloc", "addr": 4096, "size": 2 << 20, "time_us": 1, "stream": 0, "frames": []},
        {"action": "alloc", "addr": 4096, "size": 1, "time_us": 2, "stream": 0, "frames": []},
        {"action": "alloc", "addr": 8192, "size": 1024, "time_us": 3, "stream": 0, "frames": []},
        {"action": "free_requested", "addr": 4096, "size": 1, "time_us": 4, "stream": 0, "frames": []},
        {"action": "free_completed", "addr": 4096, "size": 1, "time_us": 5, "stream": 0, "frames": []},
        {"action": "oom", "size": 1 << 40, "device_free": 10, "time_us": 6, "stream": 0, "frames": []},
        {"action": "snapshot", "addr": 0, "size": 0, "time_us": 7, "stream": 0, "frames": []},
    ]
    assert events_of_trace(trace) == [Event(2000, 4096, 512), Event(3000, 8192, 1024), Event(5000, 4096, -512)]


def test_one_recording_at_a_time_and_the_next_one_after_it():
    refused = pytest.raises(NotAvailable, match=r"meter\(\) inside measure\(\)")
    with exclusive("measure()"), refused, exclusive("meter()"):
        pass
    with exclusive("meter()"):
        pass

"""The figures of the chapter on the allocator say in their alternative text what they draw."""

from dataclasses import replace

import llmlab as lab
from llmlab.base.units import GiB
from llmlab.course.figures.allocator import (
    Fragmented,
    draw_counters,
    draw_fragmentation,
    draw_largest_segments,
    draw_requests,
    draw_segments,
    draw_verdicts,
)
from llmlab.course.job import GPU, MODEL, job
from llmlab.course.techniques.caching_allocator import CachingAllocator, MiB
from llmlab.formulas.verdict import KEPT, verdict


def filled(*sizes, freed=()):
    allocator = CachingAllocator()
    blocks = [allocator.malloc(size * MiB) for size in sizes]
    for number in freed:
        allocator.free(blocks[number])
    return allocator


def test_the_counters_are_those_of_the_report():
    report = lab.estimate(MODEL, job("02-memory-anatomy"), GPU)
    counted = replace(report, peak_allocated=2 * GiB, peak_reserved=3 * GiB, process=4 * GiB)
    alt = draw_counters({"the job": counted}).alt
    assert "the job: 2.00 GiB of tensors, 3.00 GiB of segments, 4.00 GiB of process" in alt


def test_segments_and_requests_tell_allocated_and_reserved_apart():
    allocator = filled(3, 5, 4, 6, 21, 11, freed=(1, 3))
    assert "41 MiB allocated in 3 segments of 54 MiB" in draw_segments({"now": allocator.segments}).alt
    assert "9 of 20 MiB allocated" in draw_requests({"one": filled(9).segments}).alt


def test_a_fragmentation_names_the_free_bytes_and_the_outcomes():
    pattern = Fragmented(filled(*[5] * 8, freed=(0, 2, 4, 6)).segments, 18, {"as it is": "out of memory"})
    assert "20 MiB free, 18 MiB requested; as it is: out of memory" in draw_fragmentation({"holes": pattern}).alt


def test_verdicts_are_ranges():
    gpu = lab.gpu("A100-80GB")
    found = verdict(40 * GiB, gpu, holes=KEPT.holes)
    alt = draw_verdicts({gpu.name: (found, gpu.memory)}).alt
    assert "A100-80GB: 40.5 to 45.5 GiB needed, 79.3 GiB there, fits" in alt


def test_the_largest_segments_are_divided_by_the_operators_that_allocated_them():
    blocks = [{"size": 8 * MiB, "state": "active_allocated"}, {"size": 16 * MiB, "state": "inactive"}]
    segment = {"address": 0, "total_size": 24 * MiB, "blocks": blocks}
    events = [{"action": "alloc", "addr": 0, "frames": [{"name": "aten.zeros_like.default"}]}]
    snapshot = {"segments": [segment, {**segment, "total_size": 2 * MiB}], "device_traces": [events]}
    assert draw_largest_segments({"a step": snapshot}, 24 * MiB).alt == "Segments of 24 MiB. a step: 8 MiB used."

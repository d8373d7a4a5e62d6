"""The drawings of the page on how a GPU runs a kernel show the numbers that they are given."""

from llmlab.course.figures import execution
from llmlab.course.figures.execution import Span


def test_the_lanes_tell_how_long_the_gpu_works():
    spans = [Span("CPU", "1", 0, 1), Span("GPU", "1", 1, 4), Span("CPU", "wait", 1, 4)]
    assert "one kernel: 4 µs, in which the GPU works for 3" in execution.draw_lanes({"one kernel": spans}, "µs").alt


def test_a_block_runs_on_a_multiprocessor_with_its_memories():
    alt = execution.draw_grid("T4", 40, "256 KiB", "64 KiB", "4 MiB").alt
    assert "256 KiB of registers and 64 KiB of shared memory" in alt and "40 multiprocessors, 4 MiB of L2" in alt


def test_a_column_needs_a_sector_per_thread():
    assert "4 sectors for the warp" in execution.draw_sectors().alt and "makes 32" in execution.draw_sectors().alt


def test_tiles_name_their_size():
    assert execution.draw_tiles("4 KiB each").alt.endswith("4 KiB each.")


def test_levels_are_listed_from_the_largest_tile():
    alt = execution.draw_levels([("128 × 128", "a block", "shared memory"), ("8 × 8", "a thread", "registers")]).alt
    assert alt.endswith("128 × 128: a block, its inputs in shared memory; 8 × 8: a thread, its inputs in registers.")

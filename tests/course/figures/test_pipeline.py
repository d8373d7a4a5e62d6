"""The drawings on pipeline parallelism show the numbers that they are given."""

import pytest

from llmlab.course.figures.pipeline import (
    MEMORY,
    STEP,
    draw_in_flight,
    draw_schedules,
    draw_stage_memory,
    draw_stages,
    draw_steps,
)
from llmlab.course.techniques.pipeline_schedules import dualpipe, schedule, times


def test_stages_name_their_layers_weights_and_messages():
    stages = {f"GPU {n}": (f"layers {n}–{n}", (n + 1) * 2**30) for n in range(4)}
    alt = draw_stages(stages, 64 * 2**20).alt
    assert "GPU 3 has layers 3–3, 4.0 GiB" in alt and "64 MiB" in alt


def test_schedules_print_how_long_ranks_wait():
    plans = {"GPipe": times(schedule("gpipe", 4, 8)), "DualPipe": times(dualpipe(4, 8))}
    assert "GPipe: done at 33, 27.3% of the time waiting" in draw_schedules(plans).alt


@pytest.mark.parametrize("name, most", [("gpipe", 8), ("1f1b", 4)])
def test_the_first_gpu_stores_as_many_micro_batches_as_the_schedule_says(name, most):
    assert f"at most {most}." in draw_in_flight({name: times(schedule(name, 4, 8))}).alt


def test_stage_memory_sums_its_parts():
    parts = dict(zip(MEMORY, (30 * 2**30, 20 * 2**30, 2**30), strict=True))
    assert "run, GPU 1: 51.0 GiB" in draw_stage_memory({"run": [parts, parts]}, 79 * 2**30).alt


def test_steps_sum_their_parts():
    steps = {"pp = 8": dict(zip(STEP, (8.2, 1.8, 4.0, 0.1, 0.1, 0.0), strict=True))}
    assert "pp = 8: 8.2 + 1.8 + 4.0 + 0.1 + 0.1 + 0.0 = 14.2 s" in draw_steps(steps).alt

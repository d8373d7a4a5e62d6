"""The drawings on pipeline parallelism show the numbers that they are given."""

from llmlab.course.figures.pipeline import draw_schedules
from llmlab.course.techniques.pipeline_schedules import dualpipe, schedule, times


def test_schedules_print_how_long_ranks_wait():
    plans = {"GPipe": times(schedule("gpipe", 4, 8)), "DualPipe": times(dualpipe(4, 8))}
    assert "GPipe: done at 33, 27.3% of the time waiting" in draw_schedules(plans).alt

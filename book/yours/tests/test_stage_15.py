"""Stage 15, Pipeline parallelism: your clock measures the bubble of 1F1B, and your stages are balanced."""

import pytest
from yours import pipeline

from llmlab.course.techniques.pipeline_schedules import bubble_formula, needs, schedule
from llmlab.notebook.exercises import pipeline as facts
from llmlab.notebook.quiz import broken


def test_done_at():
    assert broken(pipeline.done_at, facts.done_at) == {}


def test_cut():
    assert broken(pipeline.cut, facts.cut) == {}


@pytest.mark.parametrize("pp, m", [(2, 4), (8, 16)])
def test_the_bubble_of_1f1b(pp, m):
    plan = schedule("1f1b", pp, m)
    end = pipeline.done_at(plan, lambda op: needs(op, pp), lambda op: 1 if op.kind == "F" else 2)
    assert 1 - 3 * m / end == pytest.approx(bubble_formula("1f1b", pp, m))


def test_a_short_last_stage_balances_a_long_head():
    layers = [1.0] * 126 + [2.5]
    sizes = pipeline.cut(layers, 8)
    assert sum(sizes) == 127 and sizes[-1] == 15 and max(sizes) == 16  # the last stage takes 14 + 2.5

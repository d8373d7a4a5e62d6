"""The bars of an update are the seconds of the reports, and their parts add up to it."""

import re
from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.course.figures.step_times import draw_step_times
from llmlab.course.job import GPU, MODEL, job


def test_the_parts_of_each_bar_add_up_to_the_seconds_of_the_estimate():
    run = job("10-flash-attention")
    reports = {name: lab.estimate(MODEL, replace(run, attention=name), GPU) for name in ("eager", "efficient")}
    alt = draw_step_times(reports, digits=3).alt
    for name, report in reports.items():
        *parts, total = map(float, re.search(rf"{name}: ([\d.]+) \+ ([\d.]+) \+ ([\d.]+) = ([\d.]+) s", alt).groups())
        assert total == pytest.approx(report.step_seconds, abs=0.001) and sum(parts) == pytest.approx(total, abs=0.003)

"""The drawings of the chapter on launching say in words what they draw."""

from llmlab.course.figures import launch
from llmlab.formulas.reliability import time_shares


def test_nodes():
    alt = launch.draw_nodes(64, 8).alt
    assert "RANK is 0 to 511" in alt and "nodes 0, 1 and 63" in alt


def test_a_restart_repeats_the_steps_after_the_checkpoint():
    alt = launch.draw_restart(died=6, saved=5, steps=8).alt
    assert "compute steps 6 to 8" in alt


def test_the_interval():
    assert "restart of R" in launch.draw_interval().alt


def test_losses_have_a_bar_for_each_job():
    shares = time_shares(600, 10, 3600, 300)
    alt = launch.draw_losses({"one": shares, "two": shares}).alt
    assert alt.count("saves") == 2 and f"restarts {shares['restarts']:.2%}" in alt

"""The drawings of the page on learning rates show the losses that they are given."""

from llmlab.course.figures.learning_rates import plot_rates, plot_schedules, plot_seeds


def test_means_and_extremes_are_in_the_alternative_text():
    assert "AdamW: 4.50 at 0.001, 4.00 at 0.01" in plot_rates({"AdamW": {0.01: [3.9, 4.1], 0.001: [4.5, 4.5]}}).alt
    assert "Lion 4.20, from 4.10 to 4.30" in plot_seeds({"Lion": [4.1, 4.3], "SGD": [5.0, 5.2]}).alt


def test_a_schedule_is_read_at_half_of_the_run():
    assert "over 2 steps. At half: linear 0.50" in plot_schedules({"linear": [1.0, 0.5, 0.0]}).alt

"""The drawings of serving show the times and the batches that they are given."""

from llmlab.course.figures.serving import Place, Steps, plot_frontier, plot_guesses, plot_late_prompt, plot_request
from llmlab.course.figures.serving import plot_slots


def test_a_request_has_the_three_times_that_users_notice():
    alt = plot_request(0.03, 0.06, [0.01, 0.01, 0.05, 0.01], late=2).alt
    assert "TTFT 90 ms" in alt and "ITL 50 ms" in alt and "TPOT 20 ms = 80 ms / 4" in alt


def test_empty_slots_are_counted():
    full = [Place("A", 0, 0, 4), Place("B", 1, 0, 4)]
    half = [Place("A", 0, 0, 4), Place("B", 1, 2, 4)]
    alt = plot_slots({"one": full, "two": half}, {"A": 0, "B": 2}, slots=2).alt
    assert "one: 4 steps, 0% of the slots empty" in alt and "two: 4 steps, 25% of the slots empty" in alt


def test_the_longest_step_is_named():
    steps = [(0.01, False), (0.09, True), (0.01, False)]
    assert "whole: steps of up to 90 ms" in plot_late_prompt([Steps("whole", steps, 0.005, 0.1)], 4096).alt


def test_a_frontier_names_its_last_point():
    alt = plot_frontier({"H100": [(145, 140, 1), (50, 4000, 80), (20, 5000, 256)]}, least=50).alt
    assert "H100: 5,000 tokens/s with 256 users" in alt and "50 tokens/s are asked for" in alt


def test_a_round_shows_the_guesses_that_were_accepted():
    chances = [(0.5, 0.6), (0.5, 0.1), (0.2, 0.2), (0.1, 0.3)]
    alt = plot_guesses("the", ["a", "b", "c", "d"], chances, 1, "x").alt
    assert "1 are accepted" in alt and "adds 'x'" in alt

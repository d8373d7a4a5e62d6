"""The drawings of serving show the times and the batches that they are given."""

from llmlab.course.figures.serving import plot_guesses


def test_a_round_shows_the_guesses_that_were_accepted():
    chances = [(0.5, 0.6), (0.5, 0.1), (0.2, 0.2), (0.1, 0.3)]
    alt = plot_guesses("the", ["a", "b", "c", "d"], chances, 1, "x").alt
    assert "1 are accepted" in alt and "adds 'x'" in alt

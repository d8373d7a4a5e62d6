"""The drawings of the page on LoRA show the numbers that they are given."""

from llmlab.course.figures.lora import plot_tradeoff

METHODS = {
    "all weights": {1e-4: [(3.0, 2.0)], 3e-4: [(2.5, 2.4), (2.7, 2.6)], 1e-3: [(2.8, 3.0)]},
    "rank 16": {1e-3: [(3.1, 2.1)], 3e-3: [(3.0, 2.2), (3.2, 2.4)], 1e-2: [(9.0, 9.0)]},
}


def test_means_over_the_seeds_are_in_the_alternative_text_and_a_run_that_diverged_is_not_drawn():
    picture = plot_tradeoff(METHODS, (4.0, 1.9))
    assert "1.90 and 4.00 before training" in picture.alt
    assert "all weights: 2.60 and 2.50; rank 16: 3.10 and 2.30" in picture.alt
    assert max(max(line.get_ydata()) for line in picture.axes[0].lines) < 9

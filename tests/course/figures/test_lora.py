"""The drawings of the page on LoRA show the numbers that they are given."""

from llmlab.course.figures.lora import draw_nf4, draw_update, plot_bytes_per_weight, plot_rates, plot_tradeoff

METHODS = {
    "all weights": {1e-4: [(3.0, 2.0)], 3e-4: [(2.5, 2.4), (2.7, 2.6)], 1e-3: [(2.8, 3.0)]},
    "rank 16": {1e-3: [(3.1, 2.1)], 3e-3: [(3.0, 2.2), (3.2, 2.4)], 1e-2: [(9.0, 9.0)]},
}


def test_the_table_of_bytes_is_in_the_alternative_text():
    assert "W, frozen 32, 0, 0, 0" in draw_update(4096, 16, 2048, {"W, frozen": [32, 0, 0, 0]}).alt


def test_bytes_per_weight_are_in_the_alternative_text():
    assert "q_proj: 2.00 at rank 1, 18.0 at rank 4" in plot_bytes_per_weight([1, 2, 4], {"q_proj": [2, 3, 18]}, 16).alt


def test_the_best_rate_is_that_of_the_first_seed():
    assert "all weights: 2.50 at 0.0003; rank 16: 3.00 at 0.003" in plot_rates(METHODS, 4.0).alt


def test_means_over_the_seeds_are_in_the_alternative_text_and_a_run_that_diverged_is_not_drawn():
    picture = plot_tradeoff(METHODS, (4.0, 1.9))
    assert "1.90 and 4.00 before training" in picture.alt
    assert "all weights: 2.60 and 2.50; rank 16: 3.10 and 2.30" in picture.alt
    assert max(max(line.get_ydata()) for line in picture.axes[0].lines) < 9


def test_bits_per_weight_are_in_the_alternative_text():
    assert "NF4 4.500" in draw_nf4({"bf16": [16.0], "NF4": [4.0, 0.5]}, list(range(16)), 0.13, 10**9).alt

"""The drawings of the page on learning rates that carry over show the numbers that they are given."""

from llmlab.course.figures.tuning import plot_losses, plot_singular_values, plot_sums, plot_widths


def test_sums_are_in_the_alternative_text():
    assert "start: 2; update: 4" in plot_sums({"start": [1, 1, 1, -1], "update": [-1.0] * 4}).alt


def test_the_best_rate_is_that_of_the_lowest_mean():
    picture = plot_widths({"AdamW": {32: {-6: [4.0, 5.0], -5: [4.4, 4.5], -4: [5.0, 5.1]}}, "Muon": {64: {-3: [1.0]}}})
    assert "AdamW, width 32: 4.45 at -5. Muon, width 64: 1.00 at -3" in picture.alt
    assert len(picture.axes) == 2


def test_the_highest_loss_is_in_the_alternative_text():
    assert "bad batch at step 2. The highest losses: none 3.00" in plot_losses(
        range(4), {"none": [1.0, 1.0, 3.0, 2.0]}, event=2, name="bad batch"
    ).alt


def test_singular_values_before_and_after_are_in_the_alternative_text():
    assert "from 1 to 0.1, and V transposed" in plot_singular_values([1.0, 0.1], [1.1, 0.7]).alt
    assert "from 1.10 to 0.70" in plot_singular_values([1.0, 0.1], [1.1, 0.7]).alt

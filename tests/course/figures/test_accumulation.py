"""The drawings of gradient accumulation show the bytes and the groups that they are given."""

from llmlab.course.figures.accumulation import Cut, plot_groups, plot_passes

GIB = 2**30


def test_later_passes_stand_on_the_gradients_of_the_first():
    whole = Cut("whole", 1, 14 * GIB, 4 * GIB, 28 * GIB, 4 * GIB)
    quarters = Cut("quarters", 4, 14 * GIB, 4 * GIB, 7 * GIB, 4 * GIB)
    assert (whole.peak, quarters.peak) == (42 * GIB, 25 * GIB)
    alt = plot_passes([whole, quarters], 15 * GIB, "T4").alt
    assert "1 peak, the highest 42.00 GiB" in alt and "4 peaks, the highest 25.00 GiB" in alt


def test_a_micro_batch_without_an_update_is_counted():
    alt = plot_groups([("leaks", [[1, 1, 2], [2, 2, None]])]).alt
    assert "updates of 2, 3 micro-batches, and 1 in none" in alt

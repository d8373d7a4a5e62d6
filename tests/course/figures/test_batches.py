"""The drawing of batches counts positions and padding."""

from llmlab.course.figures.batches import draw_batches


def test_a_row_is_padded_to_the_longest_row_of_its_own_batch():
    alt = draw_batches({"one": [[[30], [10]], [[20]]], "packed": [[[30], [10, 20]]]}).alt
    assert "one: 80 positions, 25% padding" in alt
    assert "packed: 60 positions, 0% padding" in alt

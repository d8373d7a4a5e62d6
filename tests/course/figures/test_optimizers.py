"""The drawings of the chapter on optimizers show the sizes that they are given."""

from llmlab.course.figures.optimizers import Block, Layout, plot_blocks, plot_factors, plot_states, plot_update


def test_states_and_temporaries_are_in_the_alternative_text():
    assert "Lion 4.000" in plot_states({"Lion": ("m", 4), "SGD": ("", 0)}).alt
    assert "foreach 4.0" in plot_update([Layout("foreach", 4.0, ["√v"] * 6)], 16).alt


def test_a_matrix_of_rank_1_has_no_error():
    columns = [1.0, 2.0, 3.0, 4.0, 5.0, 9.0]
    squares = [columns, [3 * column for column in columns]]
    assert "differs from the matrix by 0%" in plot_factors(squares, [4.0, 12.0], [2 * one for one in columns]).alt


def test_bytes_that_are_zero_are_counted():
    assert "2 of 3 bytes are 0" in plot_blocks([Block("a", [1e-9, 1e-8, 1.0], [0, 0, 255], [0.0, 0.0, 1.0])]).alt

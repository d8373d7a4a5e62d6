"""The drawings of the chapter on optimizers show the sizes that they are given."""

from llmlab.course.figures.optimizers import plot_factors


def test_a_matrix_of_rank_1_has_no_error():
    columns = [1.0, 2.0, 3.0, 4.0, 5.0, 9.0]
    squares = [columns, [3 * column for column in columns]]
    assert "differs from the matrix by 0%" in plot_factors(squares, [4.0, 12.0], [2 * one for one in columns]).alt

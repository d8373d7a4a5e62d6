"""The ladder's picture: a mark for each way at its value, the numbers in words, and what cannot be drawn refused."""

import pytest

from llmlab.base.errors import SpecError
from llmlab.plots import plot_ladder

ROWS = {"softmax": {"naive": 64, "fused": 4}, "RoPE": {"naive": 20, "fused": 5.5}}


def test_each_way_has_its_mark_at_its_value_in_its_row():
    (ax,) = plot_ladder(ROWS, "bytes (readings of x)").axes
    marks = {(line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines if len(line.get_xdata()) == 1}
    assert marks == {(64, 0), (4, 0), (20, 1), (5.5, 1)}
    assert [label.get_text() for label in ax.get_yticklabels()] == ["softmax", "RoPE"]
    assert {text.get_text() for text in ax.texts} == {"64", "4", "20", "5.5"}


def test_its_words_are_its_numbers():
    picture = plot_ladder(ROWS, "bytes (readings of x)")
    assert picture.alt == "bytes (readings of x). softmax: naive 64, fused 4. RoPE: naive 20, fused 5.5."


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({}, "0 rows"),
        ({"a": {"x": 1}, "b": {"y": 1}}, "the same 1 to 5 ways"),
        ({"a": {"x": 0.0}}, "a value <= 0"),
    ],
)
def test_what_cannot_be_drawn_is_refused(rows, message):
    with pytest.raises(SpecError, match=message):
        plot_ladder(rows, "bytes (GiB)")

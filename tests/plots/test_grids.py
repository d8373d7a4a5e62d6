"""The pictures of number formats and of what bits cost: they show each value, and say in words what they show."""

import numpy as np
import pytest
from matplotlib.text import Text

from llmlab import plots
from llmlab.base.errors import SpecError


def grids():
    sample = np.random.default_rng(0).standard_normal(2000) / 4
    return plots.plot_grids(sample.tolist(), {"ternary": [-1, 0, 1], "far": [-1, 0.0, 0.001, 1]}, "weight / largest")


def tradeoff(**how):
    lines = {"RTN": [(2.0, 60.0), (4.0, 22.0)], "GPTQ": [(2.0, 30.0), (4.0, 21.0)]}
    return plots.plot_tradeoff(lines, {"NF4": (4.5, 20.5)}, "bits a weight", "perplexity", **how)


def test_each_value_of_a_grid_is_a_mark_and_the_unused_are_counted():
    picture = grids()
    marks = [len(found.get_segments()) for found in picture.axes[1].collections]
    assert marks == [1, 3, 1, 4], "a line and its marks, twice"
    assert "ternary: 3 values from -1 to 1, 3 of them nearest to some weight" in picture.alt
    assert [label.get_text() for label in picture.axes[1].get_yticklabels()] == ["ternary", "far"]


def test_the_tradeoff_draws_each_point_and_names_each_method():
    picture = tradeoff(baseline=("16 bits", 20.0))
    drawn = {tuple(xy) for line in picture.axes[0].lines for xy in line.get_xydata().tolist()}
    assert {(2.0, 60.0), (4.0, 22.0), (2.0, 30.0), (4.0, 21.0), (4.5, 20.5)} <= drawn
    assert {text.get_text() for text in picture.legends[0].get_texts()} == {"RTN", "GPTQ"}
    assert (
        "16 bits 20." in picture.alt and "RTN: 60 at 2, 22 at 4." in picture.alt and "NF4: 20.5 at 4.5." in picture.alt
    )


def test_what_is_above_the_top_is_drawn_at_it():
    drawn = [xy for line in tradeoff(top=40.0).axes[0].lines for xy in line.get_xydata().tolist()]
    assert [2.0, 40.0] in drawn and [2.0, 60.0] not in drawn and "60 at 2" in tradeoff(top=40.0).alt


def test_points_close_together_are_named_in_one_stack_from_the_top():
    near = {"low": (4.25, 20.0), "high": (4.5, 22.0), "far": (8.0, 20.0)}
    assert plots.curve.neighbours(near) == [["high", "low"], ["far"]]


@pytest.mark.parametrize("picture", [grids, tradeoff])
def test_text_is_legible(picture):
    for text in picture().findobj(Text):
        if text.get_text():
            assert plots.canvas.contrast(text.get_color(), plots.canvas.PANEL) >= 4.5, text.get_text()
            assert text.get_fontsize() >= 9, text.get_text()


@pytest.mark.parametrize(
    ("draw", "says"),
    [
        (lambda: plots.plot_grids([], {"a": [1]}, "x"), "0 numbers"),
        (lambda: plots.plot_grids([1.0], {"a": []}, "x"), "none of them empty"),
        (lambda: plots.plot_tradeoff({}, {}, "x", "y"), "0 points"),
        (lambda: plots.plot_tradeoff({"a": [(1, 1)]}, {}, "", "y"), "a name for both axes"),
        (lambda: plots.plot_tradeoff({"a": [(1, 0)]}, {}, "x", "y"), "y <= 0"),
        (lambda: plots.plot_tradeoff({str(i): [(1, 1)] for i in range(8)}, {}, "x", "y"), "8 lines"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw, says):
    with pytest.raises(SpecError, match=says):
        draw()

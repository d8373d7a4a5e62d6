"""The drawings of the last chapter show the jobs, the parts and the lives that they are given."""

from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from llmlab.course.figures.capstone import Rung, draw_lives, draw_look_back, draw_script
from llmlab.plots.canvas import PALETTE


def colours(picture):
    """The colour of each box, in the order in which they were drawn."""
    return [to_hex(box.get_facecolor()) for box in picture.axes[0].patches if isinstance(box, Rectangle)]


def test_a_state_that_does_not_fit_is_marked():
    start, end = Rung("start", 20 * 2**30, 10 * 2**30, "slow"), Rung("end", 5 * 2**30, 10 * 2**30, "fast")
    picture = draw_look_back([("a job", start, end)])
    assert "a job, start: 20.00 GiB, slow; a job, end: 5.00 GiB, fast" in picture.alt
    assert colours(picture) == [PALETTE[3].lower(), PALETTE[2].lower()]


def test_parts_are_drawn_with_their_files_and_seconds():
    picture = draw_script([("tokens", "tokens.bin", 0.5), ("serving", "", 1.25)])
    assert "tokens writes tokens.bin, 0.5 s" in picture.alt and "serving: 1.2 s" in picture.alt


def test_steps_that_a_life_repeats_have_another_colour():
    picture = draw_lives([(1, 7), (6, 10)], steps=10, every=5)
    assert "life 1: steps 1 to 7; life 2: steps 6 to 10" in picture.alt
    assert colours(picture) == [PALETTE[2].lower(), PALETTE[3].lower(), PALETTE[2].lower()]

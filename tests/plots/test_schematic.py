"""A drawing's words are legible: each fits its box and the drawing, lies on no other, and stands out."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.text import Text

from llmlab.base.errors import SpecError
from llmlab.plots.canvas import INK, PALETTE, PANEL, SMALL, WHITE, contrast
from llmlab.plots.schematic import box, finished, grid, label, link, rank, sketch, strip, tensor


def everything():
    picture, ax = sketch(300)
    rank(ax, 8, 8, 180, 80, "rank 0")
    box(ax, 20, 36, 80, 30, "q, k, v")
    link(ax, (100, 50), (240, 50), "12.5 MiB")
    tensor(ax, 240, 36, 100, 30, "T", "h", "input", PALETTE[5])
    strip(ax, 8, 120, [(3, "3", PALETTE[0]), (5, "5 free", WHITE)], scale=40)
    grid(ax, 8, 160, [[("a", PALETTE[1]), ("b", PALETTE[2])], [("", WHITE), ("c", PALETTE[6])]], 50, 30)
    label(ax, 8, 260, "31.5 MiB allocated", weight="bold")
    return picture, ax


def test_a_drawing_is_a_phones_page_wide_and_says_what_it_shows():
    picture = finished(everything()[0], "A rank sends 12.5 MiB.")
    data, metadata = picture._repr_mimebundle_()
    assert data["text/plain"] == "A rank sends 12.5 MiB." and metadata["image/png"]["width"] == 400
    with pytest.raises(SpecError, match="needs alt"):
        finished(everything()[0], "")


def test_words_are_legible_and_the_readers_own_style_does_not_reach_them():
    import matplotlib

    with matplotlib.rc_context({"font.size": 4, "text.color": "white", "figure.dpi": 50}):
        picture, _ = everything()
    for text in picture.findobj(Text):
        if text.get_text():
            assert text.get_fontsize() >= SMALL
    assert round(picture.get_figwidth() * picture.dpi) == 400


@pytest.mark.parametrize("color", [*PALETTE, WHITE, PANEL])
def test_words_stand_out_from_the_colour_of_their_box(color):
    _, ax = sketch(60)
    box(ax, 10, 10, 100, 30, "words", color)
    (text,) = ax.texts
    assert contrast(text.get_color(), color) >= 4.5
    assert contrast(INK, PANEL) >= 4.5


def test_what_cannot_be_read_is_refused():
    _, ax = sketch(100)
    with pytest.raises(SpecError, match="its box 30 × 26: make the box larger"):
        box(ax, 10, 10, 30, 26, "attention")
    picture, ax = sketch(100)
    label(ax, 380, 20, "leaves the page")
    with pytest.raises(SpecError, match="leaves the drawing of 400 × 100 pixels"):
        finished(picture, "…")
    picture, ax = sketch(100)
    label(ax, 10, 20, "one")
    label(ax, 20, 24, "two")
    with pytest.raises(SpecError, match="'one' and 'two' lie on one another"):
        finished(picture, "…")


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=8), st.floats(1, 4))
def test_a_strips_pieces_are_as_long_as_their_sizes_and_leave_no_gap(sizes, scale):
    _, ax = sketch(60)
    end = strip(ax, 10, 10, [(size, "", WHITE) for size in sizes], scale)
    assert [patch.get_width() for patch in ax.patches] == pytest.approx([size * scale for size in sizes])
    starts = [patch.get_x() for patch in ax.patches]
    ends = [x + patch.get_width() for x, patch in zip(starts, ax.patches, strict=True)]
    assert [*starts[1:], end] == pytest.approx(ends)

"""Pictures show the report's numbers, can be read on any page, and leave nothing behind."""

import base64
import itertools
import subprocess
import sys
from io import BytesIO

import matplotlib
import nbformat
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.text import Text
from nbclient import NotebookClient

from llmlab import plots
from llmlab.base.errors import SpecError
from llmlab.base.units import GiB, MiB
from llmlab.report import PARTS, Report
from llmlab.specs.run import Training

RUN = Training(micro_batch=8)
T4 = 15_637_086_208
SIZES = {"weights": GiB // 2, "gradients": GiB // 2, "optimizer": GiB, "activations": 6 * GiB, "logits": 2 * GiB}


STEP_TIME = {
    "step_seconds": 2.0, "time_hidden": {"data": 0.25},
    "time": {"products": 0.9, "attention": 0.3, "tensor": 0.3, "data": 0.25, "optimizer": 0.25},
    "layer_time": {"forward": 0.01, "backward": 0.02, "gather": 0.015, "reduce": 0.002, "tensor": 0.003},
}  # fmt: skip


def report(source="estimated", **values):
    default = {"model": "gpt2", "run": RUN, "gpu": "T4", "capacity": T4, "outcome": "fits"}
    provenance = {"citation": "a paper"} if source in ("measured", "published") else {}
    return Report(source=source, **{**default, **provenance, **values})


def with_parts(parts=SIZES, **values):
    return report(parts=parts, peak_allocated=sum(parts.values()), **values)


def step():
    """A step of 40 forward, 40 backward and 3 optimizer events whose peak, 8 GiB, is the last event of forward."""
    points = [("load", {"weights": GiB})]
    points += [("forward", {"weights": GiB, "activations": i * GiB // 10}) for i in range(1, 40)]
    points += [("forward", {"weights": GiB, "activations": 4 * GiB, "logits": 3 * GiB})]
    points += [("backward", {"weights": GiB, "activations": i * GiB // 10, "gradients": GiB}) for i in range(40, 0, -1)]
    points += [("optimizer", {"weights": GiB, "gradients": GiB, "optimizer": 2 * GiB})] * 3
    return tuple(points)


def all_pictures():
    timeline = report("simulated", timeline=step())
    stray = report("published", peak_allocated=9 * GiB, peak_reserved=10 * GiB)
    lost = report("measured", outcome="out of memory", where="backward")
    return {
        "parts": plots.plot_parts([with_parts(), stray, lost]),
        "every part": plots.plot_parts([with_parts(dict.fromkeys(PARTS, GiB))]),
        "timeline": plots.plot_timeline(timeline),
        "time": plots.plot_time(report(**STEP_TIME)),
        "curve": plots.plot_curve(
            [1, 2, 4], {"eager": [1, 4, 16], "workspace": [1, None, 1]}, "tokens", "GiB", log=True
        ),
    }


def bars(picture):
    return [patch for patch in picture.axes[0].patches if not patch.get_hatch()]


def words(picture):
    return [text.get_text() for text in picture.findobj(Text) if text.get_text() and text.get_visible()]


def rgba(picture):
    import matplotlib.image

    png = base64.b64decode(picture._repr_mimebundle_()[0]["image/png"])
    return matplotlib.image.imread(BytesIO(png))


# ---- what they show


def test_the_time_of_a_step_is_drawn_in_two_lanes_that_add_up():
    picture = plots.plot_time(report(**STEP_TIME))
    layer, whole = ([(p.get_x(), p.get_width(), round(p.get_y() + 0.36)) for p in ax.patches] for ax in picture.axes)
    assert max(x + width for x, width, _ in whole) == pytest.approx(2.0)
    assert sum(width for _, width, lane in whole if lane == 0) == pytest.approx(0.9 + 0.3 + 0.25)
    # Forward's gather, 15 ms, is longer than the 10 ms computed meanwhile; tensor parallelism waits for both.
    sent = sorted(each for each in layer if each[2] == 1)
    assert sent[0] == (0, pytest.approx(15), 1) and sent[1][:2] == (pytest.approx(15), pytest.approx(1))
    assert "sent: tensor 300 ms, data, hidden 250 ms, data 250 ms" in picture.alt
    assert {"optimizer", "data, hidden", "gather"} < set(words(picture)) and "experts" not in words(picture)
    assert picture.get_size_inches()[0] <= 4  # 400 pixels: not made smaller on a phone


def test_a_time_that_is_not_divided_is_not_drawn():
    with pytest.raises(SpecError, match=r"not divided; lab\.estimate"):
        report("simulated").plot_time()


def test_the_segments_of_a_bar_are_the_parts_in_order_and_end_at_the_peak():
    segments = bars(plots.plot_parts([with_parts()]))
    assert [patch.get_width() * GiB for patch in segments] == list(SIZES.values())
    assert [patch.get_x() for patch in segments] == [0, 0.5, 1, 2, 8]
    assert "10.00 GiB" in words(plots.plot_parts([with_parts()]))


@given(st.dictionaries(st.sampled_from(PARTS), st.integers(1, 200 * GiB), min_size=1))
@settings(max_examples=15, deadline=None)
def test_any_parts_stack_to_their_sum_and_each_is_named(parts):
    picture = plots.plot_parts([with_parts(parts)])
    unit = GiB if sum(parts.values()) >= GiB // 4 else MiB
    last = bars(picture)[-1]
    assert (last.get_x() + last.get_width()) * unit == pytest.approx(sum(parts.values()))
    keys = {text.get_text() for text in picture.legends[0].get_texts()}
    assert keys == set(parts)


def test_a_part_has_one_colour_in_every_picture():
    everything = dict.fromkeys(PARTS, GiB)
    in_bars = [patch.get_facecolor() for patch in bars(plots.plot_parts([with_parts(everything)]))]
    timeline = report("simulated", timeline=(("load", everything), ("forward", everything)))
    layers = plots.plot_timeline(timeline).axes[0].collections
    in_layers = [tuple(layer.get_facecolor()[0]) for layer in layers]
    assert in_bars == in_layers and len(set(in_bars)) == len(PARTS)
    line = plots.plot_curve([1, 2], {"eager": [1, 2], "logits": [2, 3]}, "tokens", "GiB").axes[0].lines[1]
    assert matplotlib.colors.to_rgba(line.get_color()) == in_bars[PARTS.index("logits")]


def test_the_capacity_line_stands_at_the_device_memory():
    lines = plots.plot_parts([with_parts(), with_parts(source="simulated")]).axes[0].lines
    assert [line.get_xdata()[0] * GiB for line in lines] == [T4, T4]


def test_a_device_far_larger_than_the_run_is_named_and_does_not_flatten_the_bar():
    picture = plots.plot_parts([with_parts({"weights": GiB}, gpu="H200", capacity=150 * GiB)])
    assert picture.axes[0].get_xlim()[1] < 2
    assert "H200 has 150.00 GiB →" in words(picture)


def test_a_run_that_did_not_fit_is_drawn_beyond_the_line_of_the_device():
    large = {"weights": 12 * GiB, "activations": 6 * GiB}
    picture = plots.plot_parts([with_parts(large, source="simulated", outcome="out of memory", needed=19 * GiB)])
    assert sum(patch.get_width() for patch in bars(picture)) == 18 > T4 / GiB
    assert any("out of memory" in text for text in words(picture))


def test_what_is_not_known_is_said_and_not_drawn():
    picture = plots.plot_parts([report("measured", outcome="out of memory", where="backward")])
    assert bars(picture) == []
    assert any("peak not known" in text and "out of memory" in text for text in words(picture))
    picture = plots.plot_parts([report("published", peak_allocated=9 * GiB)])
    assert [patch.get_width() for patch in bars(picture)] == [9] and "parts not known" in words(picture)
    picture = plots.plot_parts([report("published", peak_allocated=9 * GiB, parts={"weights": 2 * GiB})])
    assert [patch.get_width() for patch in bars(picture)] == [2, 7] and "parts not known" in words(picture)


def test_a_small_run_is_shown_in_mib():
    assert plots.plot_parts([with_parts({"weights": 10 * MiB})]).axes[0].get_xlabel() == "memory (MiB)"


def test_the_timeline_marks_the_peak_and_names_each_phase():
    picture = plots.plot_timeline(report("simulated", timeline=step()))
    assert "peak 8.00 GiB in forward" in words(picture)
    assert {"load", "forward", "backward", "optimizer"} <= set(words(picture))
    top = max(layer.get_paths()[0].vertices[:, 1].max() for layer in picture.axes[0].collections)
    assert top == 8
    boundaries = [line.get_xdata()[0] for line in picture.axes[0].lines if line.get_linestyle() == ":"]
    assert boundaries == [1, 41, 81]


def test_a_long_timeline_keeps_its_peak():
    spike = 123_456
    points = [("forward", {"activations": GiB})] * 200_000
    points[spike] = ("forward", {"activations": 9 * GiB})
    picture = plots.plot_timeline(report("simulated", timeline=tuple(points)))
    assert "peak 9.00 GiB in forward" in words(picture)
    assert len(picture.axes[0].collections[0].get_paths()[0].vertices) < 5 * plots.timeline.POINTS


def test_a_report_without_timeline_says_which_verb_has_one():
    with pytest.raises(SpecError, match=r"has no timeline.*lab\.measure"):
        plots.plot_timeline(with_parts())


@pytest.mark.parametrize(
    ("x", "series", "ylabel", "log", "message"),
    [
        ([1, 2], {"a": [1]}, "GiB", False, "1 values for 2 points"),
        ([1, 2], {"a": [0, 1]}, "GiB", True, "value <= 0"),
        ([1], {}, "GiB", False, "0 series"),
        ([1], {str(i): [1] for i in range(8)}, "GiB", False, "8 series"),
        ([1], {"a": [1]}, "", False, "name both axes"),
    ],
)
def test_a_curve_of_what_cannot_be_is_refused(x, series, ylabel, log, message):
    with pytest.raises(SpecError, match=message):
        plots.plot_curve(x, series, "tokens", ylabel, log)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=7))
@settings(max_examples=20, deadline=None)
def test_names_at_the_ends_of_curves_do_not_overlap(ends):
    picture = plots.plot_curve([1, 2], {f"line {i}": [0, end] for i, end in enumerate(ends)}, "tokens", "GiB")
    picture.draw_without_rendering()
    boxes = sorted((text.get_window_extent() for text in picture.axes[0].texts), key=lambda box: box.y0)
    assert all(low.y1 <= high.y0 + 1 for low, high in itertools.pairwise(boxes))


# ---- how they read


def test_every_axis_with_numbers_has_a_unit():
    for name, picture in all_pictures().items():
        for ax in picture.axes:
            assert any(unit in ax.get_xlabel() + ax.get_ylabel() for unit in ("GiB", "MiB", "time (", "(ms)")), name


def test_text_is_legible_on_its_ground_and_the_ground_is_opaque():
    for name, picture in all_pictures().items():
        for text in picture.findobj(Text):
            if text.get_text() and not text.get_gid():  # a text with an id stands on a segment: checked below
                assert plots.canvas.contrast(text.get_color(), plots.canvas.PANEL) >= 4.5, (name, text.get_text())
                assert text.get_fontsize() >= 9, (name, text.get_text())
        pixels = rgba(picture)
        assert pixels.shape[-1] == 3 or np.all(pixels[..., 3] == 1), name


def test_text_on_a_segment_is_legible_on_that_colour():
    picture = plots.plot_parts([with_parts(dict.fromkeys(PARTS, GiB))])
    written = [text for text in picture.axes[0].texts if text.get_gid() in PARTS]
    assert len(written) == len(PARTS)  # eight equal parts: each has room for its size
    for text in written:
        assert plots.canvas.contrast(text.get_color(), plots.canvas.COLORS[text.get_gid()]) >= 4.5, text.get_gid()


def test_colours_differ_for_a_reader_without_red_or_green_cones():
    # Viénot, Brettel and Mollon 1999, table of linear-RGB projections for protanopia and deuteranopia.
    lms = np.array([[17.8824, 43.5161, 4.11935], [3.45565, 27.1554, 3.86714], [0.0299566, 0.184309, 1.46709]])
    protan = np.array([[0, 2.02344, -2.52581], [0, 1, 0], [0, 0, 1]])
    deutan = np.array([[1, 0, 0], [0.494207, 0, 1.24827], [0, 0, 1]])
    colors = np.array([matplotlib.colors.to_rgb(color) for color in plots.canvas.COLORS.values()]) ** 2.2
    for loss in (protan, deutan):
        seen = np.clip(colors @ (np.linalg.inv(lms) @ loss @ lms).T, 0, 1) ** (1 / 2.2)
        gaps = [np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)]
        assert min(gaps) > 0.14  # their grey #999999 and purple are 0.05 apart


def test_the_readers_own_style_does_not_reach_the_picture():
    plain = rgba(all_pictures()["parts"])
    with matplotlib.rc_context(
        {"text.color": "white", "xtick.color": "white", "figure.facecolor": "black", "font.size": 4}
    ):
        assert np.array_equal(rgba(all_pictures()["parts"]), plain)
        assert matplotlib.rcParams["text.color"] == "white"  # and theirs is left as it was


def test_the_alternative_text_says_what_the_picture_shows():
    alt = plots.plot_parts([with_parts()]).alt
    for said in ("gpt2 on T4, estimated", "peak 10.00 GiB", "of 14.56 GiB", "activations 6.00 GiB", "fits"):
        assert said in alt
    for name, picture in all_pictures().items():
        assert len(picture.alt) > 40 and repr(picture) == picture.alt, name
        data, metadata = picture._repr_mimebundle_()
        assert data["text/plain"] == picture.alt and metadata["image/png"]["alt"] == picture.alt
        assert metadata["image/png"]["width"] == (400 if name == "time" else 700)  # a phone, or held sideways


def test_the_same_report_gives_the_same_bytes():
    one, two = (plots.plot_parts([with_parts()])._repr_mimebundle_() for _ in range(2))
    assert one == two


# ---- where they show


def test_no_figure_is_left_open_and_pyplot_is_not_imported():
    code = (
        "import sys; from llmlab.report import Report; from llmlab.specs.run import Training; "
        "Report(source='estimated', model='m', run=Training(), parts={'weights': 5}, peak_allocated=5).plot()"
        "._repr_mimebundle_(); print('matplotlib.pyplot' in sys.modules, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("magic", ["", "%matplotlib inline\nimport matplotlib.pyplot as plt"])
def test_a_notebook_shows_a_plot_once_with_its_alternative_text(magic):
    code = (
        "from llmlab.report import Report\nfrom llmlab.specs.run import Training\n"
        "report = Report(source='estimated', model='gpt2', run=Training(), parts={'weights': 5}, peak_allocated=5)\n"
        "report.plot()"
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(f"{magic}\n{code}")])
    NotebookClient(notebook, timeout=600, kernel_name="python3").execute()
    (output,) = notebook.cells[0].outputs
    assert output.output_type == "execute_result"
    assert base64.b64decode(output.data["image/png"]).startswith(b"\x89PNG")
    assert "gpt2" in output.data["text/plain"] and output.metadata["image/png"]["alt"] == output.data["text/plain"]


def test_segments_say_what_is_allocated_and_what_reserved():
    from llmlab.simulation.allocator.caching import Allocator

    allocator = Allocator()
    kept = allocator.malloc(3 * MiB)
    allocator.free(allocator.malloc(5 * MiB))
    picture = plots.plot_segments({"one": allocator.segments()})
    assert kept and picture.alt == "Segments of an allocator. one: 3.00 MiB allocated in 1 segments of 20.00 MiB."
    with pytest.raises(SpecError, match="no segments"):
        plots.plot_segments({})

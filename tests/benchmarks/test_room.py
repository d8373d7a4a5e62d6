"""The margins of formulas/verdict.py are the percentiles of the draws, and decide published steps as the page says."""

import sys
from pathlib import Path

import pytest

import llmlab as lab
from llmlab.formulas.verdict import KINDS

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import room
import room_draws


@pytest.fixture(scope="module")
def found():
    return room.by_kind()


def test_each_margin_is_the_95th_percentile_of_its_kind(found):
    for sort in KINDS:
        ratios = found[sort]
        assert len(ratios) == pytest.approx(sort.runs, rel=0.05)  # a formula may move a draw that is near a limit
        assert room.quantile(each.least for each in ratios) == pytest.approx(sort.holes, abs=0.005)


def test_percentiles_of_one_half_cover_the_other(found):
    assert all(room.covered(found[sort]) >= 0.9 for sort in KINDS)


def test_a_step_needs_no_less_room_than_it_allocates_and_no_more_than_it_reserves():
    for row in room_draws.rows():
        assert row.allocated <= row.least <= row.reserved


def test_a_row_of_the_file_is_read_back_whole():
    draw = room_draws.Draw("gpt2", "T4", lab.Training(3, 300))
    for number in range(40):
        drawn = room_draws.drawn(number) or draw
        row = room_draws.Row(number, drawn, 9 << 20, 12 << 20, 10 << 20, 9 << 20, None)
        if drawn is not draw:
            assert room_draws._row(room_draws.cells_of(row)) == row


def test_no_published_step_that_ran_out_on_one_gpu_fits_and_half_as_many_that_ran_are_unknown():
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in room.of_published() if line.startswith("|")]
    said = {what: [int(each) for each in cells] for what, *cells in lines[2:]}
    assert said["ran out of memory, by kind"][0] == said["ran, by kind"][1] == 0
    assert 2 * said["ran, by kind"][2] <= said["ran, 1.25 for all"][2]

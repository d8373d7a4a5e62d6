"""The margins of formulas/verdict.py are the percentiles of the draws, and decide published steps as the page says."""


import pytest

import llmlab as lab
from benchmarks.memory import room, room_draws
from benchmarks.memory.load_orders import requests_of
from llmlab.formulas.verdict import DRAWN


@pytest.fixture(scope="module")
def found():
    return room.by_kind()


def test_each_margin_is_the_95th_percentile_of_its_kind(found):
    for sort in DRAWN:
        ratios = [each.least for each in found[sort]]
        assert len(ratios) >= 40
        assert room.quantile(ratios) == pytest.approx(sort.holes, abs=0.005)


def test_percentiles_of_one_half_cover_the_other(found):
    assert all(room.covered(found[sort]) >= 0.9 for sort in DRAWN)


def test_steps_on_several_gpus_need_no_more_than_those_of_their_kind(found):
    several = [each.least <= sort.holes for sort in DRAWN for each in found[sort] if each.number >= room_draws.SEVERAL]
    assert len(several) >= 100 and sum(several) >= 0.9 * len(several)


def test_a_step_needs_no_less_room_than_it_allocates_and_no_more_than_it_reserves():
    for row in room_draws.rows():
        assert row.allocated <= row.least <= row.reserved


def test_a_row_of_the_file_is_read_back_whole():
    for number in (*range(40), *range(room_draws.SEVERAL, room_draws.SEVERAL + 10)):
        if drawn := room_draws.drawn(number):
            row = room_draws.Row(number, drawn, 9 << 20, 12 << 20, 10 << 20, 9 << 20, None)
            assert room_draws._row(room_draws.cells_of(row)) == row


def test_with_checkpointing_the_first_step_leaves_the_holes_that_later_steps_need():
    run = lab.Training(32, 1024, "autocast-fp16", checkpointing="full")
    asked = requests_of("HuggingFaceTB/SmolLM2-135M", run, "A100-40GB")
    first = [index for index, (what, _) in enumerate(asked.before) if what == "reset_peak"][-1]
    one, both = (room_draws.least_room(asked._replace(before=asked.before[:end]), []) for end in (first, None))
    assert one.least / one.allocated < 1.03
    assert both.least / both.allocated > 1.2


def test_no_published_step_that_ran_out_fits():
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in room.of_published() if line.startswith("|")]
    out = [cells for cells in lines if cells[0].startswith("ran out")]
    assert out and all(fits.endswith("→ 0") for _, _, fits, *_ in out)

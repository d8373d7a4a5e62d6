"""The running job of part one: it begins three times too large for a T4, and ends on it."""

import pytest

import llmlab as lab
from llmlab.course.job import GPU, MODEL, RUNGS, job, plot_ladder, reports


def test_the_job_begins_out_of_memory_and_ends_with_room():
    room = lab.gpu(GPU).room(1)
    peaks = {chapter: report.peak_allocated for chapter, report in reports().items()}
    assert peaks["02-memory-anatomy"] > 2.5 * room
    assert peaks["07-optimizers"] > room > peaks["08-checkpointing"] >= peaks["10-flash-attention"]


def test_every_chapter_trains_on_the_same_tokens_per_update():
    assert {job(rung.chapter).micro_batch * job(rung.chapter).accumulation for rung in RUNGS} == {4}


def test_the_ladder_ends_with_the_chapter_that_it_is_drawn_for():
    alt = plot_ladder("06-accumulation").alt
    assert "micro-batches" in alt and "Adafactor" not in alt
    assert f"{lab.estimate(MODEL, job('06-accumulation'), GPU).step_seconds:.1f} s" in alt


def test_a_chapter_without_a_change_is_refused():
    with pytest.raises(LookupError, match="05-flops"):
        job("05-flops-and-time")

"""The running jobs of the book: part one begins three times too large for a T4, part two twice too large for H100s."""

from dataclasses import replace

import pytest

import llmlab as lab
from llmlab.course import job as course_job
from llmlab.course.job import GPU, H100, MODEL, MODEL_8B, RUNGS, RUNGS_8B, Rung, job, jobs, plot_ladder, reports, states


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
    with pytest.raises(LookupError, match="05-flops"):
        plot_ladder("05-flops-and-time")


def test_part_two_begins_with_eight_copies_that_do_not_fit():
    room = lab.gpu(H100).room(1)
    first = lab.estimate(MODEL_8B, job("11-data-parallel"), H100)
    assert first.peak_allocated > 1.8 * room
    assert lab.estimate(MODEL_8B, job("12-zero"), H100).peak_allocated < room
    # One GPU alone holds as much: data parallelism divides nothing.
    alone = lab.estimate(MODEL_8B, replace(job("11-data-parallel"), dp=1), H100)
    assert alone.peak_allocated > first.peak_allocated - 0.15 * first.peak_allocated


def test_parts_keep_their_own_chapters_models_and_gpus():
    assert set(jobs("12-zero")) == {rung.chapter for rung in RUNGS_8B} and job("12-zero").zero == 3
    assert {(state.model, state.gpu) for state in states("11-data-parallel")} == {(MODEL_8B, H100)}
    assert {(state.model, state.gpu) for state in states("06-accumulation")} == {(MODEL, GPU)}
    assert len(jobs()) == len(RUNGS)


def test_the_ladder_of_part_two_has_tokens_per_gpu():
    report = lab.estimate(MODEL_8B, job("11-data-parallel"), H100)
    alt = plot_ladder("11-data-parallel").alt
    assert f"{report.tokens_per_second / 8:,.0f} tokens/s" in alt and "ZeRO" not in alt
    assert plot_ladder("12-zero").alt.count("tokens/s") == 5


def test_a_rung_may_change_the_model_and_the_gpu(monkeypatch):
    large = Rung("99-large", "70B on 64 H200", {"dp": 64}, "meta-llama/Llama-3.1-70B", "H200")
    monkeypatch.setattr(course_job, "PARTS", ((course_job.START_8B, (*RUNGS_8B, large)),))
    states.cache_clear()
    try:
        last = states("99-large")[-1]
        assert (last.model, last.gpu, last.run.dp, last.run.zero) == (large.model, "H200", 64, 3)
        alt = plot_ladder("99-large").alt
        assert "Llama-3.1-8B and Llama-3.1-70B" in alt and "H200" in alt
    finally:
        states.cache_clear()

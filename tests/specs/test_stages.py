"""How layers are divided over pipeline stages."""

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st

import llmlab as lab
from llmlab.base.errors import SpecError
from llmlab.base.units import show_bytes
from llmlab.course.techniques.pipeline_schedules import in_flight, schedule
from llmlab.formulas.memory.moments import layers_in_flight, micro_batches_in_flight, training_moments
from llmlab.formulas.memory.states import states
from llmlab.specs import stages
from llmlab.specs.stages import stage_layers

LLAMA = "meta-llama/Llama-3.1-405B"


@given(st.integers(1, 200), st.integers(1, 40))
def test_every_layer_is_in_one_stage_and_no_stage_is_empty_or_two_layers_longer(layers, stages):
    try:
        counts = stage_layers(layers, stages)
    except SpecError as error:
        assert stages > (layers + 2) // 2 and f"give pp={(layers + 2) // 2} at most" in str(error)
        return
    assert sum(counts) == layers and len(counts) == stages and min(counts) >= 1
    if layers % stages:  # embedding and head count as a layer each
        whole = [counts[0] + 1, *counts[1:-1], counts[-1] + 1]
        assert max(whole) - min(whole) <= 1 and whole == sorted(whole, reverse=True)
    else:
        assert set(counts) == {layers // stages}


def test_llama_3_leaves_a_layer_out_of_the_first_and_the_last_stage():
    """arXiv 2407.21783, section 3.3.2: 126 layers on 16 pipeline ranks."""
    assert stage_layers(126, 16) == (7, *[8] * 14, 7)


@pytest.mark.parametrize("pp", [1, 2, 8, 16, 64])
def test_all_stages_together_hold_the_model_once(pp):
    spec, run = lab.model(LLAMA), lab.Training(pp=pp, precision="mixed-bf16", accumulation=pp)
    held = [states(spec, run, stage).trained for stage in range(pp)]
    norms = (pp - 1) * spec.hidden  # the last norm is counted with the blocks, a share a stage
    assert sum(held) == pytest.approx(spec.parameters, abs=norms + pp)


def test_the_first_stage_holds_what_1f1b_keeps_in_flight():
    spec = lab.model(LLAMA)
    shape = {"seq_len": 4096, "precision": "bf16", "tp": 8}
    alone, piped = lab.Training(**shape), lab.Training(**shape, pp=16, accumulation=32)

    def kept(run, stage=0):
        return training_moments(spec, run, None, stage=stage)[1].parts["activations"]  # without what is outside blocks

    block = kept(alone) / spec.layers
    for stage in (0, 1, 15):
        layers = stage_layers(spec.layers, 16)[stage]
        assert micro_batches_in_flight(piped, stage) == 16 - stage
        assert kept(piped, stage) == pytest.approx(block * layers * (16 - stage), rel=1e-6)
    few = lab.Training(**shape, pp=16, accumulation=3)
    assert micro_batches_in_flight(few) == 3


def test_more_stages_than_layers_are_refused_without_a_list_of_them(monkeypatch):
    monkeypatch.setattr(stages, "_counts", lambda *_: pytest.fail("lists the stages"))
    with pytest.raises(SpecError, match="pp=1000000000 leaves a stage of gpt2 without any of its 12 layers"):
        lab.estimate("gpt2", lab.Training(pp=10**9), "T4")


def test_a_report_is_of_rank_0_and_whether_it_fits_of_every_stage():
    """With few micro-batches the last stage holds the most: it has the logits."""
    run = lab.Training(precision="bf16", seq_len=8192, pp=2, accumulation=1, optimizer="sgd")
    spec = lab.model("meta-llama/Llama-3.1-8B")
    report = lab.estimate(spec, run, "A100-40GB")
    peaks = [max(m.total for m in training_moments(spec, run, lab.gpu("A100-40GB"), stage=s)) for s in (0, 1)]
    assert report.peak_allocated == peaks[0] < lab.gpu("A100-40GB").memory < peaks[1]
    assert report.outcome == "out of memory" and "stage 1" in report.where
    (note,) = [note for note in report.notes if note.code == "fullest-stage"]
    assert "stage 1" in note and show_bytes(peaks[1]) in note


@given(st.integers(2, 6), st.integers(1, 4), st.integers(2, 4), st.sampled_from(["1f1b", "gpipe", "interleaved"]))
def test_what_is_in_flight_is_what_the_schedule_of_chapter_15_holds(pp, count, virtual_stages, name):
    """At the first backward, where it is the most: all of a rank's stages together, its first, and its last."""
    interleaved = name == "interleaved"
    accumulation, virtual_stages = (count * pp, virtual_stages) if interleaved else (count, 1)
    run = lab.Training(pp=pp, accumulation=accumulation, virtual_stages=virtual_stages,
                       schedule="gpipe" if name == "gpipe" else "1f1b")  # fmt: skip
    layers = 2 * virtual_stages
    plan = schedule(name, pp, accumulation, virtual_stages)
    for stage, (ops, micro_batches) in enumerate(zip(plan, in_flight(plan), strict=True)):
        assert layers_in_flight(run, stage, layers) == pytest.approx(micro_batches * layers)
        begun = [op.stage for op in takewhile(lambda op: op.kind == "F", ops)]
        assert micro_batches_in_flight(run, stage) == begun.count(stage)
        assert micro_batches_in_flight(run, stage, last=True) == begun.count(stage + (virtual_stages - 1) * pp)

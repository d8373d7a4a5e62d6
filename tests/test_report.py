"""Reports and comparisons: the data, and what is printed of it."""

import copy
import json
import pickle
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import llmlab as lab
from llmlab.base.notes import Note
from llmlab.base.units import GiB, MiB, show_bytes, show_count, show_seconds
from llmlab.hardware.links import cluster
from llmlab.report import PARTS, TRAINING_PHASES

sizes = st.integers(0, 2**45)
reports = st.builds(
    lab.Report,
    source=st.sampled_from(["estimated", "simulated"]),
    model=st.text(min_size=1, max_size=30),
    run=st.builds(lab.Training, micro_batch=st.integers(1, 64)) | st.builds(lab.Inference),
    gpu=st.none() | st.just("T4"),
    outcome=st.sampled_from(["fits", "out of memory", "unknown"]),
    peak_allocated=st.none() | sizes,
    needed=st.none() | sizes,
    phases=st.dictionaries(st.sampled_from(TRAINING_PHASES), sizes),
    parts=st.dictionaries(st.sampled_from(PARTS), sizes),
    detail=st.dictionaries(st.sampled_from(PARTS), st.dictionaries(st.text(max_size=9), sizes)),
    step_seconds=st.none() | st.floats(0, 1e6),
    notes=st.lists(st.builds(Note, st.text(max_size=9), st.text(max_size=20))).map(tuple),
    timeline=st.lists(st.tuples(st.sampled_from(TRAINING_PHASES), st.dictionaries(st.sampled_from(PARTS), sizes))).map(
        tuple
    ),
)


@given(reports)
def test_a_report_survives_the_way_through_json(report):
    back = lab.Report.from_json(report.to_json())
    assert back == report and [note.code for note in back.notes] == [note.code for note in report.notes]


def test_a_note_keeps_its_code_on_the_way_to_another_process_and_in_json():
    (note,) = notes = (Note("context-unknown", "Nobody measured it."),)
    for other in (pickle.loads(pickle.dumps(note)), copy.deepcopy(note), replace(note_report(notes)).notes[0]):
        assert (other, other.code) == ("Nobody measured it.", "context-unknown")
    data = note_report(notes).to_dict()
    assert data["notes"] == [{"code": "context-unknown", "text": "Nobody measured it."}]
    old = {**data, "notes": ["a sentence of an older record"]}
    assert [(note, note.code) for note in lab.Report.from_dict(old).notes] == [("a sentence of an older record", "")]


def note_report(notes):
    return lab.Report(source="estimated", model="m", run=lab.Training(), notes=notes)


@given(reports)
def test_every_report_can_be_printed(report):
    assert report.source in str(report) and report.source in report._repr_html_()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "list"),
        ('{"schema": 99}', "schema 99"),
        ('{"schema": 1, "source": "measured"}', "lacks 'model'"),
        ('{"schema": 1, "source": "estimated", "model": "m", "run": {"kind": "training"}, "speed": 3}', "speed"),
        ('{"schema": 1, "source": "guessed", "model": "m", "run": {"kind": "training"}}', "guessed"),
    ],
)
def test_json_that_is_no_report_is_refused_with_the_reason(text, words):
    with pytest.raises(lab.SpecError, match=words):
        lab.Report.from_json(text)


def test_nothing_is_called_measured_without_saying_where():
    with pytest.raises(lab.SpecError, match="provenance"):
        lab.Report(source="measured", model="gpt2", run=lab.Training(), peak_allocated=1)


def test_html_takes_the_pages_colours_and_escapes_names():
    report = lab.Report(source="estimated", model="<b>&", run=lab.Training(), peak_allocated=GiB)
    html = report._repr_html_()
    assert "&lt;b&gt;&amp;" in html and "<b>" not in html
    assert "color" not in html


def test_a_comparison_names_the_error_and_the_part_that_makes_it():
    truth = lab.Report(
        source="measured", model="m", run=lab.Training(), peak_allocated=1000 * MiB,
        parts={"weights": 400 * MiB, "activations": 600 * MiB}, environment={"torch": "2"},
    )  # fmt: skip
    guess = lab.Report(
        source="estimated", model="m", run=lab.Training(), peak_allocated=900 * MiB,
        parts={"weights": 400 * MiB, "activations": 500 * MiB},
    )  # fmt: skip
    both = lab.Comparison((guess, truth))
    assert both.relative_errors() == {"estimated": pytest.approx(-0.1)}
    assert both.explain() == [
        "estimated is -10.0% against measured; the largest gap is the part activations: −100.00 MiB."
    ]
    assert "-10.0%" in str(both) and "-10.0%" in both._repr_html_()
    assert json.loads(both.to_json())["relative_errors"]["estimated"] == pytest.approx(-0.1)


def test_without_a_measurement_the_comparison_says_so():
    guess = lab.Report(source="estimated", model="m", run=lab.Training(), peak_allocated=1)
    assert len(lab.Comparison((guess,)).explain()) == 1 and not lab.Comparison((guess,)).relative_errors()


def test_the_sentence_between_two_runs_is_the_difference_of_their_peaks():
    run = lab.Training(precision="fp16", checkpointing="full")
    both = lab.Comparison(tuple(lab.estimate("gpt2", replace(run, micro_batch=size), "T4") for size in (1, 4)))
    more = both.reports[1].peak_allocated - both.reports[0].peak_allocated
    assert both.names == ["micro_batch 1", "micro_batch 4"]
    assert f"micro_batch 4 needs {show_bytes(more)} more than micro_batch 1" in both.explain()[0]


def test_compare_on_a_card_puts_records_beside_the_estimate():
    records = lab.records("TinyLlama/TinyLlama-1.1B-Chat-v1.0", gpu="T4")
    published = next(r for r in records if r.run.quantization is None)
    both = lab.compare(published.model, published.run, "T4")
    assert [r.source for r in both.reports] == ["estimated", "simulated", "published"]
    assert abs(both.relative_errors()["estimated"]) < 0.1 and abs(both.relative_errors()["simulated"]) < 0.01
    assert "fitcheck" in str(both)


def test_compare_says_why_a_run_is_not_simulated():
    both = lab.compare("gpt2", lab.Training(pp=2, accumulation=2), "A100-80GB")
    assert [r.source for r in both.reports] == ["estimated"]
    assert both.reports[0].notes[-1].code == "not-simulated" and "pp=2" in both.reports[0].notes[-1]
    assert both.reports[0].notes[-1] in str(both)


def test_every_verb_says_which_memory_a_name_was_taken_to_mean():
    run = lab.Training(seq_len=32, pp=2, accumulation=2)  # not simulated
    tiny = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512, "n_positions": 128}
    one = replace(run, pp=1)
    reports = [lab.estimate(tiny, one, "V100"), lab.simulate(tiny, one, "V100"), lab.fix(tiny, one, "V100").report]
    (note,) = {note for report in reports for note in report.notes if note.code == "gpu-memory-assumed"}
    answers = *reports[:2], lab.compare(tiny, run, "V100"), lab.fix(tiny, one, "V100")
    assert all(note in str(answer) for answer in answers)
    named = lab.estimate(tiny, one, "V100-16GB")
    assert named == replace(reports[0], notes=tuple(each for each in reports[0].notes if each != note))


def test_compare_runs_nothing_unless_it_is_asked_to(monkeypatch):
    shape = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 512, "n_positions": 128}
    run = lab.Training(seq_len=32)
    here = "llmlab.hardware.this_machine.pretend.pretended"
    monkeypatch.setattr(here, lambda: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    measured = lab.compare(shape, run, measure=True)
    assert [r.source for r in measured.reports] == ["estimated", "simulated", "measured"]
    monkeypatch.setattr("llmlab.measurement.report.measured", lambda *_: pytest.fail("measured unasked"))
    assert [r.source for r in lab.compare(shape, run).reports] == ["estimated", "simulated"]
    with pytest.raises(lab.SpecError, match=r"gpu='T4'.*one of the two"):
        lab.compare(shape, run, "T4", measure=True)


def test_compare_without_a_card_shows_the_records_of_this_machines(monkeypatch):
    published = next(r for r in lab.records("TinyLlama/TinyLlama-1.1B-Chat-v1.0", gpu="T4") if not r.run.quantization)
    t4 = lab.host().__class__("cuda", "Tesla T4", lab.gpu("T4"), lab.gpu("T4").memory, "CPU", 2, "3.12")
    monkeypatch.setattr("llmlab.verbs.host", lambda: t4)
    monkeypatch.setattr("llmlab.verbs.simulate", lambda *_: published)  # it takes seconds, and another test has it
    both = lab.compare(published.model, published.run)
    assert [r.source for r in both.reports] == ["estimated", "published", "published"] and both.reports[0].gpu == "T4"


def test_the_cluster_reaches_the_estimate_of_a_comparison():
    run = lab.Training(pp=2, accumulation=2, dp=8, precision="mixed-bf16")  # not simulated
    slow, usual = (lab.compare("gpt2", run, "A100-80GB", cluster=nodes).reports[0]
                   for nodes in (cluster("A100-80GB", "Ethernet-10"), None))  # fmt: skip
    assert slow.step_seconds > usual.step_seconds and "8 × Ethernet-10" in " ".join(slow.notes)


def test_activations_are_listed_by_kind_also_where_the_peak_is_elsewhere():
    report = lab.estimate("gpt2", lab.Training(seq_len=16), "A100-80GB")
    assert "activations" not in report.parts, "few tokens: the peak is after backward"
    labels = [label for label, _ in report.rows()]
    assert "(activations, not at the peak)" in labels and "  mlp" in labels


def test_gib_is_two_to_the_thirty():
    assert show_bytes(2**30) == "1.00 GiB" and show_bytes(10**9) == "953.67 MiB" and show_bytes(None) == "–"
    assert show_count(124_439_808) == "124M" and show_count(8_030_261_248) == "8.03B"
    assert [show_seconds(s) for s in (None, 0.25, 3, 600, 7200 * 3)] == ["–", "250 ms", "3 s", "10 min", "6 h"]

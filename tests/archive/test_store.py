"""A record file is read whole or refused by name, and written whole or not at all."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import llmlab as lab
from llmlab.archive import RecordWarning, records, store
from llmlab.archive.chapters import ChapterRun
from llmlab.archive.operators import sweep
from llmlab.archive.published import Figure
from llmlab.base.errors import SpecError
from llmlab.base.notes import Note
from llmlab.report import OUTCOMES, PARTS, Report
from llmlab.specs.run import (
    ATTENTIONS,
    CHECKPOINTING,
    KV_DTYPES,
    OPTIMIZERS,
    PRECISIONS,
    QUANTIZATIONS,
    WEIGHTS,
    Inference,
    LoRA,
    Training,
)


def refused(folder, kind="reports", build=Report.from_dict):
    return store.read(kind, build, folder)[1]


def report(model="gpt2", peak=1000, **more):
    values = {"run": Training(), "gpu": "T4", "environment": {"date": "2026-01-01", "torch": "2.13.0"}, **more}
    return Report(source="measured", model=model, peak_allocated=peak, **values)


def by_model(data):
    return data["model"]


def put(path, *reports):
    store.merge(path, "reports", [r.to_dict() for r in reports], by_model)


def test_what_is_written_is_read(tmp_path):
    path = tmp_path / "t4" / "measured.json"
    put(path, report("a"), report("b"))
    assert records(folder=tmp_path) == [report("a"), report("b")]
    assert path.read_text(encoding="utf-8").count("\n") == 4  # head, one line a record, end


sizes = st.integers(0, 2**50)
names = st.text(min_size=1, max_size=12)
loras = st.builds(LoRA, rank=st.integers(1, 512), targets=st.lists(names, min_size=1, max_size=4).map(tuple))
trainings = st.builds(
    Training,
    micro_batch=st.integers(1, 512),
    seq_len=st.integers(1, 2**20),
    precision=st.sampled_from(PRECISIONS),
    optimizer=st.sampled_from([name for name in OPTIMIZERS if name != "muon"]),  # which takes no adapters
    checkpointing=st.sampled_from(CHECKPOINTING),
    attention=st.sampled_from(ATTENTIONS),
    lora=loras,
    quantization=st.sampled_from(QUANTIZATIONS),
)
inferences = st.builds(
    Inference, batch=st.integers(1, 512), weights=st.sampled_from(WEIGHTS), kv=st.sampled_from(KV_DTYPES)
)
reports = st.builds(
    Report,
    source=st.sampled_from(("measured", "published")),
    model=names,
    run=trainings | inferences,
    gpu=st.none() | names,
    outcome=st.sampled_from(OUTCOMES),
    peak_allocated=st.none() | sizes,
    phases=st.dictionaries(names, sizes),
    parts=st.dictionaries(st.sampled_from(PARTS), sizes),
    step_seconds=st.none() | st.floats(0, 1e6),
    environment=st.dictionaries(names, st.text(), min_size=1),
    notes=st.lists(st.builds(Note, st.text(), st.text())).map(tuple),
)


@settings(max_examples=100, deadline=None)
@given(st.lists(reports, max_size=4))
def test_any_report_survives_the_file(tmp_path_factory, some):
    folder = tmp_path_factory.mktemp("any")
    numbered = {id(one): number for number, one in enumerate(some)}
    store.merge(folder / "r.json", "reports", [r.to_dict() for r in some], lambda data: json.dumps(data))
    read, problems = store.read("reports", Report.from_dict, folder)
    assert problems == [] and all(one in read for one in some) and len(read) <= len(numbered)


def test_a_record_with_the_same_key_takes_the_old_ones_place(tmp_path):
    path = tmp_path / "m.json"
    put(path, report("a", 1), report("b", 2))
    put(path, report("c", 3), report("a", 4))
    read, _ = store.read("reports", Report.from_dict, tmp_path)
    assert [(r.model, r.peak_allocated) for r in read] == [("a", 4), ("b", 2), ("c", 3)]


@pytest.mark.parametrize(
    "content, reason",
    [
        ("", "not readable as JSON"),
        ('{"schema": 1, "kind": "reports", "records": [{"schema"', "not readable as JSON"),
        ("[1, 2]", "a record file is a JSON object"),
        ('{"schema": 2, "kind": "reports", "records": []}', "schema 2; this version of llmlab reads schema 1"),
        ('{"kind": "reports", "records": []}', "schema None"),
        ('{"schema": 1, "kind": "recipes", "records": []}', "kind 'recipes' is not one of"),
        ('{"schema": 1, "kind": "reports"}', "no list 'records'"),
        ('{"schema": 1, "kind": "reports", "records": {}}', "no list 'records'"),
        ("[" * 100_000, "not readable as JSON"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_name_and_the_rest_load(tmp_path, content, reason):
    put(tmp_path / "good.json", report("a"))
    (tmp_path / "bad.json").write_text(content)
    with pytest.warns(RecordWarning, match=r"bad\.json refused") as warned:
        assert records(folder=tmp_path) == [report("a")]
    assert len(warned) == 1
    (problem,) = refused(tmp_path)
    assert problem.path == tmp_path / "bad.json" and problem.entry is None and reason in problem.reason


def test_bytes_that_are_no_text_are_refused(tmp_path):
    (tmp_path / "bad.json").write_bytes(b"\xff\xfe\x00")
    for ask in (records, lab.records):
        with pytest.warns(RecordWarning, match="not readable as JSON") as warned:
            assert ask(folder=tmp_path) == []
        assert warned[0].filename == __file__  # where the reader asked


@pytest.mark.parametrize(
    "damage, reason",
    [
        ({"schema": 99}, "report has schema 99"),
        ({"colour": "red"}, "unknown fields colour"),
        ({"run": {"kind": "training", "precision": "fp17"}}, "precision='fp17' is not one of"),
        ({"run": {"kind": "training", "speed": 3}}, "no field speed"),
        ({"run": {"kind": "walk"}}, "kind of run 'walk'"),
        ({"run": 3}, "TypeError"),
        ({"parts": {"magic": 1}}, "parts magic"),
        ({"environment": {}}, "needs its provenance"),
        ({"source": "heard"}, "source='heard'"),
    ],
)
def test_a_record_that_cannot_be_read_is_refused_by_its_place_and_the_rest_load(tmp_path, damage, reason):
    good = [report("a").to_dict(), report("b").to_dict()]
    content = {"schema": 1, "kind": "reports", "records": [good[0], {**report("x").to_dict(), **damage}, good[1], 7]}
    (tmp_path / "mixed.json").write_text(json.dumps(content))
    with pytest.warns(RecordWarning) as warned:
        assert [r.model for r in records(folder=tmp_path)] == ["a", "b"]
    assert ["mixed.json, record 1 refused" in str(w.message) for w in warned] == [True, False]
    assert ["mixed.json, record 3 refused" in str(w.message) for w in warned] == [False, True]
    first, second = refused(tmp_path)
    assert first.entry == 1 and reason in first.reason
    assert second.entry == 3 and "a record is a JSON object; this is a int" in second.reason


def test_a_file_mended_is_read_again(tmp_path):
    path = tmp_path / "m.json"
    path.write_text("broken")
    with pytest.warns(RecordWarning):
        assert records(folder=tmp_path) == []
    path.unlink()
    put(path, report("a"))
    assert [r.model for r in records(folder=tmp_path)] == ["a"]


def test_a_process_killed_in_the_middle_of_writing_leaves_the_old_file(tmp_path):
    path = tmp_path / "m.json"
    put(path, report("a"))
    before = path.read_bytes()
    code = f"""
        import os
        from pathlib import Path
        from llmlab.archive import store
        def killed(descriptor):  # the text is in the file by now, its name is not
            os.kill(os.getpid(), 9)
        store.os.fsync = killed
        store.write_whole(Path({str(path)!r}), "half")
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=False)
    assert done.returncode == -9
    assert path.read_bytes() == before
    assert records(folder=tmp_path) == [report("a")]  # and the leftover is not taken for a record file


def test_a_broken_file_is_not_written_over(tmp_path):
    path = tmp_path / "m.json"
    path.write_text("somebody's measurements, cut short")
    with pytest.raises(SpecError, match=r"m\.json refused.*nothing written: mend it or move it away"):
        put(path, report("a"))
    assert path.read_text() == "somebody's measurements, cut short"


def test_a_file_of_another_kind_is_not_written_over(tmp_path):
    path = tmp_path / "m.json"
    store.merge(path, "chapters", [{"chapter": "x"}], lambda data: data["chapter"])
    with pytest.raises(SpecError, match="holds chapters, not reports"):
        put(path, report("a"))


def test_a_record_of_a_later_version_survives_our_writing(tmp_path):
    path = tmp_path / "m.json"
    later = {"schema": 2, "something": "new"}
    path.write_text(json.dumps({"schema": 1, "kind": "reports", "records": [later]}))
    put(path, report("a"))
    assert json.loads(path.read_text())["records"] == [later, report("a").to_dict()]


@pytest.mark.skipif(os.name == "nt", reason="Windows names hold no slash to replace")
def test_a_gpus_folder_is_a_plain_name():
    assert store.slug("A100-80GB") == "a100-80gb"
    assert store.slug("NVIDIA GeForce RTX 4090") == "nvidia-geforce-rtx-4090"
    assert store.slug("../../etc/passwd") == "etc-passwd"
    assert store.slug("") == "unknown"


def test_the_users_folder_is_where_it_is_asked_to_be(user_records):
    assert store.user_folder() == user_records and store.output_folder() == user_records
    assert store.folders() == (store.PACKAGE, user_records)


def test_every_record_file_of_the_package_loads():
    builds = {"chapters": ChapterRun.from_dict, "figures": Figure.from_dict, "operators": sweep}
    assert set(store.KINDS) == {"reports", *builds}
    for kind, build in {"reports": Report.from_dict, **builds}.items():
        assert refused(store.PACKAGE, kind, build) == []

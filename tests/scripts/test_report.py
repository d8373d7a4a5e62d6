"""The report of a script."""

import json

from llmlab.base.notes import Note
from llmlab.scripts.report import ScriptReport

GiB, MiB = 2**30, 2**20
REPORT = ScriptReport(
    command="train.py", gpu="T4", capacity=16 * GiB, steps=3, outcome="fits", peak_allocated=4 * GiB,
    peak_reserved=5 * GiB, process=6 * GiB, step_seconds=0.5, step_seconds_low=0.4, step_seconds_high=0.7,
    by_category={"weights": 3 * GiB, "activations": GiB}, host_peak=2 * GiB, host_pinned=GiB,
    host_lines={f"train.py:{line}": line * MiB for line in (40, 30, 20, 10)},
    growth={"model.cache": 2 * MiB, "model.norm": MiB - 1},
    by_module={f"m{number}.*": {"weights": number * MiB, "activations": MiB} for number in range(12)},
    phases={"forward": 4 * GiB}, notes=(Note("a-code", "A note."),),
)  # fmt: skip


def rows(report):
    return dict(report._table().rows)


def test_the_largest_modules_and_lines_are_shown_and_what_grows_by_a_mebibyte():
    shown = rows(REPORT)
    of_peak = [place.removeprefix("of the peak, in ") for place in shown if place.startswith("of the peak")]
    assert of_peak == [f"m{number}.*" for number in range(11, 3, -1)] and shown["of the peak, in m11.*"] == "12.00 MiB"
    assert [place for place in shown if place.startswith("grows")] == ["grows per step, in model.cache"]
    assert [place for place in shown if place.startswith("  created")] == [
        f"  created by train.py:{line}" for line in (40, 30, 20)]  # fmt: skip
    assert shown["  pinned"] == "1.00 GiB" and shown["  80 % interval"] == "400 ms to 700 ms"
    assert "* stands for" in REPORT._table().footer and "A note." in REPORT._table().footer


def test_what_is_not_known_is_not_shown_and_a_limit_is_named():
    plain = ScriptReport(command="train.py", gpu="T4", capacity=16 * GiB, outcome="out of memory", limit=8 * GiB,
                         host_peak=MiB - 1, world_size=2, rank=1)  # fmt: skip
    shown = rows(plain)
    assert shown["outcome"] == "out of memory: more than the limit of 8.00 GiB" and shown["limit"] == "8.00 GiB"
    assert not {"process, with CUDA context", "time per step", "peak reserved", "memory needed"} & set(shown)
    assert not [place for place in shown if "host" in place] and "rank 1 of 2" in plain._table().title
    without = ScriptReport(command="train.py", gpu="T4", capacity=16 * GiB, outcome="out of memory")
    assert rows(without)["outcome"] == "out of memory: more than the GPU has"
    located = ScriptReport(command="train.py", gpu="T4", capacity=16 * GiB, outcome="out of memory", where="aten::mm")
    assert rows(located)["outcome"] == "out of memory" and "to its end: aten::mm." in located._table().footer


def test_json_has_all_of_it():
    data = json.loads(REPORT.to_json())
    assert data["by_module"] == REPORT.by_module and data["limit"] is None
    assert data["notes"] == [{"code": "a-code", "text": "A note."}]

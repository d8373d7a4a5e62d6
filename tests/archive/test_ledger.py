"""The ledger shows the peak, time, versions and date of each recorded chapter, and which chapters have no record."""

import pytest

from llmlab.archive import ledger, record_chapter
from llmlab.archive.chapters import HEADER, NOT_MEASURED, ChapterRun
from llmlab.base.errors import SpecError
from llmlab.base.units import GiB

ENVIRONMENT = {"date": "2026-05-01", "torch": "2.13.0", "llmlab": "0.1.0", "driver": "580.1"}


def test_a_chapter_that_nobody_ran_says_so():
    (row,) = ledger(["tensor-parallel"])
    assert row.run is None and row.cells()[:2] == ("tensor-parallel", NOT_MEASURED)
    assert len(row.cells()) == len(HEADER)
    assert "memory-anatomy" in [row.chapter for row in ledger()]  # as hardware/chapters.toml lists it


def test_a_chapters_run_is_written_down_and_shown(user_records):
    path = record_chapter("memory-anatomy", 3 * GiB, 61.0, "autocast-fp16", gpu="T4", environment=ENVIRONMENT)
    assert path == user_records / "t4" / "chapters.json"
    (row,) = ledger(["memory-anatomy"])
    assert row.cells() == (
        "memory-anatomy", "T4", "3.00 GiB", "61 s", "autocast-fp16", "llmlab 0.1.0, torch 2.13.0, driver 580.1",
        "2026-05-01",
    )  # fmt: skip


def test_one_row_a_machine_newest_first_and_a_newer_run_replaces_the_older():
    for gpu, date, peak in (("T4", "2026-01-01", 1), ("A100-80GB", "2026-02-01", 2), ("T4", "2026-03-01", 3)):
        record_chapter("kernels", peak, 1.0, "fp16", gpu=gpu, environment={**ENVIRONMENT, "date": date})
    rows = ledger(["kernels", "serving"])
    assert [(row.chapter, row.run and (row.run.gpu, row.run.peak_allocated)) for row in rows] == [
        ("kernels", ("T4", 3)),
        ("kernels", ("A100-80GB", 2)),
        ("serving", None),
    ]
    assert {"memory-anatomy", "kernels"} <= {row.chapter for row in ledger()}


def test_this_machine_is_named_where_no_gpu_is_given():
    from llmlab.hardware.this_machine import host
    from llmlab.measurement.record import gpu_of

    record_chapter("memory-anatomy", None, 30.5, "fp32")
    (row,) = ledger(["memory-anatomy"])
    assert row.run.gpu == gpu_of(host())
    assert row.run.environment["date"] and row.run.environment["torch"]
    assert row.cells()[2] == "–"  # a peak that is not known is not made up


@pytest.mark.parametrize(
    "wrong",
    [
        {"peak_allocated": 1.5},
        {"peak_allocated": -1},
        {"peak_allocated": True},
        {"seconds": -1},
        {"seconds": "61"},
        {"dtype": ""},
        {"gpu": ""},
        {"environment": {"torch": "2.13.0"}},
    ],
)
def test_a_run_that_cannot_be_is_not_written(user_records, wrong):
    good = {"chapter": "x", "peak_allocated": 1, "seconds": 1.0, "dtype": "fp16", "gpu": "T4"}
    with pytest.raises(SpecError):
        record_chapter(**{**good, "environment": ENVIRONMENT, **wrong})
    assert list(user_records.rglob("*.json")) == []


def test_a_record_with_other_fields_is_refused():
    with pytest.raises(SpecError, match="has the fields"):
        ChapterRun.from_dict({"chapter": "x", "peak": 3})

"""What must hold between the figures that others measured."""

import pytest

from llmlab.archive import figure, figures, held_out, operator_records, records
from llmlab.archive.store import PACKAGE


@pytest.fixture(scope="module")
def t4():
    return [row for row in records(gpu="T4", source="published", folder=PACKAGE) if not held_out(row)]


def test_a_fine_tuning_step_allocates_less_than_it_reserves_and_less_than_the_card_has(t4):
    assert t4 and all(report.peak_allocated <= report.peak_reserved < report.process < report.capacity for report in t4)


def test_the_peak_of_a_step_is_that_of_its_highest_phase(t4):
    phased = [report for report in t4 if report.phases]
    assert phased and all(list(report.phases) == ["load", "forward", "backward", "optimizer"] for report in phased)
    assert all(report.peak_allocated == max(report.phases.values()) for report in phased)


def test_parts_are_stated_only_where_they_were_published(t4):
    with_parts = [report for report in t4 if report.parts]
    assert {tuple(r.parts) for r in with_parts} == {("weights", "optimizer")}
    for report in with_parts:
        assert sum(report.detail["weights"].values()) == report.parts["weights"]
        assert sum(report.parts.values()) < report.peak_allocated


# ---- steps that were held out


@pytest.fixture(scope="module")
def unseen():
    return [row for row in records(gpu="T4", source="published", folder=PACKAGE) if held_out(row)]


def test_a_reader_sees_which_steps_were_held_out(t4, unseen):
    assert all("held out until 2026-11-21" in str(row) and row.notes[0].startswith("Held out") for row in unseen)
    assert not any("eld out" in str(row) for row in t4)
    assert not {row.citation for row in t4} & {row.citation for row in unseen}
    assert all("fitcheck-llm 0.3.1" in row.citation and "MIT" in row.citation for row in unseen)


# ---- operators


def test_an_operators_memory_is_in_bytes_and_its_time_in_seconds():
    memory, seconds = (operator_records(metric=metric, gpu="A100-80GB") for metric in ("memory", "time"))
    assert {record.unit for record in memory} == {"bytes"} and {record.unit for record in seconds} == {"s"}


def test_operators_are_looked_up_by_what_the_card_is_called():
    assert operator_records(gpu="NVIDIA A100-SXM4-80GB") == operator_records(gpu="A100-80GB") != []
    assert operator_records(gpu="T4") == []
    assert operator_records("cross_entropy", V=4097) == []


# ---- figures


def test_every_figure_has_a_source_a_setup_and_numbers():
    every = figures()
    for found in every.values():
        assert found.source and found.setup and found.what and found.unit
        assert found.values and all(isinstance(value, (int, float)) for value in found.values.values())
    # Memory and file sizes are whole bytes; a coefficient in front of sbh is not a size.
    sizes = [found for found in every.values() if found.unit == "bytes"]
    assert sizes and all(isinstance(value, int) for found in sizes for value in found.values.values())


def test_the_kv_cache_figures_follow_from_the_models_shapes():
    from llmlab.specs.model import model

    for size in ("8B", "70B", "405B"):
        bytes_bf16 = 2 * model(f"meta-llama/Llama-3.1-{size}").kv_elements_per_token
        assert figure("kv-cache-bytes-a-token")[size] == bytes_bf16

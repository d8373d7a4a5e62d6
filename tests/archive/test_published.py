"""What must hold between the figures that others measured."""

import pytest

from llmlab.archive import held_out, operator_records, records
from llmlab.archive.store import PACKAGE


@pytest.fixture(scope="module")
def t4():
    return [row for row in records(gpu="T4", source="published", folder=PACKAGE) if not held_out(row)]


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


def test_operators_are_looked_up_by_what_the_card_is_called():
    assert operator_records(gpu="NVIDIA A100-SXM4-80GB") == operator_records(gpu="A100-80GB") != []
    assert operator_records(gpu="T4") == []
    assert operator_records("cross_entropy", V=4097) == []

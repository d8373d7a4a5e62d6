"""lab.simulator against what others measured of plain PyTorch: single operators on an A100, BERT-large on a V100."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("the simulated device must not be mistaken for a real one", allow_module_level=True)

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))  # scripts, not a package

import bert  # noqa: E402
import operators  # noqa: E402

ROWS = operators.plain_rows()
# The largest row of these has blocks whose rest depends on what the script's process did before.
RESTS = {"embedding": 4096}


def name(record) -> str:
    return f"{record.operator}-{record.mode}-" + "-".join(f"{key}{size}" for key, size in record.sizes.items())


def test_every_published_memory_of_plain_pytorch_is_held():
    assert len(ROWS) == 61
    assert {record.operator for record in ROWS} == set(operators.OPERATORS)


@pytest.mark.parametrize("record", ROWS, ids=name)
def test_an_operator_takes_what_the_a100_measured_to_the_byte(record):
    result = operators.compare(record)
    assert result.unexplained == 0
    if record.sizes.get("D") != RESTS.get(record.operator):
        assert result.error == 0
    else:
        assert 0 <= result.error <= 1 << 20


@pytest.mark.parametrize("setup", bert.SETUPS[:1] + bert.SETUPS[7:8], ids=lambda s: s.name)
def test_bert_large_reserves_what_the_v100_showed_without_its_context(setup):
    assert bert.simulate_training(setup) == pytest.approx(bert.measured(setup), rel=0.03)


def test_the_table_of_bert_is_within_three_percent_but_for_a_row_it_says_is_not():
    text = (BENCHMARKS / "results" / "bert.md").read_text(encoding="utf-8")
    errors = dict(re.findall(r"^\| (.+?) \| [\d,]+ MiB \| [\d,]+ MiB \| ([+-][\d.]+)% \|$", text, re.MULTILINE))
    assert list(errors) == [setup.name for setup in bert.SETUPS]
    far = [setup for setup, error in errors.items() if abs(float(error)) > 3]
    assert far == ["batch 4, fp16"] and "fp16 row at batch 4 is low" in text


def test_the_table_of_operators_leaves_nothing_unexplained():
    text = (BENCHMARKS / "results" / "operators.md").read_text(encoding="utf-8")
    assert "| all | 61 | 53 |" in text and "not explained" not in text

"""Notebooks are compared with their committed outputs: words exactly, numbers within the tolerance of their cell."""

import os
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))  # scripts, not a package

from numeric_outputs import agree, settle_text  # noqa: E402


@pytest.mark.parametrize(("test", "reference", "tolerance", "same"), [
    ("loss 2.345", "loss 2.351", 0.01, True),
    ("loss 2.345", "loss 2.451", 0.01, False),
    ("lost 2.345", "loss 2.345", 0.01, False),
    ("0.6761 at 63", "0.6809 at 63", 0.05, True),
    ("0.6761 at 63", "0.6809 at 32", 0.05, False),
    ("bf16 1.0", "bf17 1.0", 0.5, False),  # a name, not a number
    ("1,024 tokens", "1,025 tokens", 1e-4, False),
    ("1,024 tokens", "1,025 tokens", 0.01, True),
    ("2 steps", "3 steps", 0.05, False),  # a count is not rounded
    ("1.2e-05", "1.3e-05", 0.01, True),  # 1.25e-05, rounded either way
    ("1.2e-05", "1.3e-04", 0.01, False),
    ("[1.0, 2.0]", "[1.0, 2.0, 3.0]", 0.01, False),
    ("nan", "1.0", 0.5, False),
    ("-0.50", "0.50", 0.05, False),
    ("| a   9.99 |", "| a  10.04 |", 0.01, True),  # a column that one digit widens
    ("a  9.99", "a\n9.99", 0.01, True),
    ("a9.99", "a 9.99", 0.01, False),
])  # fmt: skip
def test_numbers_agree_within_the_tolerance_and_words_exactly(test, reference, tolerance, same):
    assert (settle_text(test, reference, tolerance) == reference) is same


def test_a_number_that_disagrees_is_the_only_one_that_is_left():
    assert settle_text("a 1.01, b 2.50", "a 1.02, b 2.00", 0.02) == "a 1.02, b 2.50"


@given(st.floats(1e-6, 1e6), st.floats(-0.05, 0.05), st.integers(1, 6))
def test_what_is_within_the_tolerance_agrees_however_few_digits_are_printed(number, change, digits):
    other = number * (1 + change)
    assert agree(f"{number:.{digits}f}", f"{other:.{digits}f}", 0.0501)


def test_nbval_takes_a_cells_tolerance(tmp_path):
    cells = []
    # Without a tolerance each digit counts.
    for printed, metadata in (("3.14", {}), ("3.15", {}), ("3.15", {"tolerance": 0.01}), ("3.31", {"tolerance": 0.01})):
        outputs = [nbformat.v4.new_output("stream", name="stdout", text=f"loss {printed}\n")]
        more = {"execution_count": 1, "outputs": outputs, "metadata": metadata}
        cells.append(nbformat.v4.new_code_cell("print('loss 3.14')", **more))
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "page.ipynb")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tools.numeric_outputs", "-p", "no:cacheprovider", "--nbval"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        [*command, "--nbval-current-env", "page.ipynb"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 1 and re.findall(r"^FAILED .*Cell (\d)", ended.stdout, re.MULTILINE) == ["1", "3"]
    assert "3.15" in ended.stdout and "3.31" in ended.stdout

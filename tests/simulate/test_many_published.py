"""FSDP2's peaks that others read on 8 GPUs, against the same script on one simulated card."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # scripts, not a package

import torchtitan_script


@pytest.mark.parametrize("run", torchtitan_script.RUNS[:1], ids=lambda run: run.name)
def test_torchtitans_llama_7b_takes_on_each_of_8_gpus_what_was_read(run):
    allocated, reserved = torchtitan_script.simulated(run)
    active, read = torchtitan_script.published(run)
    assert allocated == pytest.approx(active, rel=0.005)
    assert reserved == pytest.approx(read, rel=0.05)
